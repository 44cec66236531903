"""``POST /v1/chat/completions``, and the prompt of a chat: messages, a template and its variables become token ids."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from manylora.core.errors import RequestError
from manylora.serving.api.formats import ChatFormat, message_readers
from manylora.serving.api.json_body import free_form, is_null
from manylora.serving.api.model_settings import Settings
from manylora.serving.api.prompt_part import Details, PromptPart
from manylora.serving.api.request import AnswerCall, Context, read_call
from manylora.serving.api.respond import respond
from manylora.serving.api.sampling import count_logprobs, names_max_tokens, sampling_params
from manylora.serving.api.schemas import INLINE_CHARS, MAX_MESSAGES, ChatBody, ContentPart, Message, TokenizeBody
from manylora.serving.api.submit import Truncation
from manylora.serving.api.tools import NO_TOOLS, arguments_bytes, called, read_tool_use
from manylora.serving.text.tools import TOOL_PARSERS, ToolParser, parser_of_template

__all__ = [
    "ChatTemplate",
    "answer_chat",
    "chat_routes",
    "chat_tokens",
    "effort_variables",
    "joined_text",
    "template_kwargs",
    "template_of",
    "tool_parser",
]

MAX_TEMPLATE_BYTES = 16 * 1024  # JSON of ``chat_template_kwargs``
MAX_TEMPLATE_CHARS = 64 * 1024  # characters of a request's ``chat_template``
MAX_TEMPLATE_DEPTH = 16  # nesting of ``chat_template_kwargs``
MAX_TEMPLATE_NUMBER = 1_000_000  # largest number in ``chat_template_kwargs``: a template can repeat or indent by it
CHARS_PER_MESSAGE = 50  # characters of text that take as long as the template's work on a message

MAX_EMPTY_BYTES = 8
EMPTY = (b"null", b"[]", b"{}", b'""', b"false", b"0")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTemplate:
    """The way in which a chat becomes tokens."""

    text: str | None  # a template in place of the tokenizer's own; ``None`` for that one
    variables: Mapping[str, Any] = field(default_factory=dict)  # more variables for the template
    add_generation_prompt: bool = True  # end with the tokens that open the model's turn
    continue_final_message: bool = False  # end inside the last message
    add_special_tokens: bool = False  # add the model's tokens around a text to those that the template writes


def template_of(context: Context, settings: Settings, body: ChatBody | TokenizeBody) -> ChatTemplate:
    """Return the template of a request, with the variables that it gives.

    ``RequestError`` if the server does not take templates, the template or its variables are too large, or the prompt
    is to end in two ways.
    """
    text = settings.chat_template
    if body.chat_template is not None:
        text = body.chat_template
        if not context.config.trust_request_chat_template:
            raise RequestError(
                "Got a chat_template, which this server does not take: --trust-request-chat-template is not set",
                param="chat_template",
            )
        if len(text) > MAX_TEMPLATE_CHARS:
            raise RequestError(
                f"Got a chat_template of {len(text)} characters, expected at most {MAX_TEMPLATE_CHARS}",
                param="chat_template",
            )
    if body.continue_final_message and body.add_generation_prompt:
        raise RequestError(
            "Got continue_final_message and add_generation_prompt, expected one of them", param="continue_final_message"
        )
    return ChatTemplate(
        text=text,
        variables=template_kwargs(body.chat_template_kwargs),
        add_generation_prompt=not body.continue_final_message and body.add_generation_prompt is not False,
        continue_final_message=bool(body.continue_final_message),
        add_special_tokens=bool(body.add_special_tokens),
    )


def template_kwargs(raw: msgspec.Raw) -> dict[str, Any]:
    """Read the template's variables; ``RequestError`` if they are too large or too deep, or have too large a number."""
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


def tool_parser(context: Context, template: str | None) -> type[ToolParser] | None:
    """Return the parser of tool calls: the server's option, or the parser of the format that the template shows."""
    if context.config.tool_call_parser is not None:
        return TOOL_PARSERS[context.config.tool_call_parser]
    parser = parser_of_template(template or context.tokenizer.chat_template or "")
    if parser is None:
        _log_once(
            "tool_calls_unread: the chat template shows no known format of calls, so answers with tools are content"
        )
    return parser


@functools.cache
def _log_once(text: str) -> None:
    """Log a warning once."""
    logger.warning(text)


