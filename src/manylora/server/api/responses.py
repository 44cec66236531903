"""``POST /v1/responses``: OpenAI's newer form of a chat, without state.

The input becomes the messages of a chat, so that prompts, tools and reasoning are those of ``/v1/chat/completions``.
The server keeps no response: a request that builds on a stored one is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from manylora.errors import RequestError
from manylora.server.api.chat import chat_prompt, flatten
from manylora.server.api.constraints import JsonSchema, ResponseFormat
from manylora.server.api.message_format import message_readers
from manylora.server.api.request import context_of, read_body
from manylora.server.api.respond import submit
from manylora.server.api.responses_output import ResponsesStream, WholeResponse
from manylora.server.api.schemas import Message, SamplingFields, sampling_params
from manylora.server.api.tools import CalledFunction, Function, FunctionName, Tool, ToolCall, ToolChoice, tool_use
from manylora.text import MessageReader

__all__ = ["ResponsesBody", "response_routes"]


class TextFormat(msgspec.Struct, kw_only=True):
    """``text.format``."""

    type: str
    name: str | None = None
    schema: dict[str, Any] | None = None


class TextOptions(msgspec.Struct, kw_only=True):
    """``text``."""

    format: TextFormat | None = None


class FlatTool(Function, kw_only=True):
    """A tool, whose function's fields are its own."""

    type: str


class FlatToolChoice(msgspec.Struct, kw_only=True):
    """A ``tool_choice`` that is no word."""

    type: str
    name: str | None = None


class ResponsesBody(SamplingFields, kw_only=True):
    """``POST /v1/responses``."""

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | FlatToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    background: bool | None = None
    prompt: Any = None
    truncation: str | None = None
    include: list[str] | None = None
    reasoning: dict[str, Any] | None = None
    max_tool_calls: int | None = None
    top_logprobs: int | None = None


_STATELESS = "this server keeps no responses; send the whole conversation as input"
_REFUSED = {
    "store": (_STATELESS, (None, False)),
    "previous_response_id": (_STATELESS, (None,)),
    "conversation": (_STATELESS, (None,)),
    "background": ("it needs stored responses, and this server keeps none", (None, False)),
    "prompt": ("prompts stored with OpenAI are not here; send instructions and input", (None,)),
    "truncation": ("input is never cut", (None, "disabled")),
    "max_tool_calls": ("it limits OpenAI's own tools, which are not here", (None,)),
    "top_logprobs": ("log-probabilities are on /v1/chat/completions", (None, 0)),
    "max_tokens": ("this route calls it max_output_tokens", (None,)),
    "response_format": ("this route calls it text.format", (None,)),
    "n": ("a response is one answer", (None, 1)),
}


def _check(body: ResponsesBody) -> None:
    for name, (why, neutral) in _REFUSED.items():
        if getattr(body, name) not in neutral:
            raise RequestError(f"{name} is not supported: {why}", param=name)
    if wanted := [one for one in body.include or () if one != "reasoning.encrypted_content"]:
        raise RequestError(f"include has {wanted[0][:100]!r}, which this server cannot give", param="include")
    for name, value in (body.reasoning or {}).items():
        if value is not None and name not in ("summary", "generate_summary"):
            raise RequestError(
                f"reasoning.{name[:50]} is not supported: a model reasons as its template says", param="reasoning"
            )


def _response_format(text: TextOptions | None) -> ResponseFormat | None:
    if text is None or text.format is None:
        return None
    form = text.format
    schema = None if form.schema is None else JsonSchema(schema=form.schema, name=form.name)
    return ResponseFormat(type=form.type, json_schema=schema)


def _tools(tools: Sequence[dict[str, Any]] | None) -> list[Tool]:
    made = []
    for index, tool in enumerate(tools or ()):
        if tool.get("type") != "function":
            raise RequestError(
                f"tools[{index}].type is {str(tool.get('type'))[:50]!r}; this server takes functions only",
                param="tools",
            )
        try:
            flat = msgspec.convert(tool, FlatTool)
        except msgspec.ValidationError as error:
            raise RequestError(f"Got a wrong value for tools[{index}]: {error}", param="tools") from None
        function = Function(
            name=flat.name, description=flat.description, parameters=flat.parameters, strict=flat.strict
        )
        made.append(Tool(type="function", function=function))
    return made


def _tool_choice(choice: str | FlatToolChoice | None) -> str | ToolChoice | None:
    if not isinstance(choice, FlatToolChoice):
        return choice
    if choice.type != "function" or not choice.name:
        raise RequestError(f"tool_choice of type {choice.type[:50]!r} is not supported", param="tool_choice")
    return ToolChoice(type="function", function=FunctionName(name=choice.name))


