"""The responses of completions and chat completions, from checked bodies.

Answers are sent whole, or as server-sent events. The fields that every chunk of a stream repeats are encoded once; a
chunk is a few concatenations around one encoded string.
"""

from __future__ import annotations

import functools
import uuid
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Protocol, TypeAlias

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from manylora.core.errors import ContextExceeded, ManyloraError, ModelNotFound, RequestError
from manylora.core.server_config import MOST_LOGPROBS
from manylora.core.types import PromptLogprobs, Request, SamplingParams
from manylora.serving.api.answers import RequestAnswers, TextPiece
from manylora.serving.api.constraints import constraint_field
from manylora.serving.api.json_parts import JsonParts, encode_parts
from manylora.serving.api.model_settings import Settings
from manylora.serving.api.prompt_part import NO_DETAILS, Details, PromptPart
from manylora.serving.api.request import Context
from manylora.serving.api.schemas import SamplingFields, StreamOptions
from manylora.serving.hosting.links.in_flight import Flush
from manylora.serving.http.bounds import MAX_ANSWER_LOGPROBS, MAX_SALT_CHARS
from manylora.serving.http.errors import error_body, error_response
from manylora.serving.http.http_protocol import WriteChunk, chunk_writer, connection_breaker
from manylora.serving.http.room import room_of_engine
from manylora.serving.http.turns import ClientGone, next_turn

__all__ = [
    "HEADERS",
    "NOTHING_ELSE",
    "AnswerFormat",
    "check_lengths",
    "check_num_answers",
    "respond",
    "send_body",
    "submit",
]

DONE = b"data: [DONE]\n\n"
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx must not buffer events
]

NULL_FIELDS = {"service_tier": None, "kv_transfer_params": None}
"""Fields of whole responses that vLLM has and that are always null here."""

NOTHING_ELSE = b',"logprobs":null,"finish_reason":null,"stop_reason":null}'
"""The end of a choice that has text alone, as nearly all do: such a chunk needs no JSON encoder."""

REQUESTS_AT_ONCE = 256
"""Requests of the engine that are made at once, in a millisecond or two."""

PART_BYTES = 256 * 1024
"""Bytes of a whole answer that are written at once."""

Hold: TypeAlias = Callable[[int, Callable[[], None]], AbstractContextManager[None]]

encode = msgspec.json.encode


class AnswerFormat(Protocol):
    """The JSON of completions, or of chat completions."""

    object: str
    chunk_object: str
    prompt: PromptPart
    repeats_prompt: bool
    """Whether the first chunk of each answer has its prompt, which may be long."""

    def head(self, *, is_chunk: bool) -> dict[str, Any]:
        """Return the fields of a whole response, or of the first chunk, that tell of all answers."""
        ...

    def chunk(self, piece: TextPiece) -> bytes | None:
        """Return the choice of a chunk as JSON; ``None`` for no chunk."""
        ...

    def gather(self, piece: TextPiece) -> None:
        """Add a piece to its whole answer."""
        ...

    def choice(self, index: int) -> dict[str, Any]:
        """Return the choice of a whole answer, all of whose pieces were gathered."""
        ...


async def respond(
    request: HttpRequest,
    context: Context,
    body: SamplingFields,
    prompts: Sequence[tuple[int, ...]],
    sampling: SamplingParams,
    form: AnswerFormat,
    *,
    settings: Settings,
    tenant: str,
    id_prefix: str,
    constraint_param: str | None = None,
) -> Response:
    """Submit the prompts and return the response, which sends the answers; arguments and errors as of ``submit``."""
    answers, head = await submit(
        request,
        context,
        body,
        prompts,
        sampling,
        settings=settings,
        tenant=tenant,
        id_prefix=id_prefix,
        constraint_param=constraint_param,
        details=form.prompt.details,
    )
    if body.stream:
        return _EventStream(answers, form, head=head, fingerprint=context.fingerprint, options=body.stream_options)
    hold = functools.partial(context.unread.hold, functools.partial(context.gate.caller_of, request))
    return _WholeAnswers(answers, form, head=head, fingerprint=context.fingerprint, hold=hold)