async def chat_tokens(
    request: Request, context: Context, messages: Sequence[Message], template: ChatTemplate, *, limit: int
) -> tuple[int, ...]:
    """Return the token ids of a chat, which must be fewer than ``limit``.

    ``RequestError`` if it is out of bounds, or the template refuses it; other errors are those of ``FairWork.run``.
    """
    tokenizer = context.tokenizer
    num_read = CHARS_PER_MESSAGE * _num_items(messages)
    num_read += sum(arguments_bytes(message.tool_calls) for message in messages if message.tool_calls)

    def flatten() -> tuple[list[dict[str, Any]], int]:
        chat = _flatten(messages)
        num_chars = sum(len(message["content"]) + len(message["role"]) for message in chat)
        tokenizer.check_chars(num_chars, limit, "messages")
        return chat, num_chars

    def render(chat: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        text = tokenizer.render_chat(
            chat,
            template.variables,
            template=template.text,
            add_generation_prompt=template.add_generation_prompt,
            continue_final_message=template.continue_final_message,
        )
        return tuple(tokenizer.encode_within(text, limit, add_special_tokens=template.add_special_tokens))

    if num_read > INLINE_CHARS:
        return await context.text_work.run(request, lambda: render(flatten()[0]))
    chat, num_chars = flatten()
    is_plain = not template.variables and template.text is None and not any(one.tool_calls for one in messages)
    if is_plain and num_chars + num_read <= INLINE_CHARS:
        return render(chat)
    return await context.text_work.run(request, lambda: render(chat))


def _num_items(messages: Sequence[Message]) -> int:
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
    """Return messages for a chat template: a role, one text, and calls with their arguments as objects."""
    flat: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        at = f"messages[{index}]"
        call = message.function_call
        if not (is_null(call) or bytes(memoryview(call)[:MAX_EMPTY_BYTES]) in EMPTY):
            raise RequestError(f"{at}.function_call is not supported; use tool_calls", param="messages")
        content = message.content or ""
        if message.content is None and not message.tool_calls:
            raise RequestError(f"{at}.content is missing", param="messages")
        if not isinstance(content, str):
            content = joined_text(content, ("text",), f"{at}.content", "messages")
        entry: dict[str, Any] = {"role": message.role, "content": content}
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


def joined_text(parts: Sequence[ContentPart], types: Sequence[str], at: str, param: str) -> str:
    """Return the text of a message in parts, each on a line; raise ``RequestError`` for a part that is not text."""
    texts: list[str] = []
    for part in parts:
        if part.type not in types:
            raise RequestError(
                f"{at} has a part of type {str(part.type)[:50]!r}: this server takes text only", param=param
            )
        try:
            texts.append(msgspec.json.decode(part.text, type=str))
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise RequestError(f"{at} has a text part whose text is no string", param=param) from None
    return "\n".join(texts)


async def create_chat_completion(request: Request) -> Response:
    """``POST /v1/chat/completions``."""
    return await answer_chat(await read_call(request, ChatBody))


@names_max_tokens
async def answer_chat(call: AnswerCall[ChatBody]) -> Response:
    """Return the response to a chat; errors as of ``respond``."""
    context, body = call.context, call.body
    if body.echo:
        raise RequestError("echo is not supported for chats", param="echo")
    count_logprobs(call)
    details = Details.of(body)
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    sampling = sampling_params(
        call, max_tokens=max_tokens, logprobs=_num_logprobs(body), prompt_logprobs=details.prompt_logprobs
    )
    template = template_of(context, call.settings, body)
    use = NO_TOOLS
    if body.tools or body.tool_choice is not None:
        parser = tool_parser(context, template.text)
        use = await read_tool_use(call.http, context, body.tools, body.tool_choice, body.parallel_tool_calls, parser)
        sampling = use.constrain(sampling)
    effort = effort_variables(body.reasoning_effort, template.text or context.tokenizer.chat_template or "")
    template = replace(template, variables={**effort, **template.variables, **use.template_variables})
    truncation = Truncation(context, body, sampling.max_tokens)
    prompt = truncation.cut(await chat_tokens(call.http, context, body.messages, template, limit=truncation.limit))
    make_reader = message_readers(context, use, prompt, is_constrained=sampling.constraint is not None)
    part = PromptPart(context.tokenizer, [prompt], body.n or 1, details)
    form = ChatFormat(part, use, make_reader, has_logprobs=sampling.logprobs is not None)
    form_field = None if use.json_schema is None else "tools"
    return await respond(call, [prompt], sampling, form, id_prefix="chatcmpl-", form_field=form_field)


def _num_logprobs(body: ChatBody) -> int | None:
    if body.top_logprobs and not body.logprobs:
        raise RequestError("when using `top_logprobs`, `logprobs` must be set to true", param="top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else None


def effort_variables(effort: str | None, template: str) -> Mapping[str, Any]:
    """Return the variables of a ``reasoning_effort`` that the template reads: itself, and whether to reason at all."""
    if effort is None:
        return {}
    given = {"reasoning_effort": effort, "enable_thinking": effort != "none"}
    read = {name: value for name, value in given.items() if name in template}
    if not read:
        _log_once("reasoning_effort_ignored: the chat template does not read it")
    return read


chat_routes = [Route("/v1/chat/completions", create_chat_completion, methods=["POST"])]
