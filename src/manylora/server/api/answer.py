"""Sending answers: whole, or as server-sent events.

What every chunk of a stream repeats is encoded once per stream; a chunk is a few concatenations around one
encoded string.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, Protocol

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from manylora.errors import ManyloraError
from manylora.hosting.client import Rest
from manylora.server.api.generation import ClientGone, Generation, Piece, Usage
from manylora.server.api.schemas import StreamOptions
from manylora.server.errors import error_body
from manylora.server.http_protocol import WriteChunk, chunk_writer

__all__ = ["LEAST_LOGPROB", "NOTHING_ELSE", "AnswerFormat", "EventStream", "Whole", "usage_json"]

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies must not gather events
]

LEAST_LOGPROB = -9999.0
"""What stands for minus infinity, which JSON cannot say; vLLM's number."""

NOTHING_ELSE = b',"logprobs":null,"finish_reason":null,"stop_reason":null}'
"""How a chunk's choice ends when it brings text alone, as nearly all do: those need no encoder."""

encode = msgspec.json.encode


def usage_json(usage: Usage) -> dict[str, Any]:
    """Return OpenAI's usage object."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "completion_tokens": usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


class AnswerFormat(Protocol):
    """How completions, or chat completions, look."""

    object: str
    chunk_object: str

    def chunk(self, piece: Piece) -> bytes | None:
        """Return the chunk's choice as JSON; ``None`` where there is nothing to say."""
        ...

    def choice(self, pieces: list[Piece]) -> dict[str, Any]:
        """Return a whole answer's choice."""
        ...


class _Envelope:
    """What surrounds the choices; made when the first output tells which adapter version answers."""

    def __init__(self, head: dict[str, Any], generation: Generation, fingerprint: str) -> None:
        if generation.adapter is not None:
            fingerprint += f"-{generation.adapter[:12]}"
        self.fields = {**head, "system_fingerprint": fingerprint}
        self.prefix = b"data: " + encode(self.fields)[:-1] + b',"choices":['


class EventStream(Response):
    """An answer as server-sent events; an ASGI application in itself.

    Args:
        generation: Started.
        form: How the chunks look.
        head: The fields every chunk begins with.
        fingerprint: Of the server's configuration.
        options: What the client asked for.
    """

    def __init__(
        self,
        generation: Generation,
        form: AnswerFormat,
        *,
        head: dict[str, Any],
        fingerprint: str,
        options: StreamOptions | None,
    ) -> None:
        self._generation = generation
        self._form = form
        self._head = {**head, "object": form.chunk_object}
        self._fingerprint = fingerprint
        self._include_usage = options is not None and bool(options.include_usage)
        self._usage_everywhere = self._include_usage and options is not None and bool(options.continuous_usage_stats)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events until every answer has finished, the engine fails, or the client leaves."""
        async with self._generation.while_connected(receive):
            await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
            try:
                await self._send_chunks(send, chunk_writer(scope))
            except ClientGone:
                return
            except ManyloraError as error:
                # The status is long gone: say it in an event, as vLLM does and the openai client expects.
                await _send_body(send, b"data: " + encode(error_body(error)) + b"\n\n" + DONE)
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_chunks(self, send: Send, write_chunk: WriteChunk) -> None:
        generation, form = self._generation, self._form
        envelope: _Envelope | None = None
        suffix = b'],"usage":null}\n\n' if self._include_usage else b"]}\n\n"

        def write(pieces: list[Piece]) -> Rest | None:
            nonlocal envelope, suffix
            if envelope is None:
                envelope = _Envelope(self._head, generation, self._fingerprint)
            if self._usage_everywhere:
                suffix = b'],"usage":' + encode(usage_json(generation.usage())) + b"}\n\n"
            body = b""
            for piece in pieces:  # nearly always one
                chunk = form.chunk(piece)
                if chunk is not None:
                    body += envelope.prefix + chunk + suffix
            return None if not body or write_chunk(body) else functools.partial(_send_body, send, body)

        await generation.give(write)
        assert envelope is not None
        last = b""
        if self._include_usage:
            last = envelope.prefix + b'],"usage":' + encode(usage_json(generation.usage())) + b"}\n\n"
        await _send_body(send, last + DONE)


async def _send_body(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})


class Whole(Response):
    """A whole answer in one response; an ASGI application in itself.

    Args:
        generation: Started.
        form: How the choices look.
        head: The fields the response begins with.
        fingerprint: Of the server's configuration.
        on_failure: Makes the response for an error.
    """

    def __init__(
        self,
        generation: Generation,
        form: AnswerFormat,
        *,
        head: dict[str, Any],
        fingerprint: str,
        on_failure: Callable[[ManyloraError], Response],
    ) -> None:
        self._generation = generation
        self._form = form
        self._head = {**head, "object": form.object}
        self._fingerprint = fingerprint
        self._on_failure = on_failure

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Wait for the answers, then send them."""
        async with self._generation.while_connected(receive):
            gathered: dict[int, list[Piece]] = {}

            def gather(pieces: list[Piece]) -> None:
                for piece in pieces:
                    gathered.setdefault(piece.index, []).append(piece)

            try:
                await self._generation.give(gather)
            except ClientGone:
                return
            except ManyloraError as error:
                response = self._on_failure(error)
            else:
                envelope = _Envelope(self._head, self._generation, self._fingerprint)
                choices = [self._form.choice(gathered[index]) for index in sorted(gathered)]
                body = {**envelope.fields, "choices": choices, "usage": usage_json(self._generation.usage())}
                response = Response(encode(body), media_type="application/json")
            await response(scope, receive, send)
