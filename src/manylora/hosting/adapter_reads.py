"""Adapters of an engine, read and checked on threads of their own: a step must not wait for a disk.

The versions that were found, or the errors, are posted to the engine's loop, which registers them and sends the answer.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from manylora.adapters.stamp import is_provisional
from manylora.clock import Clock
from manylora.engine.core import EngineCore
from manylora.errors import AdapterError, CapacityError, ManyloraError
from manylora.events import AdapterLoaded, Event
from manylora.hosting.protocol import AdapterIdentity, Fault, LoadAdapter, LoadAdapters, Message, Reply
from manylora.ports import AdapterReader
from manylora.types import AdapterVersion, Tier

__all__ = ["AdapterReads"]

logger = logging.getLogger(__name__)

NUM_READERS = 2
CHECKED_TOGETHER = 256
"""Adapters in one message to a reader: its cost is spread, and several readers share a start."""


@dataclass(slots=True)
class _Checked:
    """The adapters of a command that were checked so far, by their place; for the loop's thread."""

    command: LoadAdapters
    began_at: float
    found: dict[int, AdapterVersion | AdapterError] = field(default_factory=dict)
    is_over: bool = False


class AdapterReads:
    """Reads adapters for one engine, until closed.

    Args:
        reader: Reads and checks files.
        clock: Live time.
        post: Runs a function on the loop's thread; safe from any thread.
        send: Sends a message; called on the loop's thread alone.
        observe: Takes the time of a read; likewise.
    """

    def __init__(
        self,
        reader: AdapterReader,
        *,
        clock: Clock,
        post: Callable[[Callable[[EngineCore, float], None]], None],
        send: Callable[[Message], None],
        observe: Callable[[Event], None],
    ) -> None:
        self._reader = reader
        self._clock = clock
        self._post = post
        self._send = send
        self._observe = observe
        self._threads = ThreadPoolExecutor(NUM_READERS, thread_name_prefix="adapter-reader")

    def load(self, command: LoadAdapter) -> None:
        """Read an adapter, then register it; safe from any thread, as is ``check``."""
        with contextlib.suppress(RuntimeError):  # the engine has just ended
            self._threads.submit(self._read, command)

    def check(self, command: LoadAdapters) -> None:
        """Check adapters by their headers, then register those that pass."""
        gathered = _Checked(command, self._clock.now())
        with contextlib.suppress(RuntimeError):
            for first in range(0, len(command.adapters), CHECKED_TOGETHER):
                self._threads.submit(self._check_part, gathered, slice(first, first + CHECKED_TOGETHER))

    def close(self) -> None:
        """Begin no further read, and wait for none."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _read(self, command: LoadAdapter) -> None:
        """Read an adapter on a reader thread and post the version or the error to the loop. Never raises."""
        began_at = self._clock.now()
        try:
            version = self._reader.read(command.name, command.path)
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
            took_s = self._clock.now() - began_at
            self._post(lambda core, now: self._register(core, now, command, version, took_s))
            return
        self._post(lambda core, now: self._send(Reply(command.call, fault)))

    def _check_part(self, gathered: _Checked, part: slice) -> None:
        """Check some adapters of a command on a reader thread; the last part posts their registration. Never raises."""
        adapters = [(name, path) for name, path, _, _ in gathered.command.adapters[part]]
        try:
            found = self._reader.check(adapters)
        except CapacityError as error:  # the machine's fault and not theirs: they are not given up
            fault = Fault.of(error)
            self._post(lambda core, now: self._give_up(gathered, fault))
            return
        except Exception as error:
            logger.exception("adapter_reader_failed num_adapters=%d", len(adapters))
            reason = f"checking it failed inside the server: {error!r}"
            found = [AdapterError(name, reason) for name, _ in adapters]
        self._post(lambda core, now: self._gather(core, now, gathered, part.start, found))

    def _give_up(self, gathered: _Checked, fault: Fault) -> None:
        """Answer a command of which a part could not be checked."""
        if not gathered.is_over:
            gathered.is_over = True
            self._send(Reply(gathered.command.call, fault))

    def _gather(
        self, core: EngineCore, now: float, gathered: _Checked, first: int, found: list[AdapterVersion | AdapterError]
    ) -> None:
        """Register the adapters of a command once all are checked: background reads then delay no check."""
        gathered.found.update(enumerate(found, first))
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
                registered[name] = AdapterIdentity(one.rank, one.key, one.stamp)
            except ManyloraError as error:
                refused[name] = Fault.of(error)
        num_unread = sum(is_provisional(one.key) for one in gathered.found.values() if isinstance(one, AdapterVersion))
        logger.info(
            "adapters_registered num=%d refused=%d of_unknown_content=%d took_s=%.3f",
            len(registered),
            len(refused),
            num_unread,
            self._clock.now() - gathered.began_at,
        )
        self._send(Reply(gathered.command.call, refused=refused, registered=registered))

    def _register(
        self, core: EngineCore, now: float, command: LoadAdapter, version: AdapterVersion, took_s: float
    ) -> None:
        self._observe(AdapterLoaded(now, version.key, Tier.HOST, took_s))
        try:
            status = core.adapters.register(command.name, version, now, replace=command.replace)
        except ManyloraError as error:
            self._send(Reply(command.call, Fault.of(error)))
        else:
            self._send(Reply(command.call, statuses=(status,)))
