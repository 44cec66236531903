"""Files of registries over HTTP, by ranged reads that go on where they broke off.

::

    open     GET bytes=0-65535    size, ETag, Last-Modified, and the first bytes: all of a configuration or a header
    read     GET bytes=a-b        If-Match: the ETag; what comes is compared with it again
             broken at c, or 5xx  wait, GET bytes=c-b
    a server that ignores Range:  its one body is kept in a temporary file as it comes, and ranges are read from there

Messages name the file and not its URL, since clients of the adapter read them.

Redirects are not followed, and no proxy of the environment is asked: a request goes to the host that was allowed, or
to the one where a hub or a store of objects has the file (``registry_addresses``).

A question has its time, and every operation on its connection ends with it: connecting, TLS, the head of an answer, its
body. So a server that sends a byte now and then gains nothing by it.
"""

from __future__ import annotations

import os
import re
import ssl
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from typing import TypeVar

import httpx

from manylora.core.adapters.remote import RemoteHead
from manylora.core.adapters.sources import check_registry, resolve_url
from manylora.core.errors import AdapterError, AdapterNotFound, AdapterUnavailable
from manylora.execution.storage.http_deadline import DeadlineTransport
from manylora.execution.storage.registry_addresses import Addresses, BrokenOff, FileAddress, file_of

__all__ = ["FIRST_BYTES", "HttpRegistry"]

FIRST_BYTES = 64 * 1024  # bytes that come with the opening: more than the header of most adapters
CONNECT_S = 10.0
READ_S = 30.0  # longest wait for the next bytes, the first included
RETRIES_S = (0.1, 0.5, 2.0, 5.0)  # waits between attempts; from the first again once bytes have come
PART_BYTES = 256 * 1024  # bytes that are read from the temporary file at once
MAX_IDENTITY_CHARS = 256

ResultT = TypeVar("ResultT")

_CONTENT_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18})")


