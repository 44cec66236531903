"""The responses of completions and chat completions, from checked bodies.

Answers are sent whole, or as server-sent events. What the chunks of a stream repeat is encoded once: nearly every chunk
is one encoded string between constant bytes.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from manylora.core.errors import ManyloraError
from manylora.core.types import PromptLogprobs, SamplingParams
from manylora.serving.api.answers import RequestAnswers, TextPiece
from manylora.serving.api.formats import AnswerFormat
from manylora.serving.api.prompt_part import JsonParts, encode_parts
from manylora.serving.api.request import AnswerCall, Context
from manylora.serving.api.submit import submit
from manylora.serving.hosting.links.in_flight import Flush
from manylora.serving.http.errors import error_body, error_response
from manylora.serving.http.http_protocol import chunk_writer, connection_breaker
from manylora.serving.http.turns import ClientGone, next_turn

__all__ = ["DIGEST_HEADER", "VERSION_HEADER", "EventStream", "respond", "version_headers"]

DONE = b"data: [DONE]\n\n"
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx must not buffer events
]

VERSION_HEADER, DIGEST_HEADER = "X-Adapter-Version", "X-Adapter-Digest"
SAFE_IN_HEADER = "/:@+=()[]"  # characters of names of adapters that are not percent-encoded in headers

NULL_FIELDS = {"service_tier": None, "kv_transfer_params": None}
"""Fields of whole responses that vLLM has and that are always null here."""

PART_BYTES = 256 * 1024  # bytes of a whole answer that are written at once

encode = msgspec.json.encode


async def respond(
    call: AnswerCall[Any],
    prompts: Sequence[tuple[int, ...]],
    sampling: SamplingParams,
    form: AnswerFormat[Any],
    *,
    id_prefix: str,
    form_field: str | None = None,
) -> Response:
    """Submit the prompts and return the response, which sends the answers; arguments and errors as for ``submit``."""
    answers, head = await submit(
        call, prompts, sampling, id_prefix=id_prefix, form_field=form_field, details=form.prompt.details
    )
    kind = _AnswerStream if call.body.stream else _WholeAnswers
    return kind(call, answers, form, head)


class EventStream(Response, ABC):
    """Answers as server-sent events: an ASGI application, which Starlette calls as a response."""

    _is_long = False
    """Whether pieces may become long JSON, which is sent in parts, between which others have their turns."""

    def __init__(self, answers: RequestAnswers) -> None:
        self._answers = answers
        self._around: dict[int, tuple[bytes, bytes]] = {}
        """The bytes before and after the JSON of more text, by answer, where they are the same for all its chunks."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events until every answer has finished, the engine fails, or the client disconnects."""
        write_chunk = chunk_writer(scope)

        def write(pieces: list[TextPiece]) -> Flush | None:
            if self._is_long and (len(pieces) > 1 or any(piece.prompt_logprobs is not None for piece in pieces)):
                return functools.partial(self._write_slowly, send, pieces)
            body = self._render(pieces)
            return None if not body or write_chunk(body) else functools.partial(_send_body, send, body)

        def write_text(index: int, text: str) -> Flush | None:
            if (around := self._around.get(index)) is None:
                return write([TextPiece(index=index, text=text)])
            body = _text_event(around, text)
            return None if not body or write_chunk(body) else functools.partial(_send_body, send, body)

        async with self._answers.while_connected(receive):
            headers = [*HEADERS, *version_headers(self._answers)]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            if first := self._first():
                await _send_body(send, first)
            try:
                await self._answers.deliver(write, write_text)
            except ClientGone:
                return
            except ManyloraError as error:  # the status was sent: the error is an event
                last = self._failed(error)
            else:
                last = self._last()
            await _send_body(send, last)
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _first(self) -> bytes:
        """Return the events before the first piece."""
        return b""

    @abstractmethod
    def _render(self, pieces: list[TextPiece]) -> bytes:
        """Return the events of pieces; usually there is one."""

    @abstractmethod
    def _last(self) -> bytes:
        """Return the events after the last piece."""

    @abstractmethod
    def _failed(self, error: ManyloraError) -> bytes:
        """Return the events in place of the rest of the answers."""

    async def _write_slowly(self, send: Send, pieces: list[TextPiece]) -> None:
        parts: list[bytes] = []
        num_bytes = 0
        for piece in pieces:
            if piece.prompt_logprobs is not None:
                await self._add_prompt(piece.index, piece.prompt_logprobs)
            parts.append(self._render([piece]))
            num_bytes += len(parts[-1])
            if num_bytes >= PART_BYTES:
                await _send_body(send, b"".join(parts))
                await next_turn()
                parts, num_bytes = [], 0
        if parts:
            await _send_body(send, b"".join(parts))

    async def _add_prompt(self, index: int, report: PromptLogprobs) -> None:
        """Take the log-probabilities of an answer's prompt."""


def version_headers(answers: RequestAnswers) -> list[tuple[bytes, bytes]]:
    """Return the headers about the version of the adapter that answers, and about the limits of its caller."""
    limits = [] if answers.places is None else answers.places.headers()
    version = answers.version
    if version is None:
        return limits
    headers = ((VERSION_HEADER, quote(version.label, safe=SAFE_IN_HEADER)), (DIGEST_HEADER, version.key))
    return [*limits, *((name.lower().encode(), value.encode()) for name, value in headers)]


