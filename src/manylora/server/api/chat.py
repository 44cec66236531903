"""``POST /v1/chat/completions``."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from manylora.errors import RequestError
from manylora.server.api.answers import Piece
from manylora.server.api.request import context_of, read_body
from manylora.server.api.respond import LEAST_LOGPROB, LONG_TEXT, NOTHING_ELSE, respond
from manylora.server.api.schemas import ChatBody, Message, sampling_params, template_arguments
from manylora.text import TokenLogprob

__all__ = ["chat_routes", "flatten"]


class ChatFormat:
    """JSON of chat completions, with log-probabilities if ``has_logprobs``."""

    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, *, has_logprobs: bool) -> None:
        self._has_logprobs = has_logprobs
        self._is_begun: set[int] = set()

    def chunk(self, piece: Piece) -> bytes | None:
        """Return the choice of a chunk; the first of an answer has the role."""
        delta: dict[str, str] = {}
        if piece.index not in self._is_begun:
            self._is_begun.add(piece.index)
            delta["role"] = "assistant"
        elif not (piece.text or piece.logprobs or piece.finish_reason):
            return None
        elif piece.finish_reason is None and not self._has_logprobs:
            content = msgspec.json.encode(piece.text)
            return b'{"index":%d,"delta":{"content":%b}%b' % (piece.index, content, NOTHING_ELSE)
        delta["content"] = piece.text
        return msgspec.json.encode(self._choice(piece, piece.logprobs, "delta", delta))

    def choice(self, pieces: list[Piece]) -> dict[str, Any]:
        """Return the choice of a whole answer."""
        message = {"role": "assistant", "content": "".join(piece.text for piece in pieces), "refusal": None}
        logprobs = tuple(logprob for piece in pieces for logprob in piece.logprobs)
        return self._choice(pieces[-1], logprobs, "message", message)

    def _choice(
        self, piece: Piece, logprobs: tuple[TokenLogprob, ...], field: str, content: dict[str, Any]
    ) -> dict[str, Any]:
        return {
            "index": piece.index,
            field: content,
            "logprobs": {"content": [_logprob(token) for token in logprobs], "refusal": None}
            if self._has_logprobs
            else None,
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
        }


def _entry(token: TokenLogprob) -> dict[str, Any]:
    return {"token": token.text, "logprob": max(token.logprob, LEAST_LOGPROB), "bytes": list(token.raw)}


def _logprob(token: TokenLogprob) -> dict[str, Any]:
    return {**_entry(token), "top_logprobs": [_entry(other) for other in token.top]}


def flatten(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages for a chat template: a role and one text each.

    Raises:
        RequestError: A part is not text, or belongs to tool calling.
    """
    flat: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        at = f"messages[{index}]"
        for field in ("tool_calls", "function_call", "tool_call_id"):
            if getattr(message, field):
                raise RequestError(f"{at}.{field} is not supported: this server has no tool calling", param="messages")
        if message.content is None:
            raise RequestError(f"{at}.content is missing", param="messages")
        content = message.content if isinstance(message.content, str) else _join(message.content, at)
        flat.append({"role": message.role, "content": content})
    return flat


def _join(parts: list[dict[str, Any]], at: str) -> str:
    texts: list[str] = []
    for part in parts:
        kind, text = part.get("type"), part.get("text")
        if kind != "text":
            raise RequestError(
                f"{at}.content has a part of type {str(kind)[:50]!r}: this server takes text only", param="messages"
            )
        if not isinstance(text, str):
            raise RequestError(f"{at}.content has a text part whose text is no string", param="messages")
        texts.append(text)
    return "\n".join(texts)


def _num_logprobs(body: ChatBody) -> int | None:
    if body.top_logprobs is not None and not body.logprobs:
        raise RequestError("top_logprobs needs logprobs = true", param="top_logprobs")
    if body.top_logprobs is not None and not 0 <= body.top_logprobs <= 20:
        raise RequestError(f"Got top_logprobs = {body.top_logprobs}, expected 0 to 20", param="top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else None


async def create_chat_completion(request: Request) -> Response:
    """``POST /v1/chat/completions``."""
    context = context_of(request)
    tenant = context.gate.check_inference(request)
    body = await read_body(request, ChatBody)
    if body.echo:
        raise RequestError("echo is not supported for chats", param="echo")
    settings = await context.settings.of(body.model)
    sampling = sampling_params(
        body,
        max_tokens=body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
        logprobs=_num_logprobs(body),
        vocab_size=context.fleet.info.vocab_size,
        defaults=settings.defaults,
    )
    messages = flatten(body.messages)
    arguments = template_arguments(body)

    def render() -> tuple[int, ...]:
        return tuple(
            context.tokenizer.chat(
                messages,
                settings.chat_template,
                **{**arguments, **(body.chat_template_kwargs or {})},
            )
        )

    is_long = sum(len(message["content"]) for message in messages) > LONG_TEXT or settings.chat_template is not None
    prompt = await asyncio.to_thread(render) if is_long else render()
    form = ChatFormat(has_logprobs=sampling.logprobs is not None)
    return await respond(
        context, body, [prompt], sampling, form, settings=settings, tenant=tenant, id_prefix="chatcmpl-"
    )


chat_routes = [Route("/v1/chat/completions", create_chat_completion, methods=["POST"])]
