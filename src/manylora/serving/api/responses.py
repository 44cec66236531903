"""``POST /v1/responses``: OpenAI's newer form of a chat, without state.

The input becomes the messages of a chat, so that prompts, tools and reasoning are those of ``/v1/chat/completions``.
The server keeps no response: a request that builds on a stored one is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, TypeAlias

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from manylora.core.errors import RequestError
from manylora.core.types import SamplingParams
from manylora.serving.api.chat import (
    ChatTemplate,
    chat_tokens,
    effort_variables,
    joined_text,
    template_kwargs,
    tool_parser,
)
from manylora.serving.api.formats import message_readers
from manylora.serving.api.json_body import FieldRules, is_null, raw_field
from manylora.serving.api.prompt_part import Details
from manylora.serving.api.request import AnswerCall, read_call
from manylora.serving.api.responses_output import BuiltResponse, OutputItems, ResponseStream, WholeResponse
from manylora.serving.api.sampling import count_logprobs, names_max_tokens, sampling_params
from manylora.serving.api.schemas import (
    HARMLESS,
    MAX_MESSAGES,
    REFUSED,
    CalledFunction,
    ContentPart,
    Effort,
    FunctionName,
    JsonSchema,
    Message,
    ResponseFormat,
    SamplingFields,
    Tool,
    ToolCall,
    ToolChoice,
    ToolFunction,
)
from manylora.serving.api.submit import submit
from manylora.serving.api.tools import read_tool_use
from manylora.serving.text import MessageReader

__all__ = ["ResponsesBody", "response_routes"]

LOGPROBS = "message.output_text.logprobs"  # in ``include``


class TextFormat(msgspec.Struct, kw_only=True):
    """``text.format``."""

    type: str
    name: str | None = None
    schema: msgspec.Raw = raw_field()


class TextOptions(msgspec.Struct, kw_only=True):
    """``text``."""

    format: TextFormat | None = None


class FlatTool(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A tool, whose function's fields are its own."""

    type: str | None = None
    name: str | None = None
    description: str | None = None
    parameters: msgspec.Raw = raw_field()
    strict: bool | None = None


