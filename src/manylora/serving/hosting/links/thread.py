"""An engine in a thread of this process, for the offline API and for debugging.

Not for serving: while Python code of the engine runs, no request is read and no token is sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence

from manylora.core.clock import WallClock
from manylora.serving.hosting.engine.service import EngineService
from manylora.serving.hosting.engine.startup import keep_freed_memory, use_one_heap
from manylora.serving.hosting.protocol import Command, Ending, EngineSpec, Message, Ready

__all__ = ["ThreadLink"]

logger = logging.getLogger(__name__)


class ThreadLink:
    """An ``EngineLink`` to a new engine in a thread."""

    def __init__(self, engine: EngineSpec) -> None:
        self.pid = os.getpid()
        self.node = None
        self._engine = engine
        self._service: EngineService | None = None
        self._end: asyncio.Future[str] | None = None

    async def start(self, deliver: Callable[[Sequence[Message]], None]) -> None:
        """Start the thread."""
        event_loop = asyncio.get_running_loop()
        end = self._end = event_loop.create_future()

        inbox: deque[Message] = deque()  # append and popleft are atomic

        def deliver_all() -> None:
            messages = [inbox.popleft() for _ in range(len(inbox))]
            if messages:  # else an earlier call delivered them
                deliver(messages)

        def send(message: Message) -> None:
            if isinstance(message, Ready):
                keep_freed_memory()
            inbox.append(message)
            with contextlib.suppress(RuntimeError):  # the event loop may be gone before the engine
                event_loop.call_soon_threadsafe(deliver_all)

        service = self._service = EngineService(self._engine, clock=WallClock(), send=send)

        def note_end(how: str) -> None:
            if not end.done():
                end.set_result(how)

        def serve() -> None:
            try:
                how = "engine thread ended" if service.run() else "engine refused its configuration"
            except Exception as error:
                logger.exception("engine_broke")
                how = f"engine thread broke: {error!r}"
            with contextlib.suppress(RuntimeError):
                event_loop.call_soon_threadsafe(note_end, how)

        use_one_heap()
        threading.Thread(target=serve, name="manylora-engine", daemon=True).start()

    def send(self, command: Command) -> None:
        """Send a command."""
        if self._service is not None and self._end is not None and not self._end.done():
            self._service.handle(command)

    async def closed(self) -> Ending:
        """Wait for the thread to end."""
        assert self._end is not None
        return Ending(await asyncio.shield(self._end))

    async def stop(self) -> None:
        """Stop the loop and wait for the thread."""
        if self._service is not None and self._end is not None:
            self._service.stop()
            await asyncio.shield(self._end)
