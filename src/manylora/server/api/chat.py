"""``POST /v1/chat/completions``."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from manylora.errors import RequestError
from manylora.server.api.answers import Piece
from manylora.server.api.message_format import MessageFormat, chat_choice, message_readers
from manylora.server.api.request import Context, context_of, read_body
from manylora.server.api.respond import LONG_TEXT, NOTHING_ELSE, AnswerFormat, respond
from manylora.server.api.schemas import ChatBody, Message, sampling_params, template_arguments
from manylora.server.api.tools import called, tool_use
from manylora.server.model_settings import Settings

__all__ = ["chat_prompt", "chat_routes", "flatten"]


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
        return msgspec.json.encode(chat_choice([piece], "delta", delta, has_logprobs=self._has_logprobs))

    def choice(self, pieces: list[Piece]) -> dict[str, Any]:
        """Return the choice of a whole answer."""
        message = {"role": "assistant", "content": "".join(piece.text for piece in pieces), "refusal": None}
        return chat_choice(pieces, "message", message, has_logprobs=self._has_logprobs)


def flatten(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages for a chat template: a role, one text, and calls with their arguments as objects.

    Raises:
        RequestError: A part is not text, or the arguments of a call are not an object.
    """
    flat: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        at = f"messages[{index}]"
        if message.function_call:
            raise RequestError(f"{at}.function_call is not supported; use tool_calls", param="messages")
        content = message.content or ""
        if message.content is None and not message.tool_calls:
            raise RequestError(f"{at}.content is missing", param="messages")
        text = content if isinstance(content, str) else _join(content, at)
        entry: dict[str, Any] = {"role": message.role, "content": text}
        if message.tool_calls:
            entry["tool_calls"] = called(message.tool_calls, at)
        if message.tool_call_id:
            entry["tool_call_id"] = message.tool_call_id
        if message.name and message.role == "tool":
            entry["name"] = message.name
        if message.reasoning_content:
            entry["reasoning_content"] = message.reasoning_content
        flat.append(entry)
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


async def chat_prompt(
    context: Context, settings: Settings, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]
) -> tuple[int, ...]:
    """Return the token ids of a chat, rendered with more ``variables`` for the template."""

    def render() -> tuple[int, ...]:
        return tuple(context.tokenizer.chat(messages, settings.chat_template, **variables))

    is_long = sum(len(message["content"]) for message in messages) > LONG_TEXT or settings.chat_template is not None
    return await asyncio.to_thread(render) if is_long else render()


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
    use = tool_use(body.tools, body.tool_choice, body.parallel_tool_calls, parser=context.config.tool_call_parser)
    sampling = use.constrain(sampling)
    variables = {**template_arguments(body), **(body.chat_template_kwargs or {}), **use.template_variables}
    prompt = await chat_prompt(context, settings, flatten(body.messages), variables)
    form: AnswerFormat = ChatFormat(has_logprobs=sampling.logprobs is not None)
    if make_reader := message_readers(context, use, prompt, is_constrained=sampling.constraint is not None):
        form = MessageFormat(make_reader, use, has_logprobs=sampling.logprobs is not None)
    return await respond(
        context,
        body,
        [prompt],
        sampling,
        form,
        settings=settings,
        tenant=tenant,
        id_prefix="chatcmpl-",
        constraint_param=None if use.json_schema is None else "tools",
    )


chat_routes = [Route("/v1/chat/completions", create_chat_completion, methods=["POST"])]
