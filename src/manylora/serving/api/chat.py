"""``POST /v1/chat/completions``."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from manylora.core.errors import RequestError
from manylora.serving.api.answers import TextPiece, WholeAnswer
from manylora.serving.api.constraints import free_form, is_null
from manylora.serving.api.json_parts import encode_parts
from manylora.serving.api.message_format import (
    NULL_MESSAGE_FIELDS,
    MessageFormat,
    chat_choice,
    chat_head,
    chat_logprobs,
    logprob_items,
    message_readers,
)
from manylora.serving.api.model_settings import Settings
from manylora.serving.api.prompt_part import Details, PromptPart
from manylora.serving.api.request import Context, context_of, read_body
from manylora.serving.api.respond import NOTHING_ELSE, AnswerFormat, respond
from manylora.serving.api.schemas import ChatBody, ContentPart, Message, sampling_params, template_arguments
from manylora.serving.api.tools import arguments_bytes, called, read_tool_use
from manylora.serving.api.truncation import Truncation
from manylora.serving.http.bounds import (
    INLINE_CHARS,
    MAX_MESSAGES,
    MAX_TEMPLATE_BYTES,
    MAX_TEMPLATE_CHARS,
    MAX_TEMPLATE_DEPTH,
    MAX_TEMPLATE_NUMBER,
)
from manylora.serving.text.tools import TOOL_PARSERS, ToolParser, parser_of_template

logger = logging.getLogger(__name__)

__all__ = ["chat_routes", "chat_tokens", "template_kwargs", "tool_parser", "with_template"]

CHARS_PER_MESSAGE = 50
"""Characters of text that take as long as the template's work on a message."""

MAX_EMPTY_BYTES = 8
EMPTY = (b"null", b"[]", b"{}", b'""', b"false", b"0")


class ChatFormat:
    """JSON of chat completions with the prompt's part, and with log-probabilities if ``has_logprobs``."""

    object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    repeats_prompt = False

    def __init__(self, prompt: PromptPart, *, has_logprobs: bool) -> None:
        self.prompt = prompt
        self._has_logprobs = has_logprobs
        self._is_plain = not has_logprobs and not prompt.details.has_token_ids
        self._is_begun: set[int] = set()
        self._whole: dict[int, WholeAnswer[bytes]] = {}

    def head(self, *, is_chunk: bool) -> dict[str, Any]:
        """Return the fields about the prompt."""
        return chat_head(self.prompt, is_chunk=is_chunk)

    def chunk(self, piece: TextPiece) -> bytes | None:
        """Return the choice of a chunk; the first of an answer has the role."""
        delta: dict[str, str] = {}
        if piece.index not in self._is_begun:
            self._is_begun.add(piece.index)
            delta["role"] = "assistant"
        elif not (piece.text or piece.logprobs or piece.finish_reason or piece.token_ids):
            return None
        elif piece.finish_reason is None and self._is_plain:
            content = msgspec.json.encode(piece.text)
            return b'{"index":%d,"delta":{"content":%b}%b' % (piece.index, content, NOTHING_ELSE)
        delta["content"] = piece.text
        logprobs = chat_logprobs([logprob_items(piece)]) if self._has_logprobs else None
        choice = chat_choice(piece, "delta", delta, logprobs, piece.token_ids, self.prompt.details)
        return msgspec.json.encode(choice) if logprobs is None else b"".join(encode_parts(choice))

    def gather(self, piece: TextPiece) -> None:
        """Add a piece to its whole answer."""
        whole = self._whole.setdefault(piece.index, WholeAnswer())
        whole.add(piece, logprob_items(piece) if self._has_logprobs else None)

    def choice(self, index: int) -> dict[str, Any]:
        """Return the choice of a whole answer."""
        whole = self._whole[index]
        message = {"role": "assistant", "content": "".join(whole.texts), **NULL_MESSAGE_FIELDS}
        logprobs = chat_logprobs(whole.logprobs) if self._has_logprobs else None
        return chat_choice(whole.last, "message", message, logprobs, whole.token_ids, self.prompt.details)