class HttpRegistry:
    """Asks registries, URLs below ``prefixes``, one question at a time; a ``Registry``.

    A question has ``limit_s``, the next bytes have ``read_s``; ``retries_s`` are the waits between attempts.
    """

    def __init__(
        self,
        prefixes: Sequence[str],
        *,
        limit_s: float = 120.0,
        read_s: float = READ_S,
        retries_s: Sequence[float] = RETRIES_S,
    ) -> None:
        self._prefixes = [check_registry(prefix) for prefix in prefixes]
        self._limit_s = limit_s
        self._retries_s = retries_s
        self._lock = threading.Lock()
        self._addresses = Addresses()
        self._transport = DeadlineTransport(ssl.create_default_context())
        self._body: _WholeBody | None = None  # of the last file whose server ignores ranges
        self._http = httpx.Client(
            transport=self._transport,
            timeout=httpx.Timeout(read_s, connect=CONNECT_S),
            headers={"Accept-Encoding": "identity", "User-Agent": "manylora"},
            follow_redirects=False,
            trust_env=False,
        )

    def allow(self, name: str, url: str) -> str:
        """Return the normal form of a URL; ``AdapterForbidden`` if it lies in no registry."""
        return resolve_url(name, url, self._prefixes)

    def pin(self, name: str, url: str) -> str:
        """Return a folder of a hub in its present commit; see ``Registry.pin``."""
        url = self.allow(name, url)
        return self._try(name, url, lambda: self._addresses.pin(name, url))

    def open(self, name: str, url: str, max_bytes: int) -> RemoteHead:
        """Return the head of a file; see ``Registry.open``."""
        url = self.allow(name, url)
        return self._try(name, url, lambda: self._open(name, url, max_bytes))

    def _try(self, name: str, url: str, ask: Callable[[], ResultT]) -> ResultT:
        """Ask, as often as a server may break off."""
        with self._lock:
            self._transport.deadline = time.monotonic() + self._limit_s
            waits = iter(self._retries_s)
            while True:
                try:
                    return ask()
                except (httpx.TransportError, BrokenOff) as error:
                    self._wait(name, file_of(url), waits, error)

    def read(self, name: str, url: str, head: RemoteHead, offset: int, length: int) -> bytes:
        """Return a range of a file; see ``Registry.read``."""
        return b"".join(self.parts(name, url, head, offset, length))

    def parts(self, name: str, url: str, head: RemoteHead, offset: int, length: int) -> Generator[bytes, None, None]:
        """Yield a range of a file as it comes; raises the errors of ``Registry.read``.

        All other questions wait until it has ended or was closed. It has the time of one question, unless ``extend``
        is called.
        """
        url = self.allow(name, url)
        end = offset + length
        with self._lock:
            self._transport.deadline = time.monotonic() + self._limit_s
            waits = iter(self._retries_s)
            while offset < end:
                try:
                    for part in self._range(name, url, head, offset, end):
                        offset += len(part)
                        waits = iter(self._retries_s)
                        yield part
                except (httpx.TransportError, BrokenOff) as error:
                    self._wait(name, f"{file_of(url)} from byte {offset} on", waits, error)

    def extend(self) -> None:
        """Give the range that is coming the time of a new question: for a caller that asks for it bit by bit."""
        self._transport.deadline = time.monotonic() + self._limit_s

    def close(self) -> None:
        """Close all connections."""
        self._drop_body()
        self._http.close()

    def _open(self, name: str, url: str, max_bytes: int) -> RemoteHead:
        answer, address = self._ask(name, url, f"bytes=0-{FIRST_BYTES - 1}")
        with closing(answer):
            size = _size(answer)
            if size is None:
                raise AdapterError(name, f"the server does not say how many bytes {file_of(url)} has")
            if size > max_bytes:
                raise AdapterError(name, f"{file_of(url)} has {size} bytes, at most {max_bytes} are accepted")
            etag, modified = _identity(answer, address)
            if not (etag or modified):
                raise AdapterError(name, f"the server sends neither ETag nor Last-Modified for {file_of(url)}")
            length = min(size, FIRST_BYTES)
            if answer.status_code == 206:
                length = _length(name, answer, 0, length)
            first = b"".join(self._taken(name, answer, length))
        return RemoteHead(size, etag, modified, first)

    def _range(self, name: str, url: str, head: RemoteHead, begin: int, end: int) -> Iterator[bytes]:
        """Yield bytes from ``begin`` to ``end`` at most: those of one answer, or of the whole body that is kept."""
        body = self._body
        if body is None or body.of != (url, head):
            answer, _ = self._ask(name, url, f"bytes={begin}-{end - 1}", head)
            if answer.status_code == 206:
                with closing(answer):
                    yield from self._taken(name, answer, _length(name, answer, begin, end))
                return
            body = self._begin_body(name, url, head, answer)
        while body.num_bytes < end:
            if not body.is_coming:
                body.go_on(self._ask(name, url, None, head)[0])
            try:
                body.take()
            except OSError as error:
                self._drop_body()  # it lacks bytes that have come
                raise _not_kept(name, url, error) from error
            self._check_time(name)
        yield from body.parts(begin, end)

    def _begin_body(self, name: str, url: str, head: RemoteHead, answer: httpx.Response) -> _WholeBody:
        """Keep the whole body of an answer from now on, in the place of the one before."""
        self._drop_body()
        try:
            body = self._body = _WholeBody(url, head)
        except OSError as error:
            answer.close()
            raise _not_kept(name, url, error) from error
        body.go_on(answer)
        return body

    def _drop_body(self) -> None:
        if self._body is not None:
            self._body.close()
            self._body = None

    def _taken(self, name: str, answer: httpx.Response, length: int) -> Iterator[bytes]:
        """Yield the first ``length`` bytes of an answer."""
        for part in answer.iter_raw():
            self._check_time(name)
            yield part[:length]
            length -= len(part)
            if length <= 0:
                return
        if length:
            raise BrokenOff(f"its answer ended {length} bytes early")

    def _ask(
        self, name: str, url: str, range_: str | None, head: RemoteHead | None = None
    ) -> tuple[httpx.Response, FileAddress]:
        """Return an open answer with bytes of a file, of the one with ``head`` if that is given; and its address."""
        address = self._addresses.of(name, url)
        headers = dict(address.headers) if range_ is None else {**address.headers, "Range": range_}
        # One that is no ASCII could not be sent as it came; what comes is compared with it in any case.
        if head is not None and head.is_strong and head.etag.isascii() and not address.etag:
            headers["If-Match"] = head.etag
        try:
            question = self._http.build_request("GET", address.url, headers=headers)
        except httpx.InvalidURL:
            raise AdapterError(name, f"the address of {file_of(url)} is malformed") from None
        answer = self._http.send(question, stream=True)
        try:
            if answer.status_code in (401, 403) and self._addresses.renew(url):
                raise BrokenOff(f"the server answers {answer.status_code}")
            _check_status(name, url, answer)
            found = _size(answer), *_identity(answer, address)
            if head is not None and found != (head.size, head.etag, head.modified):
                raise _changed(name, url)
        except BaseException:
            answer.close()
            raise
        return answer, address

    def _wait(self, name: str, what: str, waits: Iterator[float], error: Exception) -> None:
        """Wait before the next attempt, or raise ``AdapterError`` if there is none."""
        self._check_time(name)
        wait_s = next(waits, None)
        if wait_s is None:
            raise AdapterUnavailable(name, f"cannot read {what}: {error or type(error).__name__}") from error
        time.sleep(max(0.0, min(wait_s, self._transport.deadline - time.monotonic())))
        self._check_time(name)

    def _check_time(self, name: str) -> None:
        if time.monotonic() >= self._transport.deadline:
            raise AdapterUnavailable(name, f"reading it took longer than {self._limit_s:g} s, and was given up")


