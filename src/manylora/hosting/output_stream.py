"""The outputs of requests, delivered to their consumer in the callback that received them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeAlias

from manylora.errors import ManyloraError
from manylora.types import Output

__all__ = ["Consume", "Flush", "OutputStream"]

MANY_LOGPROBS = 16
"""Outputs with log-probabilities that are consumed at once: with twenty for each token, in a millisecond or two."""

Flush: TypeAlias = Callable[[], Awaitable[None]]
"""The part of a consumer's work that must be awaited: a slow socket, room in a queue."""

Consume: TypeAlias = Callable[[list[Output]], Flush | None]
"""Consumes outputs; returns the work, if any, that must be awaited before the next call."""


class OutputStream:
    """The outputs of requests that were submitted together, until each has finished or been cancelled.

    The consumer is called in the callback that received the outputs: waking a task for every token costs more than
    writing the token, and all streams of a step wait for each other.
    """

    def __init__(self) -> None:
        self._waiting: list[Output] = []
        self._error: ManyloraError | None = None
        self._is_closed = False
        self._consume: Consume | None = None  # set while outputs can be delivered as they arrive ...
        self._interrupted: asyncio.Future[Flush | None] | None = None  # ... and the task that sleeps meanwhile

    async def deliver(self, consume: Consume) -> None:
        """Deliver outputs to ``consume`` as they arrive, until ``close``.

        While the work that ``consume`` returned is awaited, outputs are collected: a slow reader gets more tokens at a
        time, not a longer queue.

        Args:
            consume: Called with one or more outputs, on the event loop but not in this task. Its errors are raised
                here.

        Raises:
            EngineDead: The engine died; its undelivered outputs are lost.
        """
        while not self._is_closed:
            if self._waiting:
                flush = consume(self._take())
                if flush is None and self._waiting:
                    await asyncio.sleep(0)
            elif self._error is not None:
                raise self._error
            else:
                self._interrupted = asyncio.get_running_loop().create_future()
                self._consume = consume
                try:
                    flush = await self._interrupted
                finally:
                    self._consume = self._interrupted = None
            if flush is not None:
                await flush()

    def push(self, output: Output) -> None:
        """Add an output, for the next ``wake``."""
        self._waiting.append(output)

    def wake(self) -> None:
        """Deliver the outputs that were pushed, if they can be consumed now."""
        consume, interrupted = self._consume, self._interrupted
        if consume is None or interrupted is None or interrupted.done():
            return
        flush = None
        if self._waiting:
            try:
                flush = consume(self._take())
            except Exception as error:  # raised in this stream's task, and in no other
                interrupted.set_exception(error)
                return
            if self._waiting:
                asyncio.get_running_loop().call_soon(self.wake)
        if flush is not None or self._is_closed or (self._error is not None and not self._waiting):
            interrupted.set_result(flush)

    def _take(self) -> list[Output]:
        """Return the outputs to consume at once: all, or some if they have log-probabilities, which become JSON."""
        outputs, self._waiting = self._waiting, []
        tokens = outputs[0].tokens
        if len(outputs) > MANY_LOGPROBS and tokens and tokens[0].logprob is not None:
            outputs, self._waiting = outputs[:MANY_LOGPROBS], outputs[MANY_LOGPROBS:]
        return outputs

    def close(self) -> None:
        """End the stream: ``deliver`` returns. Called by the consumer."""
        self._is_closed = True

    def fail(self, error: ManyloraError) -> None:
        """End the stream: ``deliver`` raises ``error`` after the outputs that have arrived."""
        self._error = error
        self.wake()
