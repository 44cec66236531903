"""The loop on its background thread, and the way in and out of it.

The loop's thread alone touches the core. Work goes in as posted commands, outputs come out through one inbox per
caller. When the loop ends, whatever the reason, everything that waits is told, and so is whoever comes later:
nobody waits for ever.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

from manylora.clock import Clock
from manylora.engine.core import EngineCore
from manylora.engine.loop import EngineLoop
from manylora.errors import EngineDead, ManyloraError
from manylora.types import Output, Request

__all__ = ["EngineThread", "Inbox"]

T = TypeVar("T")

Inbox = SimpleQueue[list[Output] | EngineDead]
"""Where a caller gets its requests' outputs, a turn at a time, and the news that no more will come."""


class EngineThread:
    """Runs a core; every method may be called from any thread.

    Args:
        core: The engine; nobody else may touch it.
        clock: What the loop waits on.
    """

    def __init__(self, core: EngineCore, clock: Clock) -> None:
        self._lock = threading.Lock()  # of the next three
        self._ended: str | None = None
        self._inboxes: dict[str, Inbox] = {}  # by request in flight
        self._calls: set[Future[Any]] = set()
        self._loop = EngineLoop(core, clock, on_outputs=self._hand_out, live=True)
        # A daemon, so that a program that forgets to close the engine still ends.
        self._thread = threading.Thread(target=self._run, name="manylora-engine", daemon=True)
        self._thread.start()

    def check_alive(self) -> None:
        """Raise if no call can succeed any more.

        Raises:
            EngineDead: The engine failed or was closed.
        """
        if self._ended is not None:
            raise EngineDead(self._ended)

    def call(self, work: Callable[[EngineCore, float], T]) -> T:
        """Run ``work(core, now)`` on the loop's thread and return what it returns, or raise what it raises.

        Raises:
            EngineDead: The engine failed or was closed.
        """
        call: Future[T] = Future()

        def run(core: EngineCore, now: float) -> None:
            try:
                result = work(core, now)
            except ManyloraError as error:
                failure: ManyloraError = error
                self._settle(call, lambda: call.set_exception(failure))
            else:
                self._settle(call, lambda: call.set_result(result))

        with self._lock:
            self.check_alive()
            self._calls.add(call)
        self._loop.post(run)
        return call.result()

    def submit(self, requests: Sequence[Request], inbox: Inbox) -> list[ManyloraError | None]:
        """Add requests whose outputs shall go to ``inbox``.

        Returns:
            Per request why it was refused, ``None`` if it was not.

        Raises:
            EngineDead: The engine failed or was closed.
        """

        def add(core: EngineCore, now: float) -> list[ManyloraError | None]:
            errors = [_error_of(core, request, now) for request in requests]
            accepted = (request for request, error in zip(requests, errors, strict=True) if error is None)
            with self._lock:
                self._inboxes.update((request.request_id, inbox) for request in accepted)
            return errors

        return self.call(add)

    def cancel(self, request_ids: Sequence[str]) -> None:
        """End requests nobody wants any more; those that are over are left alone. Their last outputs still come."""
        if not request_ids:
            return

        def cancel(core: EngineCore, now: float) -> None:
            for request_id in request_ids:
                core.cancel(request_id, now)

        self._loop.post(cancel)

    def close(self) -> None:
        """Stop the loop and wait for its thread; what is in flight ends with ``EngineDead``."""
        self._end("the engine was closed")
        self._loop.stop()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._loop.run()
        except BaseException as error:  # nobody else is there to hear of it
            self._end(f"the engine failed: {error!r}")

    def _end(self, reason: str) -> None:
        with self._lock:
            if self._ended is not None:
                return
            self._ended = reason
            for inbox in set(self._inboxes.values()):
                inbox.put(EngineDead(reason))
            for call in self._calls:
                call.set_exception(EngineDead(reason))
            self._calls.clear()

    def _settle(self, call: Future[T], answer: Callable[[], None]) -> None:
        with self._lock:
            if call in self._calls:  # else the engine ended meanwhile, and said so
                self._calls.remove(call)
                answer()

    def _hand_out(self, outputs: list[Output], now: float) -> None:
        """Give a turn's outputs to those who wait for them; on the loop's thread."""
        shares: dict[Inbox, list[Output]] = {}
        with self._lock:
            for output in outputs:
                inbox = self._inboxes.get(output.request_id)
                if inbox is None:
                    continue
                shares.setdefault(inbox, []).append(output)
                if output.finish is not None:
                    del self._inboxes[output.request_id]
        for inbox, share in shares.items():
            inbox.put(share)


def _error_of(core: EngineCore, request: Request, now: float) -> ManyloraError | None:
    try:
        core.add_request(request, now)
    except ManyloraError as error:
        return error
    return None
