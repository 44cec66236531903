"""A request in flight and the stream of its outputs: both outlive the engine that works on it.

::

    submitted --accepted--> tokens ... --finish--> ended
        ^                     |
        +--- sent on, with ---+--- its engine is lost
             the tokens so far

The bookkeeping of a token is one append. An engine that is lost gives its requests up in one callback, so a token is
either recorded here and passed to the stream, or neither: what arrives later is dropped and computed again.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from manylora.core.errors import ManyloraError
from manylora.core.types import Continuation, Output, Request

__all__ = ["Consume", "EngineLoss", "Flush", "InFlightRequest", "OutputStream"]

MANY_LOGPROBS = 336
"""Log-probabilities in the outputs that are consumed at once, in a millisecond or two: sixteen tokens with twenty."""

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
        """Deliver outputs to ``consume`` as they arrive, until ``close``; after ``EngineDead`` the others are lost.

        ``consume`` is called with one or more outputs, on the event loop but not in this task. Its errors are raised
        here. While the work that it returned is awaited, outputs are collected: a slow reader gets more tokens at a
        time, not a longer queue.
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
        if len(outputs) == 1:
            return outputs
        tokens = outputs[0].tokens
        if tokens and tokens[0].logprob is not None:
            most = max(1, MANY_LOGPROBS // (1 + len(tokens[0].top)))
            outputs, self._waiting = outputs[:most], outputs[most:]
        return outputs

    def close(self) -> None:
        """End the stream: ``deliver`` returns. Called by the consumer."""
        self._is_closed = True

    def fail(self, error: ManyloraError) -> None:
        """End the stream: ``deliver`` raises ``error`` after the outputs that have arrived."""
        self._error = error
        self.wake()


@dataclass(slots=True, eq=False)
class EngineLoss:
    """The reason why an engine gives up its requests."""

    error: ManyloraError  # the reason, as an error for requests that cannot go on
    is_suspicious: bool = True  # whether a request may have caused it: false for an engine that was killed from outside
    is_counted: bool = True  # whether it counts towards the limit of resumptions: false for an engine that is drained
    is_hang: bool = False  # whether the engine hung: requests may have come to it since
    has_answered: bool = False  # whether the engine had given outputs
    is_explained: bool = False  # whether a request was ended for it


@dataclass(slots=True, eq=False)
class InFlightRequest:
    """One request, from its submission to its end, over all engines that work on it."""

    request: Request  # as first submitted
    stream: OutputStream  # receives its outputs
    last: Output | None = None
    is_accepted: bool = False  # by its present engine
    is_resumed: bool = False  # another engine gave it a token
    is_spared: bool = False  # an engine hung before it had accepted it
    num_resumes: int = 0
    strikes: tuple[EngineLoss, ...] = ()  # suspicious losses in a row, of engines that had given it no token
    lost_at: float = 0.0  # time of the last token before its engine was lost, in seconds
    on_next_output: Callable[[InFlightRequest], None] | None = None  # called once, at its next output
    settled: asyncio.Future[None] | None = None  # awaited by a submission whose engine was lost
    answered: array[int] = field(default_factory=lambda: array("i"))  # its answer so far, by the engine's client
    _is_sent: bool = False
    _num_sent: int = 0  # tokens that its present engine got with it

    @property
    def request_id(self) -> str:
        """Return the request's id."""
        return self.request.request_id

    @property
    def num_answered(self) -> int | None:
        """Return the tokens of its answer so far; ``None`` before it was sent to an engine."""
        return len(self.answered) if self._is_sent else None

    def note_output(self) -> None:
        """Report the first output after it was sent on."""
        on_next_output, self.on_next_output = self.on_next_output, None
        if on_next_output is not None:
            on_next_output(self)

    def lost(self, loss: EngineLoss) -> None:
        """Count the loss of its engine.

        A request that an engine had not accepted when it hung came after that, most likely, and is spared. Only once:
        one that hangs engines before they accept it must end as well.
        """
        if len(self.answered) > self._num_sent:
            self.strikes = ()
        elif loss.is_hang and not (self.is_accepted or self.is_spared):
            self.is_spared = True
        elif loss.is_suspicious:
            self.strikes += (loss,)
        self.num_resumes += loss.is_counted

    def next_request(self) -> Request:
        """Return the request for its next engine; from the second on it has the answer so far."""
        if not self._is_sent:
            self._is_sent = True
            return self.request
        self._num_sent = len(self.answered)
        begun = self.request.continuation or Continuation()
        adapter = begun.adapter if self.last is None else self.last.adapter
        return replace(self.request, continuation=Continuation(tokens=(*begun.tokens, *self.answered), adapter=adapter))

    def accepted(self) -> None:
        """Tell a submission that waits that an engine has accepted the request."""
        if self.settled is not None and not self.settled.done():
            self.settled.set_result(None)

    def fail(self, error: ManyloraError) -> None:
        """End the request with an error: raised by the submission if it still waits, and otherwise by the stream."""
        if self.settled is not None and not self.settled.done():
            self.settled.set_exception(error)
        else:
            self.stream.fail(error)
