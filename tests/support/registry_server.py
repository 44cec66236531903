"""A static HTTP server on loopback that can hold bytes back, break off, and forget what it promised."""

from __future__ import annotations

import re
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from email.utils import formatdate
from hashlib import blake2b
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

__all__ = ["Faults", "FolderHandler", "RegistryServer", "serving_folder"]

_RANGE = re.compile(r"bytes=(\d+)-(\d+)")


class Faults:
    """How a server misbehaves; may be changed while it runs."""

    def __init__(self) -> None:
        self.has_ranges = True
        self.checks_if_match = True
        self.etags = "strong"
        """``strong``, ``weak`` or ``none``; without ETags a ``Last-Modified`` is sent, unless ``bare``."""
        self.headers: dict[str, str] = {}
        """Headers that replace those of an answer; an empty one is left out."""
        self.statuses: list[int] = []
        """Statuses of the next answers."""
        self.cut_after: list[int] = []
        """Bytes after which the next bodies of weight files end, and their connections with them."""
        self.held_from: int | None = None
        """Bytes of a weight file from here on wait for ``release``."""
        self.released = threading.Event()


class RegistryServer(ThreadingHTTPServer):
    """Serves the files below a folder."""

    daemon_threads = True

    def __init__(self, root: Path, handler: type[FolderHandler] | None = None) -> None:
        super().__init__(("127.0.0.1", 0), handler or FolderHandler)
        self.root = root
        self.faults = Faults()
        self.asked: list[tuple[str, str | None]] = []
        """Names of files and ranges of all requests for bytes."""
        self.heads: list[str] = []
        """Request lines and headers of all requests."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def ranges(self) -> list[str | None]:
        """Ranges of weights that were asked for, after those of openings."""
        return [asked for file, asked in self.asked if file.startswith("adapter_model") and asked != "bytes=0-65535"]


class FolderHandler(BaseHTTPRequestHandler):
    """Answers with the files of the server's folder."""

    protocol_version = "HTTP/1.1"
    server: RegistryServer

    def do_GET(self) -> None:
        faults, wanted = self.server.faults, self.headers.get("Range")
        path = self.file()
        self.server.asked.append((path.name, wanted))
        if faults.statuses:
            return self._end(faults.statuses.pop(0))
        if not path.is_file():
            return self._end(404)
        content = path.read_bytes()
        etag = f'"{blake2b(content, digest_size=8).hexdigest()}"'
        if faults.checks_if_match and self.headers.get("If-Match", etag) != etag:
            return self._end(412)
        headers = {"Last-Modified": formatdate(path.stat().st_mtime, usegmt=True)}
        if faults.etags != "none":
            headers["ETag"] = etag if faults.etags == "strong" else f"W/{etag}"
        first, last, status = 0, len(content) - 1, 200
        if faults.has_ranges and (match := _RANGE.fullmatch(wanted or "")):
            first, last, status = int(match[1]), min(int(match[2]), last), 206
            headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
        headers["Content-Length"] = str(last + 1 - first)
        self.send_response(status)
        for name, value in (headers | faults.headers).items():
            if value:
                self.send_header(name, value)
        self.end_headers()
        self._send(path.name, content, first, last + 1)

    def file(self) -> Path:
        """Return the file that is asked for, which need not be there."""
        return self.server.root / unquote(self.path.partition("?")[0]).lstrip("/")

    def parse_request(self) -> bool:
        parsed = super().parse_request()
        self.server.heads.append(f"{self.requestline}\n{self.headers if parsed else ''}")
        return parsed

    def _send(self, file: str, content: bytes, first: int, end: int) -> None:
        faults = self.server.faults
        if file.endswith(".safetensors"):
            if faults.cut_after and end - first > faults.cut_after[0]:
                self.wfile.write(content[first : first + faults.cut_after.pop(0)])
                self.close_connection = True
                return
            held_from = end if faults.held_from is None else max(first, min(end, faults.held_from))
            self.wfile.write(content[first:held_from])
            if held_from == end:
                return
            faults.released.wait()
            first = held_from
        self.wfile.write(content[first:end])

    def _end(self, status: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", "0")
        if 300 <= status < 400:
            self.send_header("Location", f"{self.server.url}/elsewhere")
        self.end_headers()

    def handle(self) -> None:
        try:
            super().handle()
        except ConnectionError:
            """The client has seen enough."""

    def log_message(self, format: str, *args: object) -> None:
        """Be silent."""


@contextmanager
def serving_folder(
    root: Path, make: Callable[[Path], RegistryServer] | None = None, tls: ssl.SSLContext | None = None
) -> Iterator[RegistryServer]:
    """Serve a folder while inside, with a server of another kind or over TLS."""
    server = (make or RegistryServer)(root)
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.faults.released.set()
        server.shutdown()
        server.server_close()
        thread.join()
