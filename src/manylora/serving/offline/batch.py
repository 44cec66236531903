"""The prompts of one call: a window of them is in the engine at a time, the others wait here."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from manylora.core.errors import CapacityError
from manylora.core.types import Output
from manylora.serving.hosting.fleet.fleet import Fleet
from manylora.serving.hosting.links.in_flight import Flush, OutputStream
from manylora.serving.offline.generation import Job

__all__ = ["Batch"]

RETRY_S = 0.05
"""Seconds until requests that found the queue full are submitted again."""


class Batch:
    """Jobs that share one stream. For the event loop's thread alone, where tokens become text as they arrive.

    Args:
        fleet: The engines.
        jobs: Jobs to run, in this order.
        window: Most jobs in the engine at a time.
        on_ended: Called with the number of jobs that have just ended.
    """

    def __init__(self, fleet: Fleet, jobs: Iterable[Job], *, window: int, on_ended: Callable[[int], None]) -> None:
        self._requests = fleet.requests
        self._window = window
        self._on_ended = on_ended
        self._waiting = deque(jobs)
        self._running: dict[str, Job] = {}
        self._stream = OutputStream()

    async def run(self) -> None:
        """Run every job to its end; on an exception, cancel those in the engine.

        Raises:
            EngineDead: The engine failed or was closed.
        """
        try:
            await self._fill()
            await self._stream.deliver(self._consume)
        finally:
            self._requests.cancel(list(self._running))

    async def _fill(self) -> None:
        """Submit as many jobs as the window and the engine's queue have room for; at least one, if any waits."""
        while self._waiting and len(self._running) < self._window:
            num_new = min(len(self._waiting), self._window - len(self._running))
            if not await self._submit([self._waiting.popleft() for _ in range(num_new)]):
                if self._running:
                    break  # tried again when one of them ends
                await asyncio.sleep(RETRY_S)
        if not self._running:
            self._stream.close()

    async def _submit(self, jobs: Sequence[Job]) -> bool:
        """Submit jobs; end those that are invalid. Return whether the queue had room for the others."""
        by_id = {job.request.request_id: job for job in jobs}
        self._running |= by_id  # first, so that an exception cancels them
        errors = await self._requests.submit_each([job.request for job in jobs], self._stream)
        for request_id in errors:
            del self._running[request_id]
        full = [request_id for request_id, error in errors.items() if isinstance(error, CapacityError)]
        self._waiting.extendleft(by_id[request_id] for request_id in reversed(full))
        for request_id, error in errors.items():
            if not isinstance(error, CapacityError):
                by_id[request_id].fail(str(error))
        if len(errors) > len(full):
            self._on_ended(len(errors) - len(full))
        return not full

    def _consume(self, outputs: list[Output]) -> Flush | None:
        """Give outputs to their jobs; refill the window when some have ended."""
        running = self._running
        num_before = len(running)
        stopped: list[str] = []
        for output in outputs:
            job = running.get(output.request_id)
            if job is None:
                continue  # more of an answer that a stop string ended
            job.add(output)
            if job.finish_reason is not None:
                del running[output.request_id]
                if output.finish is None:
                    stopped.append(output.request_id)  # by a stop string, which the engine does not check
        if stopped:
            self._requests.cancel(stopped, stopped=True)
        if len(running) < num_before:
            self._on_ended(num_before - len(running))
            if self._waiting:
                return self._fill
        if not running:
            self._stream.close()
        return None