async def submit(
    request: HttpRequest,
    context: Context,
    body: SamplingFields,
    prompts: Sequence[tuple[int, ...]],
    sampling: SamplingParams,
    *,
    settings: Settings,
    tenant: str,
    id_prefix: str,
    constraint_param: str | None = None,
    details: Details = NO_DETAILS,
) -> tuple[RequestAnswers, dict[str, Any]]:
    """Submit the prompts; return their answers, and the id, time and model of the response.

    Args:
        request: The HTTP request.
        context: The server's parts.
        body: Its body.
        prompts: Token ids.
        sampling: Sampling parameters of every answer.
        tenant: The caller.
        id_prefix: The begin of the response's id.
        settings: Settings of its model.
        constraint_param: The field that gave the constraint, if none of the usual ones.
        details: The details of the response.

    Raises:
        RequestError: The engine refuses a request.
        CapacityError: The queue is full, the caller has too many answers under way, or no engine serves.
        ManyloraError: As of ``FormChecks.check``.
    """
    num_answers = body.n or 1
    check_num_answers(context, len(prompts), num_answers)
    check_lengths(context, prompts)
    if not body.model:  # to the engine, an empty name is the base
        raise ModelNotFound("Got an empty model name, which does not exist", param="model")
    _check_logprobs(context, sampling, prompts, num_answers, settings)
    form_field = None
    if sampling.constraint is not None:
        form_field = constraint_param or constraint_field(body)
        try:
            await context.forms.check(request, sampling.constraint)
        except RequestError as error:
            raise RequestError(str(error), param=form_field) from None
    answer_id = id_prefix + uuid.uuid4().hex
    searched = replace(sampling, stop=()) if sampling.stop else sampling  # no engine looks for stop strings
    salt = _salt(context, tenant, body.cache_salt)
    requests: list[Request] = []
    for prompt in prompts:
        requests += [
            Request(
                request_id=f"{answer_id}-{len(requests) + choice}",
                prompt=prompt,
                sampling=searched,
                model=body.model,
                tenant=tenant,
                cache_salt=salt,
                priority=body.priority or 0,
                seed=_seed_of(searched.seed, choice),
                default_max_tokens=settings.defaults.max_new_tokens,
            )
            for choice in range(num_answers)
        ]
        if len(requests) % REQUESTS_AT_ONCE < num_answers:
            await next_turn()
    places = context.callers.take(tenant, len(requests)) if context.gate.tells_tenants else None
    answers = RequestAnswers(
        context.fleet.requests,
        context.tokenizer,
        requests,
        sampling,
        num_answers=num_answers,
        form_field=form_field,
        details=details,
        count=context.metrics.count_answers,
        places=places,
    )
    await answers.start()
    return answers, {"id": answer_id, "created": int(context.epoch_s()), "model": body.model}


def check_num_answers(context: Context, num_prompts: int, num_answers: int) -> None:
    """Raise ``RequestError`` unless a request's answers fit into the queue, and into a caller's part of it."""
    scheduler = context.engine_config.scheduler
    most = scheduler.max_waiting
    if context.gate.tells_tenants:
        most = min(most, room_of_engine(scheduler))
    if num_prompts * num_answers > most:
        raise RequestError(
            f"Got {num_prompts} prompts with n = {num_answers}, expected at most {most} answers in one request",
            param="prompt" if num_prompts > 1 else "n",
        )


def check_lengths(context: Context, prompts: Sequence[Sequence[int]]) -> None:
    """Raise ``ContextExceeded`` for a prompt without room for an answer, before it is copied for each of ``n``."""
    limit = context.fleet.engines.info.max_model_len
    longest = max(map(len, prompts))
    if longest >= limit:
        raise ContextExceeded(
            f"The prompt has {longest} tokens; this model's context is {limit}, one of them at least to answer",
            param="prompt",
        )


