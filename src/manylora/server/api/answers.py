"""The answers to one HTTP request, from the engine's tokens to pieces of text.

An HTTP request of several prompts with ``n`` answers each becomes as many engine requests, submitted together: all are
accepted or none. Their outputs arrive on one stream. Outputs that arrived together become one piece per answer, so a
busy server sends larger pieces and not more of them. Stop strings end an answer here, which cancels its engine request.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.types import Receive

from manylora.errors import EngineDead, ManyloraError
from manylora.hosting.output_stream import Flush, OutputStream
from manylora.server.errors import hide_paths
from manylora.server.served import ServedFleet
from manylora.text import Detokenizer, TextDelta, Tokenizer, TokenLogprob
from manylora.types import AdapterKey, FinishReason, Output, Request, SampledToken

__all__ = ["Answers", "ClientGone", "Piece"]


class ClientGone(ManyloraError):
    """The client disconnected."""

    status = 499


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """New text of one answer.

    Args:
        index: Number of the answer: prompts in order, ``n`` answers each.
        text: New text.
        logprobs: Log-probabilities of its tokens, if requested.
        finish_reason: ``stop`` or ``length`` on the last piece.
        stop_reason: The stop string or token that ended the answer, if any.
    """

    index: int
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: str | None = None
    stop_reason: str | int | None = None


@dataclass(slots=True, eq=False)
class _Answer:
    index: int
    detokenizer: Detokenizer
    num_tokens: int = 0
    num_cached_tokens: int = 0
    is_finished: bool = False


class Answers:
    """The answers to one HTTP request.

    Args:
        fleet: The engines.
        tokenizer: The base model's tokenizer.
        requests: Prompts in order, ``num_answers`` requests for each.
        num_answers: Answers per prompt.
    """

    def __init__(
        self, fleet: ServedFleet, tokenizer: Tokenizer, requests: Sequence[Request], *, num_answers: int
    ) -> None:
        self._fleet = fleet
        self._requests = requests
        self._num_answers = num_answers
        self._answers = {
            request.request_id: _Answer(index, Detokenizer(tokenizer, request.prompt, request.sampling))
            for index, request in enumerate(requests)
        }
        self._num_unfinished = len(requests)
        self._stream: OutputStream | None = None
        self.adapter: AdapterKey | None = None

    async def start(self) -> None:
        """Submit the requests; return once the engine has accepted them.

        Raises:
            RequestError: A request is invalid.
            CapacityError: The queue is full.
            EngineDead: The engine died.
        """
        self._stream = await self._fleet.submit(self._requests)

    async def deliver(self, consume: Callable[[list[Piece]], Flush | None]) -> None:
        """Deliver pieces to ``consume`` as they arrive, until every answer has finished.

        Args:
            consume: Called on the event loop but not in this task; returns the work, if any, that must be awaited
                before more pieces are delivered. Its errors are raised here.

        Raises:
            EngineDead: The engine died.
            ClientGone: The client disconnected.
            ManyloraError: The engine aborted one of the requests; the others are cancelled.
        """
        assert self._stream is not None, "start first"
        stream = self._stream

        def consume_outputs(outputs: Sequence[Output]) -> Flush | None:
            pieces = self._pieces_of(outputs)
            if not self._num_unfinished:
                stream.close()
            return consume(pieces)

        await stream.deliver(consume_outputs)

    @contextlib.asynccontextmanager
    async def while_connected(self, receive: Receive) -> AsyncIterator[None]:
        """Watch for a disconnect while inside; cancel unfinished requests on exit."""

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            self._cancel_unfinished()
            if self._stream is not None:
                self._stream.fail(ClientGone("the client disconnected"))

        with self._fleet.in_flight():
            watcher = asyncio.create_task(watch())
            try:
                yield
            finally:
                watcher.cancel()
                self._cancel_unfinished()

    def usage(self) -> dict[str, Any]:
        """Return OpenAI's usage object for the tokens so far; a prompt with several answers counts once."""
        answers = list(self._answers.values())
        num_prompt = sum(len(request.prompt) for request in self._requests[:: self._num_answers])
        num_generated = sum(answer.num_tokens for answer in answers)
        num_cached = sum(answer.num_cached_tokens for answer in answers[:: self._num_answers])
        return {
            "prompt_tokens": num_prompt,
            "total_tokens": num_prompt + num_generated,
            "completion_tokens": num_generated,
            "prompt_tokens_details": {"cached_tokens": num_cached},
        }

    def _cancel_unfinished(self) -> None:
        self._fleet.cancel([request_id for request_id, answer in self._answers.items() if not answer.is_finished])

    def _pieces_of(self, outputs: Sequence[Output]) -> list[Piece]:
        """Turn outputs, possibly of several steps, into one piece per answer."""
        if len(outputs) == 1:  # the usual case
            piece = self._advance(outputs[0], outputs[0].tokens)
            return [] if piece is None else [piece]
        arrived: dict[str, list[SampledToken]] = {}
        last: dict[str, Output] = {}
        for output in outputs:
            arrived.setdefault(output.request_id, []).extend(output.tokens)
            last[output.request_id] = output
        pieces = [self._advance(output, arrived[request_id]) for request_id, output in last.items()]
        return [piece for piece in pieces if piece is not None]

    def _advance(self, output: Output, tokens: Sequence[SampledToken]) -> Piece | None:
        """Turn tokens into text; ``output`` is the last of their outputs. ``None`` if the answer is over already."""
        answer = self._answers[output.request_id]
        if answer.is_finished:
            return None
        if output.finish is FinishReason.ERROR:
            raise ManyloraError(hide_paths(output.error or "The engine aborted this request without a reason."))
        if output.finish is FinishReason.CANCELLED:
            raise EngineDead("The engine cancelled this request.")
        self.adapter = output.adapter
        if output.num_cached_tokens > answer.num_cached_tokens:
            answer.num_cached_tokens = output.num_cached_tokens
        delta = answer.detokenizer.push(tokens, stop_token=output.stop_token)
        answer.num_tokens += delta.num_tokens
        if output.finish is None and not delta.finished:
            return Piece(index=answer.index, text=delta.text, logprobs=delta.logprobs)
        answer.is_finished = True
        self._num_unfinished -= 1
        return self._last_piece(answer, output, delta)

    def _last_piece(self, answer: _Answer, output: Output, delta: TextDelta) -> Piece:
        text, stop_reason, finish_reason = delta.text, delta.stop_reason, "stop"
        if not delta.finished:
            assert output.finish is not None
            rest = answer.detokenizer.finish()
            text, stop_reason = text + rest.text, rest.stop_reason
            finish_reason = "stop" if stop_reason is not None else output.finish.value
        elif output.finish is None:
            self._fleet.cancel([output.request_id], stopped=True)
        return Piece(
            index=answer.index,
            text=text,
            logprobs=delta.logprobs,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
        )
