"""Adapters of an engine, read and checked on threads of their own: a step must not wait for a disk.

The versions that were found, or the errors, are posted to the engine's loop, which registers them and sends the answer.

Reads from registries have threads of their own, some for each host: one that hangs holds up neither adapters on disk
nor those of other hosts. Loads of one URL share a read. Above a number of reads that wait a load is refused.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial

from manylora.core.adapters.identity import is_provisional
from manylora.core.adapters.sources import host_of
from manylora.core.clock import Clock
from manylora.core.engine.core import EngineCore
from manylora.core.errors import AdapterError, CapacityError, ManyloraError
from manylora.core.events import AdapterLoaded, Event
from manylora.core.ports import AdapterReader
from manylora.core.types import AdapterVersion, Tier
from manylora.serving.hosting.protocol import AdapterIdentity, Fault, LoadAdapter, LoadAdapters, Message, Reply

__all__ = ["AdapterReads"]

logger = logging.getLogger(__name__)

NUM_LOCAL = 2  # threads for adapters on disk
NUM_PER_HOST = 1  # threads for the adapters of one registry's host; there are as many hosts as the operator allowed
MAX_REMOTE = 64  # most loads from registries that run or wait, of different URLs
REMOTE_RETRY_S = 10.0
CHECKED_TOGETHER = 256  # adapters in one message to a reader: its cost is spread, and several readers share a start


@dataclass(slots=True)
class _Checked:
    """The adapters of a command that were checked so far, by their place; for the loop's thread."""

    command: LoadAdapters
    began_at: float
    found: dict[int, AdapterVersion | AdapterError] = field(default_factory=dict)
    is_over: bool = False