class InputItem(msgspec.Struct, kw_only=True, gc=False):
    """An item of the input: a message, reasoning, a call or its output."""

    type: str = "message"
    role: str | None = None
    content: str | list[ContentPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[ContentPart] | None = None


class FlatToolChoice(msgspec.Struct, kw_only=True):
    """A ``tool_choice`` that is no word."""

    type: str
    name: str | None = None


Summary: TypeAlias = Literal["auto", "concise", "detailed"]


class Reasoning(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """``reasoning``; a summary is always empty."""

    effort: Effort | None = None
    summary: Summary | None = None
    generate_summary: Summary | None = None


class ResponsesBody(SamplingFields, kw_only=True):
    """``POST /v1/responses``."""

    field_rules: ClassVar[FieldRules] = FieldRules(
        HARMLESS, {**REFUSED, "use_beam_search": (None, False), "length_penalty": (None, 1.0)}
    )
    needs_model: ClassVar[bool] = False
    model: str = ""
    input: str | list[InputItem]
    instructions: str | None = None
    max_output_tokens: int | None = None
    tools: list[FlatTool] | None = None
    tool_choice: str | FlatToolChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: msgspec.Raw = raw_field()
    text: TextOptions | None = None
    metadata: dict[str, str] | None = None
    previous_response_id: str | None = None
    conversation: msgspec.Raw = raw_field()
    background: bool | None = None
    prompt: msgspec.Raw = raw_field()
    truncation: str | None = None
    include: list[str] | None = None
    reasoning: Reasoning | None = None
    max_tool_calls: int | None = None
    top_logprobs: int | None = None


_STATELESS = "this server keeps no responses; send the whole conversation as input"
_REFUSED: Mapping[str, tuple[str, tuple[Any, ...]]] = {
    "previous_response_id": (_STATELESS, (None,)),
    "conversation": (_STATELESS, (None,)),
    "background": ("it needs stored responses, and this server keeps none", (None, False)),
    "prompt": ("prompts stored with OpenAI are not here; send instructions and input", (None,)),
    "truncation": ("input is never cut", (None, "disabled")),
    "max_tool_calls": ("it limits OpenAI's own tools, which are not here", (None,)),
    "logprob_token_ids": ("given tokens are scored on /v1/chat/completions", (None, [])),
    "prompt_logprobs": ("log-probabilities are on /v1/chat/completions", (None,)),
    "return_token_ids": ("tokens are on /v1/chat/completions", (None, False)),
    "return_tokens_as_token_ids": ("log-probabilities are on /v1/chat/completions", (None, False)),
    "add_special_tokens": ("the chat template writes them", (None, False)),
    "truncate_prompt_tokens": ("input is never cut", (None,)),
    "truncation_side": ("input is never cut", (None, "left")),
    "max_tokens": ("this route calls it max_output_tokens", (None,)),
    "response_format": ("this route calls it text.format", (None,)),
    "n": ("a response is one answer", (None, 1)),
}


def _check(body: ResponsesBody) -> None:
    for name, (why, neutral) in _REFUSED.items():
        value = getattr(body, name)
        if (None if isinstance(value, msgspec.Raw) and is_null(value) else value) not in neutral:
            raise RequestError(f"{name} is not supported: {why}", param=name)
    if wanted := [one for one in body.include or () if one not in ("reasoning.encrypted_content", LOGPROBS)]:
        raise RequestError(f"include has {wanted[0][:100]!r}, which this server cannot give", param="include")


def _response_format(text: TextOptions | None) -> ResponseFormat | None:
    if text is None or text.format is None:
        return None
    form = text.format
    schema = None if is_null(form.schema) else JsonSchema(schema=form.schema, name=form.name)
    return ResponseFormat(type=form.type, json_schema=schema)


def _tools(tools: Sequence[FlatTool] | None) -> list[Tool]:
    made = []
    for index, tool in enumerate(tools or ()):
        if tool.type != "function":
            raise RequestError(
                f"tools[{index}].type is {str(tool.type)[:50]!r}; this server takes functions only", param="tools"
            )
        if not tool.name:
            raise RequestError(f"tools[{index}].name is missing", param="tools")
        function = ToolFunction(
            name=tool.name, description=tool.description, parameters=tool.parameters, strict=tool.strict
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
    if not isinstance(body.input, str) and len(body.input) > MAX_MESSAGES:
        raise RequestError(f"Got {len(body.input)} items, expected at most {MAX_MESSAGES}", param="input")
    if isinstance(body.input, str):
        return [*messages, Message(role="user", content=body.input)]
    for index, item in enumerate(body.input):
        at = f"input[{index}]"
        last = messages[-1] if messages and messages[-1].role == "assistant" else None
        if item.type == "message":
            if item.role is None:
                raise RequestError(f"{at}.role is missing", param="input")
            text = _text(item.content, f"{at}.content")
            if item.role == "assistant" and last is not None and last.content is None and not last.tool_calls:
                last.content = text
            else:
                messages.append(Message(role="system" if item.role == "developer" else item.role, content=text))
        elif item.type == "function_call":
            if last is None:
                last = Message(role="assistant", tool_calls=[])
                messages.append(last)
            last.tool_calls = last.tool_calls or []
            last.tool_calls.append(_call(item, at))
        elif item.type == "function_call_output":
            text = _text(item.output, f"{at}.output")
            messages.append(Message(role="tool", content=text, tool_call_id=item.call_id or ""))
        elif item.type == "reasoning":
            thought = _text(item.content or "", f"{at}.content")
            messages.append(Message(role="assistant", reasoning_content=thought))
        else:
            raise RequestError(f"{at}.type is {item.type[:50]!r}, which this server does not take", param="input")
    for message in messages:
        if message.content is None and not message.tool_calls:
            message.content = ""
    return messages


def _text(content: str | list[ContentPart] | None, at: str) -> str:
    if isinstance(content, str):
        return content
    if content is None:
        raise RequestError(f"{at} is neither a text nor a list of parts", param="input")
    if len(content) > MAX_MESSAGES:
        raise RequestError(f"{at} has {len(content)} parts, expected at most {MAX_MESSAGES}", param="input")
    return joined_text(content, ("input_text", "output_text", "reasoning_text", "text"), at, "input")


def _call(item: InputItem, at: str) -> ToolCall:
    if not item.name or item.arguments is None or item.call_id is None:
        raise RequestError(f"{at} needs a name, arguments and a call_id, each a text", param="input")
    arguments = msgspec.Raw(msgspec.json.encode(item.arguments))
    return ToolCall(id=item.call_id, type="function", function=CalledFunction(name=item.name, arguments=arguments))


async def create_response(request: Request) -> Response:
    """``POST /v1/responses``."""
    call = await read_call(request, ResponsesBody)
    _check(call.body)
    return await _answer(call)


@names_max_tokens
async def _answer(call: AnswerCall[ResponsesBody]) -> Response:
    request, context, body = call.http, call.context, call.body
    body.response_format = _response_format(body.text)
    count_logprobs(call)
    has_logprobs = bool(body.top_logprobs) or LOGPROBS in (body.include or ())
    num_top = (body.top_logprobs or 0) if has_logprobs else None
    sampling = sampling_params(call, max_tokens=body.max_output_tokens, logprobs=num_top)
    text = call.settings.chat_template
    parser = tool_parser(context, text)
    tools, choice = _tools(body.tools), _tool_choice(body.tool_choice)
    use = await read_tool_use(request, context, tools, choice, body.parallel_tool_calls, parser)
    sampling = use.constrain(sampling)
    effort = None if body.reasoning is None else body.reasoning.effort
    thinking = effort_variables(effort, text or context.tokenizer.chat_template or "")
    variables = {**thinking, **template_kwargs(body.chat_template_kwargs), **use.template_variables}
    template = ChatTemplate(text=text, variables=variables)
    try:
        prompt = await chat_tokens(request, context, _messages(body), template, limit=context.max_model_len)
    except RequestError as error:
        raise RequestError(str(error), param="input") from None
    make_reader = message_readers(context, use, prompt, is_constrained=sampling.constraint is not None)
    reader = MessageReader(None, None) if make_reader is None else make_reader()
    thinks = reader.reasoning is not None  # its tokens are counted
    answers, head = await submit(
        call,
        [prompt],
        sampling,
        id_prefix="resp_",
        form_field="tools" if use.json_schema is not None else "text" if body.response_format is not None else None,
        details=Details(has_token_ids=thinks, is_by_token=thinks),
    )
    built = BuiltResponse(answers, reader, _fields(body, sampling, head), OutputItems(use.new_call_id))
    return ResponseStream(built) if body.stream else WholeResponse(built)


def _fields(body: ResponsesBody, sampling: SamplingParams, head: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a response that are known before its output."""
    return {
        **{name: head[name] for name in ("id", "model", "adapter_version") if name in head},
        "object": "response",
        "created_at": head["created"],
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": body.reasoning or {},
        "store": False,
        "temperature": sampling.temperature,
        "text": body.text or {"format": {"type": "text"}},
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": sampling.top_p,
        "truncation": "disabled",
    }


response_routes = [Route("/v1/responses", create_response, methods=["POST"])]
