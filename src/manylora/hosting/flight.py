"""A request in flight: its answer so far outlives the engine that works on it.

::

    submitted --accepted--> tokens ... --finish--> ended
        ^                     |
        +--- sent on, with ---+--- its engine is lost
             the tokens so far

The bookkeeping of a token is one append. An engine that is lost gives its flights up in one callback, so a token is
either recorded here and passed to the stream, or neither: what arrives later is dropped and computed again.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable
from dataclasses import dataclass, replace

from manylora.errors import ManyloraError
from manylora.hosting.output_stream import OutputStream
from manylora.types import Continuation, Output, Request

__all__ = ["Flight", "Loss"]


@dataclass(slots=True, eq=False)
class Loss:
    """The reason why an engine gives up its requests.

    Args:
        error: The reason, as an error for requests that cannot go on.
        is_suspicious: Whether a request may have caused it: false for an engine that was killed from outside.
        is_counted: Whether it counts towards the limit of resumptions: false for an engine that is drained.
        is_hang: Whether the engine hung: requests may have come to it since.
        has_answered: Whether the engine had given outputs.
        is_explained: Whether a request was ended for it.
    """

    error: ManyloraError
    is_suspicious: bool = True
    is_counted: bool = True
    is_hang: bool = False
    has_answered: bool = False
    is_explained: bool = False


class Flight:
    """One request, from its submission to its end, over all engines that work on it.

    Args:
        request: The request, as first submitted.
        stream: Receives its outputs.
    """

    __slots__ = (
        "_is_sent",
        "_num_sent",
        "answered",
        "is_accepted",
        "is_resumed",
        "is_spared",
        "last",
        "lost_at",
        "num_resumes",
        "on_news",
        "request",
        "settled",
        "stream",
        "strikes",
    )

    def __init__(self, request: Request, stream: OutputStream) -> None:
        self.request = request
        self.stream = stream
        self.last: Output | None = None
        self.is_accepted = False  # by its present engine
        self.is_resumed = False  # another engine gave it a token
        self.is_spared = False  # an engine hung before it had accepted it
        self.num_resumes = 0
        self.strikes: tuple[Loss, ...] = ()  # suspicious losses in a row, of engines that had given it no token
        self.lost_at = 0.0  # time of the last token before its engine was lost, in seconds
        self.on_news: Callable[[Flight], None] | None = None  # called once, at its next output
        self.settled: asyncio.Future[None] | None = None  # awaited by a submission whose engine was lost
        self._is_sent = False
        self.answered = array("i")  # tokens of its answer so far, appended by the client of its engine
        self._num_sent = 0  # tokens that its present engine got with it

    @property
    def request_id(self) -> str:
        """Return the request's id."""
        return self.request.request_id

    @property
    def num_answered(self) -> int | None:
        """Return the tokens of its answer so far; ``None`` before it was sent to an engine."""
        return len(self.answered) if self._is_sent else None

    def has_news(self) -> None:
        """Report the first output after it was sent on."""
        on_news, self.on_news = self.on_news, None
        if on_news is not None:
            on_news(self)

    def lost(self, loss: Loss) -> None:
        """Count the loss of its engine.

        A request that an engine had not accepted when it hung came after that, most likely, and is spared. Only once:
        one that hangs engines before they accept it must end as well.
        """
        has_news = len(self.answered) > self._num_sent
        if has_news:
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
        adapter = None if self.last is None else self.last.adapter
        return replace(self.request, continuation=Continuation(tokens=tuple(self.answered), adapter=adapter))

    def accepted(self) -> None:
        """Tell a submission that waits that an engine has accepted the request."""
        if self.settled is not None and not self.settled.done():
            self.settled.set_result(None)

    def fail(self, error: ManyloraError) -> None:
        """End it with an error: that of the submission that waits, or else of the stream."""
        if self.settled is not None and not self.settled.done():
            self.settled.set_exception(error)
        else:
            self.stream.fail(error)