class _WholeBody:
    """The body of a file whose server ignores ranges, as far as it has come."""

    def __init__(self, url: str, head: RemoteHead) -> None:
        self.of = url, head
        self.num_bytes = 0
        self._num_known = 0  # bytes of the present answer that are here already
        self._answer: httpx.Response | None = None
        self._coming: Iterator[bytes] = iter(())
        self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - closed by `close`

    @property
    def is_coming(self) -> bool:
        """Whether an answer is open."""
        return self._answer is not None

    def go_on(self, answer: httpx.Response) -> None:
        """Take further bytes from an answer that begins with the first byte of the file."""
        self._answer, self._coming, self._num_known = answer, answer.iter_raw(), self.num_bytes

    def take(self) -> None:
        """Take some bytes; an answer that breaks off is closed."""
        try:
            part = next(self._coming, None)
            if part is None:
                raise BrokenOff(f"its answer ended at byte {self.num_bytes}")
        except BaseException:
            self._end()
            raise
        new = memoryview(part)[self._num_known :]
        self._num_known = max(0, self._num_known - len(part))
        while new:
            num = self._file.write(new)
            self.num_bytes += num
            new = new[num:]

    def parts(self, begin: int, end: int) -> Iterator[bytes]:
        """Yield a range that has come."""
        while begin < end:  # without a position, which further bytes are written at: it may be closed before its end
            part = os.pread(self._file.fileno(), min(PART_BYTES, end - begin), begin)
            begin += len(part)
            yield part

    def close(self) -> None:
        """Close the answer, and delete the file."""
        self._end()
        self._file.close()

    def _end(self) -> None:
        if self._answer is not None:
            self._answer.close()
            self._answer = None


def _check_status(name: str, url: str, answer: httpx.Response) -> None:
    """Raise unless an answer has bytes of the file."""
    status = answer.status_code
    if status == 404:
        raise AdapterNotFound(name, f"there is no {file_of(url)}")
    if status == 412:
        raise _changed(name, url)
    if status == 429 or status >= 500:
        raise BrokenOff(f"the server answers {status}")
    if 300 <= status < 400:
        raise AdapterError(name, f"the server answers {status} to {file_of(url)}, and redirects are not followed")
    if status not in (200, 206):
        raise AdapterError(name, f"the server answers {status} to {file_of(url)}")
    if answer.headers.get("content-encoding", "identity") != "identity":
        raise AdapterError(name, f"the server sends {file_of(url)} encoded, which was not asked for")


def _size(answer: httpx.Response) -> int | None:
    """Return the size of the whole file, ``None`` if an answer does not say it."""
    if answer.status_code == 206:
        match = _CONTENT_RANGE.fullmatch(answer.headers.get("content-range", ""))
        return None if match is None else int(match[3])
    length = answer.headers.get("content-length", "")
    return int(length) if length.isdecimal() and len(length) <= 18 else None


def _identity(answer: httpx.Response, address: FileAddress) -> tuple[str, str]:
    """Return ETag and ``Last-Modified``, each empty if it is missing or overlong; of a hub its own ETag alone."""
    if address.etag:
        return address.etag[:MAX_IDENTITY_CHARS], ""
    etag, modified = answer.headers.get("etag", ""), answer.headers.get("last-modified", "")
    return etag if len(etag) <= MAX_IDENTITY_CHARS else "", modified if len(modified) <= MAX_IDENTITY_CHARS else ""


def _length(name: str, answer: httpx.Response, begin: int, end: int) -> int:
    """Return the bytes in an answer to a request for a range; it may have fewer than were asked for."""
    match = _CONTENT_RANGE.fullmatch(answer.headers.get("content-range", ""))
    if match is None or int(match[1]) != begin or not begin <= int(match[2]) < end:
        raise AdapterError(name, f"the server answers with another range than bytes {begin} to {end - 1}")
    return int(match[2]) + 1 - begin


def _not_kept(name: str, url: str, error: OSError) -> AdapterUnavailable:
    reason = error.strerror or error
    return AdapterUnavailable(name, f"its server ignores ranges, and {file_of(url)} cannot be kept meanwhile: {reason}")


def _changed(name: str, url: str) -> AdapterError:
    return AdapterError(name, f"{file_of(url)} changed while it was read; register it again")