@dataclass(eq=False, kw_only=True)
class AdapterReads:
    """Reads adapters for one engine, until closed."""

    reader: AdapterReader  # reads and checks files
    clock: Clock
    post: Callable[[Callable[[EngineCore, float], None]], None]  # runs a function on the loop's thread; from any thread
    send: Callable[[Message], None]  # sends a message; called on the loop's thread alone
    observe: Callable[[Event], None]  # takes the time of a read; likewise
    _threads: dict[str | None, ThreadPoolExecutor] = field(default_factory=dict)  # by host, ``None`` for the disk
    _sharing: dict[str, list[LoadAdapter]] = field(default_factory=dict)  # loads that wait for one read, by URL
    _is_closed: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def load(self, command: LoadAdapter) -> None:
        """Read an adapter, then register it; safe from any thread, as is ``check``."""
        host = host_of(command.path)
        if host is None:
            self._submit(None, self._read, (command,))
            return
        with self._lock:
            sharing = self._sharing.get(command.path)
            # A replacement was asked for because the files changed: a read that may have begun before is not its own.
            is_shared = sharing is not None and not command.replace
            is_refused = not is_shared and len(self._sharing) >= MAX_REMOTE
            if sharing is not None and is_shared:
                sharing.append(command)
            elif sharing is None and not is_refused:
                self._sharing[command.path] = [command]
        if is_refused:
            reason = f"{MAX_REMOTE} adapters are being read from registries, no more may wait; please try again"
            fault = Fault.of(CapacityError(reason, retry_after_s=REMOTE_RETRY_S, status=503))
            self.post(lambda core, now: self.send(Reply(command.call, fault)))
        elif sharing is None:
            self._submit(host, self._read_shared, command)
        elif not is_shared:
            self._submit(host, self._read, (command,))

    def check(self, command: LoadAdapters) -> None:
        """Check adapters by their headers, then register those that pass."""
        gathered = _Checked(command, self.clock.now())
        places: dict[str | None, list[int]] = {}
        for place, (_, path, _, _) in enumerate(command.adapters):
            places.setdefault(host_of(path), []).append(place)
        for host, of_host in places.items():
            for first in range(0, len(of_host), CHECKED_TOGETHER):
                self._submit(host, self._check_part, gathered, of_host[first : first + CHECKED_TOGETHER])

    def close(self) -> None:
        """Begin no further read, and wait for none."""
        with self._lock:
            self._is_closed = True
        for threads in self._threads.values():
            threads.shutdown(wait=False, cancel_futures=True)

    def _submit(self, host: str | None, work: Callable[..., None], *args: object) -> None:
        """Run work on a thread for a host, unless the engine has just ended."""
        with self._lock:
            if self._is_closed:
                return
            if (threads := self._threads.get(host)) is None:
                number = NUM_LOCAL if host is None else NUM_PER_HOST
                threads = self._threads[host] = ThreadPoolExecutor(number, thread_name_prefix="adapter-reader")
            threads.submit(work, *args)

    def _read_shared(self, first: LoadAdapter) -> None:
        """Read an adapter for all loads of its URL so far."""

        def take() -> Sequence[LoadAdapter]:
            with self._lock:
                return self._sharing.pop(first.path)

        self._read((first,), take)

    def _read(self, commands: Sequence[LoadAdapter], take: Callable[[], Sequence[LoadAdapter]] | None = None) -> None:
        """Read an adapter on a reader thread and post the version or the error to the loop. Never raises.

        ``take`` returns the loads that have joined it, once the read has ended.
        """
        began_at = self.clock.now()
        command = commands[0]
        try:
            version = self._checked(command) if command.by_header else self.reader.read(command.name, command.path)
        except ManyloraError as error:
            fault = Fault.of(error)
        except (OSError, ValueError, MemoryError) as error:
            logger.warning("adapter_unreadable name=%s error=%r", command.name, error)
            reason = error.strerror if isinstance(error, OSError) else error  # not the path, which tenants may read
            fault = Fault.of(AdapterError(command.name, f"could not be read: {reason}"))
        except Exception as error:
            logger.exception("adapter_reader_failed name=%s", command.name)
            fault = Fault.of(AdapterError(command.name, f"reading it failed inside the server: {error!r}"))
        else:
            took_s = self.clock.now() - began_at
            for one in commands if take is None else take():
                self.post(partial(self._register, command=one, version=version, took_s=took_s))
            return
        for one in commands if take is None else take():
            self.post(partial(self._refuse, call=one.call, fault=_about(fault, one.name)))

    def _checked(self, command: LoadAdapter) -> AdapterVersion:
        (found,) = self.reader.check([(command.name, command.path)])
        if isinstance(found, AdapterError):
            raise found
        return found

    def _refuse(self, core: EngineCore, now: float, call: int, fault: Fault) -> None:
        self.send(Reply(call, fault))

    def _check_part(self, gathered: _Checked, places: list[int]) -> None:
        """Check some adapters of a command on a reader thread; the last part posts their registration. Never raises."""
        adapters = [gathered.command.adapters[place][:2] for place in places]
        try:
            found = self.reader.check(adapters)
        except CapacityError as error:  # the machine's fault and not theirs: they are not given up
            fault = Fault.of(error)
            self.post(lambda core, now: self._fail(gathered, fault))
            return
        except Exception as error:
            logger.exception("adapter_reader_failed num_adapters=%d", len(adapters))
            reason = f"checking it failed inside the server: {error!r}"
            found = [AdapterError(name, reason) for name, _ in adapters]
        self.post(lambda core, now: self._gather(core, now, gathered, dict(zip(places, found, strict=True))))

    def _fail(self, gathered: _Checked, fault: Fault) -> None:
        """Answer a command of which a part could not be checked."""
        if not gathered.is_over:
            gathered.is_over = True
            self.send(Reply(gathered.command.call, fault))

    def _gather(
        self, core: EngineCore, now: float, gathered: _Checked, found: dict[int, AdapterVersion | AdapterError]
    ) -> None:
        """Register the adapters of a command once all are checked: background reads then delay no check."""
        gathered.found.update(found)
        adapters = gathered.command.adapters
        if gathered.is_over or len(gathered.found) < len(adapters):
            return
        registered: dict[str, AdapterIdentity] = {}
        refused: dict[str, Fault] = {}
        for index, (name, _, may_replace, known) in enumerate(adapters):
            one = gathered.found[index]
            try:
                if isinstance(one, AdapterError):
                    raise one
                if known is not None and known.key != one.key:
                    # Under its first key a file that changed since is refused where it is read, as without a restart.
                    one = replace(one, key=known.key, layer_digests=b"", is_whole=True)
                core.adapters.register(name, one, now, replace=may_replace, tier=Tier.DISK)
                registered[name] = AdapterIdentity(one.rank, one.key, one.file_key, one.source)
            except ManyloraError as error:
                refused[name] = Fault.of(error)
        num_unread = sum(is_provisional(one.key) for one in gathered.found.values() if isinstance(one, AdapterVersion))
        logger.info(
            "adapters_registered num=%d refused=%d of_unknown_content=%d took_s=%.3f",
            len(registered),
            len(refused),
            num_unread,
            self.clock.now() - gathered.began_at,
        )
        self.send(Reply(gathered.command.call, refused=refused, registered=registered))

    def _register(
        self, core: EngineCore, now: float, command: LoadAdapter, version: AdapterVersion, took_s: float
    ) -> None:
        tier = Tier.DISK if command.by_header else Tier.HOST
        if tier is Tier.HOST:
            self.observe(AdapterLoaded(now, version.key, tier, took_s))
        try:
            status = core.adapters.register(command.name, version, now, replace=command.replace, tier=tier)
        except ManyloraError as error:
            self.send(Reply(command.call, Fault.of(error)))
        else:
            self.send(Reply(command.call, statuses=(status,)))


def _about(fault: Fault, name: str) -> Fault:
    """Return a fault of a read as one of an adapter that shares the read."""
    error = fault.to_error()
    return Fault.of(type(error)(name, error.reason)) if isinstance(error, AdapterError) else fault