def _messages(body: ResponsesBody) -> list[Message]:
    """Return the messages of the chat that the input is.

    An assistant's reasoning, text and calls are items of their own here and one message there.
    """
    messages = [Message(role="system", content=body.instructions)] if body.instructions else []
    if isinstance(body.input, str):
        return [*messages, Message(role="user", content=body.input)]
    for index, item in enumerate(body.input):
        at, kind = f"input[{index}]", item.get("type", "message")
        last = messages[-1] if messages and messages[-1].role == "assistant" else None
        if kind == "message":
            role, text = item.get("role"), _text(item.get("content"), f"{at}.content")
            if not isinstance(role, str):
                raise RequestError(f"{at}.role is missing", param="input")
            if role == "assistant" and last is not None and last.content is None and not last.tool_calls:
                last.content = text
            else:
                messages.append(Message(role="system" if role == "developer" else role, content=text))
        elif kind == "function_call":
            if last is None:
                last = Message(role="assistant")
                messages.append(last)
            last.tool_calls = [*(last.tool_calls or ()), _call(item, at)]
        elif kind == "function_call_output":
            call_id = str(item.get("call_id"))
            messages.append(
                Message(role="tool", content=_text(item.get("output"), f"{at}.output"), tool_call_id=call_id)
            )
        elif kind == "reasoning":
            thought = _text(item.get("content") or [], f"{at}.content")
            messages.append(Message(role="assistant", reasoning_content=thought))
        else:
            raise RequestError(f"{at}.type is {str(kind)[:50]!r}, which this server does not take", param="input")
    for message in messages:
        if message.content is None and not message.tool_calls:
            message.content = ""
    return messages


def _text(content: Any, at: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"{at} is neither a text nor a list of parts", param="input")
    texts: list[str] = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("input_text", "output_text", "reasoning_text", "text"):
            raise RequestError(
                f"{at} has a part of type {str(kind)[:50]!r}: this server takes text only", param="input"
            )
        if not isinstance(part.get("text"), str):
            raise RequestError(f"{at} has a text part whose text is no string", param="input")
        texts.append(part["text"])
    return "\n".join(texts)


def _call(item: dict[str, Any], at: str) -> ToolCall:
    name, arguments, call_id = item.get("name"), item.get("arguments"), item.get("call_id")
    if not (isinstance(name, str) and name and isinstance(arguments, str) and isinstance(call_id, str)):
        raise RequestError(f"{at} needs a name, arguments and a call_id, each a text", param="input")
    return ToolCall(id=call_id, type="function", function=CalledFunction(name=name, arguments=arguments))


async def create_response(request: Request) -> Response:
    """``POST /v1/responses``."""
    context = context_of(request)
    tenant = context.gate.check_inference(request)
    body = await read_body(request, ResponsesBody)
    _check(body)
    body.response_format = _response_format(body.text)
    settings = await context.settings.of(body.model)
    sampling = sampling_params(
        body,
        max_tokens=body.max_output_tokens,
        logprobs=None,
        vocab_size=context.fleet.info.vocab_size,
        defaults=settings.defaults,
    )
    tools = _tools(body.tools)
    use = tool_use(
        tools, _tool_choice(body.tool_choice), body.parallel_tool_calls, parser=context.config.tool_call_parser
    )
    sampling = use.constrain(sampling)
    try:
        prompt = await chat_prompt(context, settings, flatten(_messages(body)), use.template_variables)
    except RequestError as error:
        raise RequestError(str(error), param="input") from None
    make_reader = message_readers(context, use, prompt, is_constrained=sampling.constraint is not None)
    answers, head = await submit(
        context,
        body,
        [prompt],
        sampling,
        settings=settings,
        tenant=tenant,
        id_prefix="resp_",
        constraint_param="text" if use.json_schema is None else "tools",
    )
    fields = {
        "id": head["id"],
        "object": "response",
        "created_at": head["created"],
        "model": body.model,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "store": False,
        "temperature": sampling.temperature,
        "text": body.text or {"format": {"type": "text"}},
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "top_p": sampling.top_p,
        "truncation": "disabled",
    }
    reader = MessageReader(None, None) if make_reader is None else make_reader()
    kind = ResponsesStream if body.stream else WholeResponse
    return kind(answers, reader, fields, use.new_call_id)


response_routes = [Route("/v1/responses", create_response, methods=["POST"])]