def _count(messages: Sequence[Message]) -> int:
    """Return the number of messages, their parts and their calls; raise ``RequestError`` if one is too large."""
    num_parts = sum(len(message.content) for message in messages if isinstance(message.content, list))
    num_calls = sum(len(message.tool_calls) for message in messages if message.tool_calls)
    if max(len(messages), num_parts, num_calls) > MAX_MESSAGES:
        raise RequestError(
            f"Got {len(messages)} messages with {num_parts} parts and {num_calls} calls, "
            f"expected at most {MAX_MESSAGES} of each",
            param="messages",
        )
    return len(messages) + num_parts + num_calls


def _flatten(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages for a chat template: a role, one text, and calls with their arguments as objects.

    Raises:
        RequestError: A part is not text, or the arguments of a call are not an object.
    """
    flat: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        at = f"messages[{index}]"
        if not _is_empty(message.function_call):
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


def _is_empty(raw: msgspec.Raw) -> bool:
    return is_null(raw) or bytes(memoryview(raw)[:MAX_EMPTY_BYTES]) in EMPTY


def _join(parts: Sequence[ContentPart], at: str) -> str:
    texts: list[str] = []
    for part in parts:
        if part.type != "text":
            raise RequestError(
                f"{at}.content has a part of type {str(part.type)[:50]!r}: this server takes text only",
                param="messages",
            )
        try:
            texts.append(msgspec.json.decode(part.text, type=str))
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise RequestError(f"{at}.content has a text part whose text is no string", param="messages") from None
    return "\n".join(texts)


def _num_logprobs(body: ChatBody) -> int | None:
    if body.top_logprobs is not None and not body.logprobs:
        raise RequestError("top_logprobs needs logprobs = true", param="top_logprobs")
    if body.top_logprobs is not None and not 0 <= body.top_logprobs <= 20:
        raise RequestError(f"Got top_logprobs = {body.top_logprobs}, expected 0 to 20", param="top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else None


async def chat_tokens(
    request: Request,
    context: Context,
    settings: Settings,
    messages: Sequence[Message],
    variables: Mapping[str, Any],
    *,
    limit: int,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    add_special_tokens: bool = False,
) -> tuple[int, ...]:
    """Return the token ids of a chat, which must be fewer than ``limit``.

    Args:
        request: Its client may leave meanwhile.
        context: The server's parts.
        settings: Of its model, for the template.
        messages: The chat.
        variables: More variables for the template.
        limit: Tokens.
        add_generation_prompt: End with the tokens that open the model's turn.
        continue_final_message: End inside the last message.
        add_special_tokens: Add the model's tokens around a text to those that the template writes.

    Raises:
        RequestError: The chat is out of bounds, or the template refuses it.
        ManyloraError: As of ``FairWork.run``.
    """
    tokenizer = context.tokenizer
    num_items = _count(messages)
    num_read = CHARS_PER_MESSAGE * num_items + sum(arguments_bytes(message.tool_calls) for message in messages)

    def flatten() -> tuple[list[dict[str, Any]], int]:
        chat = _flatten(messages)
        num_chars = sum(len(message["content"]) + len(message["role"]) for message in chat)
        tokenizer.check_chars(num_chars, limit, "messages")
        return chat, num_chars

    def render(chat: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        text = tokenizer.render_chat(
            chat,
            variables,
            template=settings.chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
        return tuple(tokenizer.encode_within(text, limit, add_special_tokens=add_special_tokens))

    if num_read > INLINE_CHARS:
        return await context.text_work.run(request, lambda: render(flatten()[0]))
    chat, num_chars = flatten()
    is_plain = not variables and settings.chat_template is None and not any(one.tool_calls for one in messages)
    if is_plain and num_chars + num_read <= INLINE_CHARS:
        return render(chat)
    return await context.text_work.run(request, lambda: render(chat))


def template_kwargs(raw: msgspec.Raw) -> dict[str, Any]:
    """Read the template's variables.

    Raises:
        RequestError: They are too large, too deep, or a number is too large.
    """
    if is_null(raw):
        return {}
    param = "chat_template_kwargs"
    kwargs = free_form(raw, dict[str, Any], MAX_TEMPLATE_BYTES, param)
    level: list[Any] = [kwargs]
    for _ in range(MAX_TEMPLATE_DEPTH):
        if any(isinstance(value, int | float) and abs(value) > MAX_TEMPLATE_NUMBER for value in level):
            raise RequestError(f"{param} has a number above {MAX_TEMPLATE_NUMBER}", param=param)
        level = [
            inner
            for value in level
            if isinstance(value, dict | list)
            for inner in (value.values() if isinstance(value, dict) else value)
        ]
        if not level:
            return kwargs
    raise RequestError(f"{param} is nested deeper than {MAX_TEMPLATE_DEPTH}", param=param)


def with_template(context: Context, settings: Settings, template: str | None) -> Settings:
    """Return settings with the chat template of a request, if it has one.

    Raises:
        RequestError: The server does not take templates, or it is too large.
    """
    if template is None:
        return settings
    if not context.config.trust_request_chat_template:
        raise RequestError(
            "Got a chat_template, which this server does not take: --trust-request-chat-template is not set",
            param="chat_template",
        )
    if len(template) > MAX_TEMPLATE_CHARS:
        raise RequestError(
            f"Got a chat_template of {len(template)} characters, expected at most {MAX_TEMPLATE_CHARS}",
            param="chat_template",
        )
    return replace(settings, chat_template=template)


def tool_parser(context: Context, settings: Settings) -> type[ToolParser] | None:
    """Return the parser of tool calls: the server's option, or that of the format that the chat template shows."""
    if context.config.tool_call_parser is not None:
        return TOOL_PARSERS[context.config.tool_call_parser]
    parser = parser_of_template(settings.chat_template or context.tokenizer.chat_template or "")
    if parser is None:
        _remark(
            "tool_calls_unread: the chat template shows no known format of calls, so answers with tools are content"
        )
    return parser


@functools.cache
def _remark(text: str) -> None:
    """Log a remark once."""
    logger.warning(text)


def _effort(context: Context, settings: Settings, effort: str | None) -> dict[str, str]:
    """Return the template's variable of ``reasoning_effort``, if it was given and the template reads it."""
    if effort is None:
        return {}
    if "reasoning_effort" in (settings.chat_template or context.tokenizer.chat_template or ""):
        return {"reasoning_effort": effort}
    _remark("reasoning_effort_ignored: the chat template does not read it")
    return {}


async def create_chat_completion(request: Request) -> Response:
    """``POST /v1/chat/completions``."""
    context = context_of(request)
    tenant = context.gate.check_inference(request)
    context.check_room(tenant)
    body = await read_body(request, ChatBody)
    if body.echo:
        raise RequestError("echo is not supported for chats", param="echo")
    settings = with_template(context, await context.settings.of(body.model), body.chat_template)
    details = Details.of(body)
    sampling = sampling_params(
        body,
        max_tokens=body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
        logprobs=_num_logprobs(body),
        tokenizer=context.tokenizer,
        vocab_size=context.fleet.engines.info.vocab_size,
        prompt_logprobs=details.prompt_logprobs,
        defaults=settings.defaults,
    )
    use = await read_tool_use(
        request,
        context.text_work,
        body.tools,
        body.tool_choice,
        body.parallel_tool_calls,
        parser=tool_parser(context, settings),
    )
    sampling = use.constrain(sampling)
    truncation = Truncation(context, body, sampling.max_tokens)
    tokens = await chat_tokens(
        request,
        context,
        settings,
        body.messages,
        {
            **_effort(context, settings, body.reasoning_effort),
            **template_kwargs(body.chat_template_kwargs),
            **use.template_variables,
        },
        limit=truncation.limit,
        **template_arguments(body),
    )
    prompt = truncation.cut(tokens)
    part = PromptPart(context.tokenizer, [prompt], body.n or 1, details)
    form: AnswerFormat = ChatFormat(part, has_logprobs=sampling.logprobs is not None)
    if make_reader := message_readers(context, use, prompt, is_constrained=sampling.constraint is not None):
        form = MessageFormat(make_reader, use, part, has_logprobs=sampling.logprobs is not None)
    return await respond(
        request,
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