def _check_logprobs(
    context: Context, sampling: SamplingParams, prompts: Sequence[Sequence[int]], num_answers: int, settings: Settings
) -> None:
    """Raise ``RequestError`` for more log-probabilities of a token than are allowed, or more in all than are kept."""
    most = context.config.web.max_logprobs
    for param, num_top in (("logprobs", sampling.logprobs), ("prompt_logprobs", sampling.prompt_logprobs)):
        if (num_top or 0) > most:
            raise RequestError(f"Got {num_top} log-probabilities, expected at most {most}", param=param)
    if sampling.logprobs is None:
        return
    limit = context.fleet.engines.info.max_model_len
    longest = sampling.max_tokens or settings.defaults.max_new_tokens or limit
    num_tokens = sum(min(longest, limit - len(prompt)) for prompt in prompts) * num_answers
    most = max(MAX_ANSWER_LOGPROBS, limit * (1 + MOST_LOGPROBS))  # one answer may always be as long as the context
    if num_tokens * (1 + sampling.logprobs) > most:
        raise RequestError(
            f"The answers may have {num_tokens} tokens with {1 + sampling.logprobs} log-probabilities each, expected "
            f"at most {most} log-probabilities in one request: set max_tokens, or ask for fewer answers at a time",
            param="logprobs",
        )


def _salt(context: Context, tenant: str, given: str | None) -> str:
    """Return the salt of cached prefixes: callers with different API keys share none, or timing would show theirs.

    Raises:
        RequestError: The caller's own is too long.
    """
    if given is not None and len(given) > MAX_SALT_CHARS:
        raise RequestError(
            f"Got a cache_salt of {len(given)} characters, expected at most {MAX_SALT_CHARS}", param="cache_salt"
        )
    return given or "" if context.config.shared_prefixes or not tenant else f"{tenant} {given or ''}"


def _seed_of(seed: int | None, choice: int) -> int | None:
    """Give each of ``n`` answers its own seed, beside the shared sampling; with one seed all would be equal."""
    return None if seed is None or choice == 0 else (seed + choice) % 2**63


class _Envelope:
    """The fields around the choices; created with the first output, which names the adapter's version."""

    def __init__(self, head: dict[str, Any], answers: RequestAnswers, fingerprint: str) -> None:
        if answers.adapter is not None:
            fingerprint += f"-{answers.adapter[:12]}"
        self.fields = {**head, "system_fingerprint": fingerprint}
        self.prefix = b"data: " + encode(self.fields)[:-1] + b',"choices":['