def _envelope(head: dict[str, Any], answers: RequestAnswers, context: Context) -> dict[str, Any]:
    """Return the fields around the choices, once the first output has named the adapter's version."""
    version = "" if answers.adapter is None else f"-{answers.adapter[:12]}"
    return {**head, "system_fingerprint": context.fingerprint + version}


class _AnswerStream(EventStream):
    """Answers in the chunks of a format.

    ``head`` has the first fields of every chunk.
    """

    def __init__(
        self, call: AnswerCall[Any], answers: RequestAnswers, form: AnswerFormat[Any], head: dict[str, Any]
    ) -> None:
        super().__init__(answers)
        options = call.body.stream_options
        self._context = call.context
        self._form = form
        self._head = {**head, "object": form.chunk_object}
        self._includes_usage = options is not None and bool(options.include_usage)
        self._usage_everywhere = self._includes_usage and bool(options.continuous_usage_stats)
        self._is_long = form.repeats_prompt or form.prompt.details.prompt_logprobs is not None
        self._prefix = b""  # of every chunk, once the first is made
        self._suffix = b'],"usage":null}\n\n' if self._includes_usage else b"]}\n\n"

    def _render(self, pieces: list[TextPiece]) -> bytes:
        first = b""
        if not self._prefix:
            self._prefix = self._prefix_of(self._head)
            if fields := self._form.head(is_chunk=True):
                first = self._prefix_of({**self._head, **fields})
        if self._usage_everywhere:
            self._suffix = self._usage_end()
        body = b""
        for piece in pieces:  # several are short, or are rendered one by one
            around = self._around.get(piece.index)
            if around is not None and piece.finish_reason is None:
                body += _text_event(around, piece.text)
                continue
            chunk = self._form.chunk(piece)
            if chunk is not None:
                body += (first or self._prefix) + chunk + self._suffix
                first = b""
                if not self._usage_everywhere and (json := self._form.around_text(piece.index)) is not None:
                    self._around[piece.index] = self._prefix + json[0], json[1] + self._suffix
        return body

    def _last(self) -> bytes:
        return self._prefix + self._usage_end() + DONE if self._includes_usage else DONE

    def _failed(self, error: ManyloraError) -> bytes:
        return b"data: " + encode(error_body(error)) + b"\n\n" + DONE  # as in vLLM, and as the openai client expects

    async def _add_prompt(self, index: int, report: PromptLogprobs) -> None:
        await self._form.prompt.add(index, report)

    def _prefix_of(self, head: dict[str, Any]) -> bytes:
        return b"data: " + encode(_envelope(head, self._answers, self._context))[:-1] + b',"choices":['

    def _usage_end(self) -> bytes:
        return b'],"usage":' + encode(self._answers.usage()) + b"}\n\n"


def _text_event(around: tuple[bytes, bytes], text: str) -> bytes:
    """Return the event of more text; nothing for none."""
    return around[0] + encode(text) + around[1] if text else b""


class _WholeAnswers(Response):
    """Whole answers in one response; arguments as of ``_AnswerStream``."""

    def __init__(
        self, call: AnswerCall[Any], answers: RequestAnswers, form: AnswerFormat[Any], head: dict[str, Any]
    ) -> None:
        self._call = call
        self._answers = answers
        self._form = form
        self._head = {**head, "object": form.object}

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
                parts = encode_parts(await self._body(reports))
                context, num_bytes = self._call.context, sum(map(len, parts))
                caller_of = functools.partial(context.gate.caller_of, self._call.http)
                with context.waiting_answers.hold(caller_of, num_bytes, connection_breaker(scope)):
                    await _send_whole(send, parts, version_headers(self._answers))

    async def _body(self, reports: dict[int, PromptLogprobs | None]) -> dict[str, Any]:
        choices = []
        for index in sorted(reports):
            if (report := reports[index]) is not None:
                await self._form.prompt.add(index, report)
            choices.append(JsonParts(encode_parts(self._form.choice(index))))
            await next_turn()
        return {
            **_envelope(self._head, self._answers, self._call.context),
            "choices": choices,
            "usage": self._answers.usage(),
            **NULL_FIELDS,
            **self._form.head(is_chunk=False),
        }


async def _send_body(send: Send, body: bytes) -> None:
    """Send a part of a response's body."""
    await send({"type": "http.response.body", "body": body, "more_body": True})


async def _send_whole(send: Send, parts: Sequence[bytes], more_headers: Sequence[tuple[bytes, bytes]]) -> None:
    """Send JSON, as fast as the client takes it."""
    num_bytes = sum(map(len, parts))
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % num_bytes), *more_headers]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    together: list[bytes] = []
    num_together = 0
    for part in parts:
        together.append(part)
        num_together += len(part)
        if num_together >= PART_BYTES:
            await _send_body(send, b"".join(together))
            await next_turn()
            together, num_together = [], 0
    await send({"type": "http.response.body", "body": b"".join(together), "more_body": False})
