"""The answers to one HTTP request, from the engine's tokens to pieces of text.

An HTTP request of several prompts with ``n`` answers each becomes as many engine requests, submitted together: all are
accepted or none. Their outputs arrive on one stream. Outputs that arrived together become one piece per answer, so a
busy server sends larger pieces and not more of them. Stop strings end an answer here, which cancels its engine request.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec
from starlette.types import Receive

from manylora.core.errors import EngineDead, ManyloraError, RequestError
from manylora.core.types import AdapterKey, FinishReason, Output, PromptLogprobs, Request, SampledToken, SamplingParams
from manylora.serving.api.prompt_part import NO_DETAILS, Details, named_by_id
from manylora.serving.api.request import Context
from manylora.serving.hosting.fleet.versions import NumberedVersion
from manylora.serving.hosting.links.in_flight import Flush, OutputStream
from manylora.serving.http.errors import hide_paths
from manylora.serving.http.room import Places
from manylora.serving.http.turns import ClientGone, until_gone
from manylora.serving.text import Detokenizer, TextDelta, TokenLogprob

__all__ = ["BeginAnswers", "ConsumeText", "RequestAnswers", "TextPiece", "raise_failure"]


BeginAnswers: TypeAlias = Callable[[Sequence[Request]], Awaitable[OutputStream]]
"""Begins the answers to requests; returns the stream of their outputs."""


ConsumeText: TypeAlias = Callable[[int, str], Flush | None]
"""Consumes more text of an answer, of which it has the number; returns the work that must be awaited, if any."""


def raise_failure(output: Output, form_field: str | None) -> None:
    """Raise the error of an output that ends its request by one; ``form_field`` gave the form of the answer."""
    if output.finish is FinishReason.ERROR:
        reason = hide_paths(output.error or "The engine aborted this request without a reason.")
        raise RequestError(reason, param=form_field) if output.is_refused else ManyloraError(reason)
    if output.finish is FinishReason.CANCELLED:
        raise EngineDead("The engine cancelled this request.")


class TextPiece(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """New text of one answer."""

    index: int  # number of the answer: prompts in order, ``n`` answers each
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()  # log-probabilities of its tokens, if requested
    finish_reason: str | None = None  # ``stop`` or ``length`` on the last piece
    stop_reason: str | int | None = None  # the stop string or token that ended the answer, if any
    token_ids: tuple[int, ...] = ()
    prompt_logprobs: PromptLogprobs | None = None  # those of the prompt, if requested, on the first piece


@dataclass(slots=True, eq=False)
class _Answer:
    index: int
    detokenizer: Detokenizer | None = None  # from its first output on
    num_tokens: int = 0
    num_cached_tokens: int = 0
    is_finished: bool = False
    prompt_logprobs: PromptLogprobs | None = None  # until its first piece


@dataclass(eq=False, kw_only=True)
class RequestAnswers:
    """The answers to one HTTP request."""

    context: Context
    sampling: SamplingParams  # their parameters, with the stop strings, which are searched here alone
    num_answers: int  # answers per prompt
    form_field: str | None  # the field that gives the form of the answers, if one does
    details: Details  # the details of the response
    places: Places | None  # the places of its caller; each is given back when its answer ends
    # The version of the adapter that answers, held until all answers have ended; ``None`` for the base.
    version: NumberedVersion | None = None
    begin: BeginAnswers | None = None  # begins the answers; ``None`` to submit the requests as they are
    adapter: AdapterKey | None = None  # the adapter's version, once an output has named it
    requests: Sequence[Request] = ()  # prompts in order, ``num_answers`` requests for each; from ``start`` on
    _stream: OutputStream | None = None
    # Totals for ``usage``, which some clients ask for with every chunk.
    _num_generated_tokens: int = 0
    num_cached_tokens: int = 0  # tokens of the prompts that the prefix cache held
    _is_given: bool = False  # whether the version was given back

    def __post_init__(self) -> None:
        self._details = None if self.details == NO_DETAILS else self.details
        self._answers: dict[str, _Answer] = {}
        self._num_unfinished = self._num_prompt_tokens = 0

    async def start(self, requests: Awaitable[Sequence[Request]]) -> None:
        """Submit requests once they are made; return once the engines have accepted them.

        Errors are those of ``FleetRequests.submit``, after which the places and the version were given back.
        """
        try:
            self.requests = await requests
            self._answers = {request.request_id: _Answer(index) for index, request in enumerate(self.requests)}
            self._num_unfinished = len(self.requests)
            self._num_prompt_tokens = sum(len(request.prompt) for request in self.requests[:: self.num_answers])
            self._stream = await (self.begin or self.context.fleet.requests.submit)(self.requests)
        except BaseException:
            self._give_back()
            raise

    async def deliver(
        self, consume: Callable[[list[TextPiece]], Flush | None], consume_text: ConsumeText | None = None
    ) -> None:
        """Deliver pieces to ``consume`` as they arrive, until every answer has finished.

        ``consume`` is called on the event loop but not in this task; it returns the work, if any, that must be awaited
        before more pieces are delivered. Its errors are raised here. ``consume_text``, if given, is called in its place
        for a piece that is one answer's text and nothing else, as nearly all are.

        Errors are ``ClientGone`` and those of the engine: if it aborts one of the requests, by ``RequestError`` if the
        form of an answer takes it too much time, the others are cancelled.
        """
        assert self._stream is not None, "start first"
        stream, answers, has_details = self._stream, self._answers, self._details is not None

        def consume_outputs(outputs: Sequence[Output]) -> Flush | None:
            if has_details:
                self._note_prompts(outputs)
            if len(outputs) == 1:
                output = outputs[0]
                answer = answers[output.request_id]
                piece = self._advance(answer, output, output.tokens)
                if isinstance(piece, str):
                    if consume_text is not None:
                        return consume_text(answer.index, piece)
                    piece = TextPiece(index=answer.index, text=piece)
                pieces = [] if piece is None else [piece]
            else:
                pieces = self._pieces_of(outputs)
            if not self._num_unfinished:
                stream.close()
            return consume(pieces)

        await stream.deliver(consume_outputs)

    @contextlib.asynccontextmanager
    async def while_connected(self, receive: Receive) -> AsyncIterator[None]:
        """Watch for a disconnect while inside; cancel unfinished requests on exit."""

        async def watch() -> None:
            await until_gone(receive)
            self._cancel_unfinished()
            if self._stream is not None:
                self._stream.fail(ClientGone("the client disconnected"))

        with self.context.fleet.requests.in_progress.counted():
            watcher = asyncio.create_task(watch())
            try:
                yield
            finally:
                watcher.cancel()
                self._cancel_unfinished()
                self._give_back()
                if not self._num_unfinished:
                    num_tokens = [answer.num_tokens for answer in self._answers.values()]
                    for first in range(0, len(num_tokens), self.num_answers):
                        self.context.metrics.count_answers(num_tokens[first : first + self.num_answers])

    def usage(self) -> dict[str, Any]:
        """Return OpenAI's usage object for the tokens so far; a prompt with several answers counts once.

        Its details are null unless the server is to show them.
        """
        shows_cached = self.context.config.web.prompt_tokens_details
        is_prompt_only = self._details is not None and self._details.is_prompt_only
        num_generated = 0 if is_prompt_only else self._num_generated_tokens
        return {
            "prompt_tokens": self._num_prompt_tokens,
            "total_tokens": self._num_prompt_tokens + num_generated,
            "completion_tokens": num_generated,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens} if shows_cached else None,
        }

    def _cancel_unfinished(self) -> None:
        if not self._num_unfinished:
            return
        unfinished = [request_id for request_id, answer in self._answers.items() if not answer.is_finished]
        self.context.fleet.requests.cancel(unfinished)

    def _give_back(self) -> None:
        if self.places is not None:
            self.places.close(self._num_generated_tokens)
        if self.version is not None and not self._is_given:
            self._is_given = True
            self.context.fleet.adapters.give(self.version)

    def _pieces_of(self, outputs: Sequence[Output]) -> list[TextPiece]:
        """Turn several outputs, possibly of several steps, into one piece per answer, or one each if so asked."""
        arrived: dict[str | int, list[SampledToken]] = {}
        last: dict[str | int, Output] = {}
        for number, output in enumerate(outputs):
            place = number if self.details.is_by_token else output.request_id
            arrived.setdefault(place, []).extend(output.tokens)
            last[place] = output
        pieces: list[TextPiece] = []
        for place, output in last.items():
            answer = self._answers[output.request_id]
            piece = self._advance(answer, output, arrived[place])
            if piece is not None:
                pieces.append(TextPiece(index=answer.index, text=piece) if isinstance(piece, str) else piece)
        return pieces

    def _advance(self, answer: _Answer, output: Output, tokens: Sequence[SampledToken]) -> TextPiece | str | None:
        """Turn tokens into text; ``output`` is the last of their outputs.

        Return a piece, or its text if it has nothing else; ``None`` if the answer is over already.
        """
        if answer.is_finished:
            return None
        if output.finish is not None:
            raise_failure(output, self.form_field)
        self.adapter = output.adapter
        if output.num_cached_tokens > answer.num_cached_tokens:
            if answer.index % self.num_answers == 0:
                self.num_cached_tokens += output.num_cached_tokens - answer.num_cached_tokens
            answer.num_cached_tokens = output.num_cached_tokens
        detokenizer = answer.detokenizer
        if detokenizer is None:
            prompt = self.requests[answer.index].prompt
            detokenizer = answer.detokenizer = Detokenizer(self.context.tokenizer, prompt, self.sampling)
        if len(tokens) == 1 and output.finish is None and tokens[0].logprob is None and self._details is None:
            added = detokenizer.add(tokens[0].token_id)
            if isinstance(added, str):
                answer.num_tokens += 1
                self._num_generated_tokens += 1
                return added
            delta = added
        else:
            delta = detokenizer.push(tokens, stop_token=output.stop_token)
        answer.num_tokens += delta.num_tokens
        self._num_generated_tokens += delta.num_tokens
        if output.finish is None and not delta.finished:
            piece = TextPiece(index=answer.index, text=delta.text, logprobs=delta.logprobs)
        else:
            answer.is_finished = True
            self._num_unfinished -= 1
            if self.places is not None:
                self.places.give()
            piece = self._last_piece(answer, output, delta)
        return piece if self._details is None else _detailed(piece, answer, tokens[: delta.num_tokens], self._details)

    def _note_prompts(self, outputs: Sequence[Output]) -> None:
        for output in outputs:
            if output.prompt_logprobs is not None:
                self._answers[output.request_id].prompt_logprobs = output.prompt_logprobs

    def _last_piece(self, answer: _Answer, output: Output, delta: TextDelta) -> TextPiece:
        text, stop_reason, finish_reason = delta.text, delta.stop_reason, "stop"
        if not delta.finished:
            assert output.finish is not None
            assert answer.detokenizer is not None
            rest = answer.detokenizer.finish()
            text, stop_reason = text + rest.text, rest.stop_reason
            finish_reason = "stop" if stop_reason is not None else output.finish.value
        elif output.finish is None:
            self.context.fleet.requests.cancel([output.request_id], stopped=True)
        return TextPiece(
            index=answer.index, text=text, logprobs=delta.logprobs, finish_reason=finish_reason, stop_reason=stop_reason
        )


def _detailed(piece: TextPiece, answer: _Answer, tokens: Sequence[SampledToken], details: Details) -> TextPiece:
    """Return a piece with the details that its response shows."""
    report, answer.prompt_logprobs = answer.prompt_logprobs, None
    if details.is_prompt_only:
        finish_reason = piece.finish_reason and FinishReason.LENGTH.value
        return TextPiece(index=piece.index, text="", finish_reason=finish_reason, prompt_logprobs=report)
    return msgspec.structs.replace(
        piece,
        token_ids=tuple([token.token_id for token in tokens]) if details.has_token_ids else (),
        logprobs=tuple(map(named_by_id, piece.logprobs)) if details.names_by_id else piece.logprobs,
        prompt_logprobs=report,
    )