class _EventStream(Response):
    """Answers as server-sent events: an ASGI application, which Starlette calls as a response.

    Args:
        answers: Started answers.
        form: Formats the chunks.
        head: The first fields of every chunk.
        fingerprint: Digest of the server's configuration.
        options: ``stream_options`` of the request.
    """

    def __init__(
        self,
        answers: RequestAnswers,
        form: AnswerFormat,
        *,
        head: dict[str, Any],
        fingerprint: str,
        options: StreamOptions | None,
    ) -> None:
        self._answers = answers
        self._form = form
        self._head = {**head, "object": form.chunk_object}
        self._fingerprint = fingerprint
        self._include_usage = options is not None and bool(options.include_usage)
        self._usage_everywhere = self._include_usage and options is not None and bool(options.continuous_usage_stats)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events until every answer has finished, the engine fails, or the client disconnects."""
        async with self._answers.while_connected(receive):
            await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
            try:
                await self._send_chunks(send, chunk_writer(scope))
            except ClientGone:
                return
            except ManyloraError as error:
                # The status was sent: the error is an event, as in vLLM and as the openai client expects.
                await send_body(send, b"data: " + encode(error_body(error)) + b"\n\n" + DONE)
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_chunks(self, send: Send, write_chunk: WriteChunk) -> None:
        answers, form = self._answers, self._form
        envelope: _Envelope | None = None
        is_long = form.repeats_prompt or form.prompt.details.prompt_logprobs is not None
        suffix = b'],"usage":null}\n\n' if self._include_usage else b"]}\n\n"

        def render(pieces: list[TextPiece]) -> bytes:
            nonlocal envelope, suffix
            prefix = b""
            if envelope is None:
                envelope = _Envelope(self._head, answers, self._fingerprint)
                if first := form.head(is_chunk=True):
                    prefix = _Envelope({**self._head, **first}, answers, self._fingerprint).prefix
            if self._usage_everywhere:
                suffix = b'],"usage":' + encode(answers.usage()) + b"}\n\n"
            body = b""
            for piece in pieces:  # usually one; several are short, or are rendered one by one
                chunk = form.chunk(piece)
                if chunk is not None:
                    body += (prefix or envelope.prefix) + chunk + suffix
                    prefix = b""
            return body

        async def write_slowly(pieces: list[TextPiece]) -> None:
            parts: list[bytes] = []
            num_bytes = 0
            for piece in pieces:
                if piece.prompt_logprobs is not None:
                    await form.prompt.add(piece.index, piece.prompt_logprobs)
                parts.append(render([piece]))
                num_bytes += len(parts[-1])
                if num_bytes >= PART_BYTES:
                    await send_body(send, b"".join(parts))
                    await next_turn()
                    parts, num_bytes = [], 0
            if parts:
                await send_body(send, b"".join(parts))

        def write(pieces: list[TextPiece]) -> Flush | None:
            if is_long and (len(pieces) > 1 or any(piece.prompt_logprobs is not None for piece in pieces)):
                return functools.partial(write_slowly, pieces)
            body = render(pieces)
            return None if not body or write_chunk(body) else functools.partial(send_body, send, body)

        await answers.deliver(write)
        assert envelope is not None
        last = b""
        if self._include_usage:
            last = envelope.prefix + b'],"usage":' + encode(answers.usage()) + b"}\n\n"
        await send_body(send, last + DONE)


async def send_body(send: Send, body: bytes) -> None:
    """Send a part of a response's body."""
    await send({"type": "http.response.body", "body": body, "more_body": True})


async def _send_whole(send: Send, parts: Sequence[bytes]) -> None:
    """Send JSON, as fast as the client takes it."""
    num_bytes = sum(map(len, parts))
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % num_bytes)]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    together: list[bytes] = []
    num_together = 0
    for part in parts:
        together.append(part)
        num_together += len(part)
        if num_together >= PART_BYTES:
            await send_body(send, b"".join(together))
            await next_turn()
            together, num_together = [], 0
    await send({"type": "http.response.body", "body": b"".join(together), "more_body": False})


class _WholeAnswers(Response):
    """Whole answers in one response; arguments as of ``_EventStream``, and ``hold`` counts the bytes that wait."""

    def __init__(
        self, answers: RequestAnswers, form: AnswerFormat, *, head: dict[str, Any], fingerprint: str, hold: Hold
    ) -> None:
        self._answers = answers
        self._form = form
        self._head = {**head, "object": form.object}
        self._fingerprint = fingerprint
        self._hold = hold

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Wait for the answers, then send them."""
        async with self._answers.while_connected(receive):
            reports: dict[int, PromptLogprobs | None] = {}

            def gather(pieces: list[TextPiece]) -> None:
                for piece in pieces:
                    reports[piece.index] = reports.get(piece.index) or piece.prompt_logprobs
                    self._form.gather(piece)

            try:
                await self._answers.deliver(gather)
            except ClientGone:
                return
            except ManyloraError as error:
                await error_response(error)(scope, receive, send)
            else:
                envelope = _Envelope(self._head, self._answers, self._fingerprint)
                choices = []
                for index in sorted(reports):
                    if (report := reports[index]) is not None:
                        await self._form.prompt.add(index, report)
                    choices.append(JsonParts(encode_parts(self._form.choice(index))))
                    await next_turn()
                body = {
                    **envelope.fields,
                    "choices": choices,
                    "usage": self._answers.usage(),
                    **NULL_FIELDS,
                    **self._form.head(is_chunk=False),
                }
                parts = encode_parts(body)
                with self._hold(sum(map(len, parts)), connection_breaker(scope)):
                    await _send_whole(send, parts)
