"""Tools of a chat request: the bodies, and the consequences of ``tool_choice``.

With ``auto`` the model decides, and the server's parser finds its calls in the text. ``required`` and a named function
are forced by a grammar that is made of the functions' own schemas, so they need no parser.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from starlette.requests import Request

from manylora.core.errors import RequestError
from manylora.core.types import Constraint, SamplingParams
from manylora.serving.api.json_body import free_form, is_null, num_bytes
from manylora.serving.api.request import Context
from manylora.serving.api.schemas import INLINE_CHARS, MAX_SCHEMA_BYTES, Tool, ToolCall, ToolChoice, ToolFunction
from manylora.serving.text.tools import ToolParser
from manylora.serving.text.tools.json_formats import NamedCall, RequiredCalls

__all__ = ["NO_TOOLS", "ToolUse", "arguments_bytes", "called", "read_tool_use"]

MAX_TOOLS = 128  # tools of a request
MAX_ARGUMENTS_BYTES = 64 * 1024  # JSON of the arguments of one call in the history


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """The part of tools in one request."""

    template_variables: dict[str, Any]  # variables that show the tools to the chat template
    # Makes the parser of an answer; ``None`` if no call is possible.
    make_parser: Callable[[], ToolParser] | None = None
    json_schema: str | None = None  # the schema that a forced answer must match
    is_named: bool = False  # whether the function was named; the answer then ends with ``stop``, as in OpenAI's API
    needs_special_tokens: bool = False  # whether answers must keep their special tokens
    max_calls: int | None = None  # calls beyond these are dropped
    new_call_id: Callable[[], str] = ToolParser.new_call_id  # returns an id for a call

    def constrain(self, sampling: SamplingParams) -> SamplingParams:
        """Return the sampling parameters of an answer that may, or must, call the tools.

        ``RequestError`` if it must, and has another form already.
        """
        if self.needs_special_tokens:
            sampling = replace(sampling, skip_special_tokens=False)
        if self.json_schema is None:
            return sampling
        if sampling.constraint is not None:
            raise RequestError(
                "a form of the answer cannot be combined with a tool_choice that forces a call", param="tool_choice"
            )
        return replace(sampling, constraint=Constraint("json", self.json_schema))


NO_TOOLS = ToolUse(template_variables={})


async def read_tool_use(
    request: Request,
    context: Context,
    tools: Sequence[Tool] | None,
    choice: str | ToolChoice | None,
    parallel: bool | None,
    parser: type[ToolParser] | None,
) -> ToolUse:
    """Return the part of tools in a request; schemas that take milliseconds are read in a turn.

    Unless ``parallel`` is false, the model may call several. ``parser`` reads the calls of a model that chooses;
    without it the answer is all content.

    ``RequestError`` if a tool is malformed, or the choice contradicts the tools; other errors are those of
    ``FairWork.run``.
    """
    read = functools.partial(_tool_use, tools, choice, parallel, parser)
    size = sum(num_bytes(tool.function.parameters) for tool in tools or ())
    return read() if size <= INLINE_CHARS else await context.text_work.run(request, read)


def _tool_use(
    tools: Sequence[Tool] | None,
    choice: str | ToolChoice | None,
    parallel: bool | None,
    parser: type[ToolParser] | None,
) -> ToolUse:
    if not tools:
        if choice not in (None, "none", "auto"):
            raise RequestError("When using `tool_choice`, `tools` must be set.", param="tool_choice")
        return NO_TOOLS
    given = _parameters(tools)
    schemas = {name: {"type": "object", **(parameters or {})} for name, parameters in given.items()}
    variables = {"tools": [_for_template(tool.function, given[tool.function.name]) for tool in tools]}
    if choice == "none":
        return ToolUse(template_variables=variables)
    max_calls = 1 if parallel is False else None
    new_call_id = (parser or ToolParser).new_call_id
    if isinstance(choice, ToolChoice):
        name = choice.function.name
        if choice.type != "function" or name not in schemas:
            raise RequestError(f"tool_choice names {name!r}, which is not among the tools", param="tool_choice")
        return ToolUse(
            template_variables=variables,
            make_parser=lambda: NamedCall(name),
            json_schema=_json(schemas[name]),
            is_named=True,
            new_call_id=new_call_id,
        )
    if choice == "required":
        return ToolUse(
            template_variables=variables,
            make_parser=lambda: RequiredCalls(schemas),
            json_schema=_json(_list_schema(schemas, max_calls)),
            new_call_id=new_call_id,
        )
    if choice not in (None, "auto"):
        raise RequestError(
            f"Got tool_choice = {choice[:50]!r}, expected none, auto, required or a function", param="tool_choice"
        )
    if parser is None:
        return ToolUse(template_variables=variables)
    return ToolUse(
        template_variables=variables,
        make_parser=lambda: parser(schemas),
        needs_special_tokens=parser.needs_special_tokens,
        max_calls=max_calls,
        new_call_id=new_call_id,
    )


def _parameters(tools: Sequence[Tool]) -> dict[str, dict[str, Any] | None]:
    """Return the parameters of each function, which are the schema of an object."""
    if len(tools) > MAX_TOOLS:
        raise RequestError(f"Got {len(tools)} tools, expected at most {MAX_TOOLS}", param="tools")
    most_bytes = MAX_SCHEMA_BYTES
    given: dict[str, dict[str, Any] | None] = {}
    for index, tool in enumerate(tools):
        function, at = tool.function, f"tools[{index}]"
        if tool.type != "function":
            raise RequestError(f"{at}.type is {tool.type[:50]!r}; this server takes functions only", param="tools")
        if function.name in given:
            raise RequestError(f"{at}.function.name is {function.name!r}, which another tool has too", param="tools")
        if num_bytes(function.parameters) > most_bytes:
            raise RequestError(f"The parameters of tools have more than {MAX_SCHEMA_BYTES} bytes", param="tools")
        most_bytes -= num_bytes(function.parameters)
        kind: Any = dict[str, Any] | None
        parameters = free_form(function.parameters, kind, MAX_SCHEMA_BYTES, "tools")
        if (parameters or {}).get("type", "object") != "object":
            raise RequestError(f"{at}.function.parameters is not the schema of an object", param="tools")
        given[function.name] = parameters
    return given


def _for_template(function: ToolFunction, parameters: dict[str, Any] | None) -> dict[str, Any]:
    fields = {"description": function.description, "parameters": parameters, "strict": function.strict}
    known = {name: value for name, value in fields.items() if value is not None}
    return {"type": "function", "function": {"name": function.name, **known}}


def _list_schema(schemas: dict[str, dict[str, Any]], max_calls: int | None) -> dict[str, Any]:
    """Return the schema of a list of calls, with at least one."""
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": name},
                "parameters": _moved(schema, f"#/items/anyOf/{index}/properties/parameters"),
            },
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for index, (name, schema) in enumerate(schemas.items())
    ]
    most = {} if max_calls is None else {"maxItems": max_calls}
    return {"type": "array", "minItems": 1, **most, "items": {"anyOf": calls}}


def _moved(schema: Any, to: str) -> Any:
    """Return a schema whose references to itself are right where it is a part of another."""
    try:
        if isinstance(schema, list):
            return [_moved(item, to) for item in schema]
        if not isinstance(schema, dict):
            return schema
        return {
            key: to + value[1:]
            if key == "$ref" and isinstance(value, str) and value.startswith("#")
            else _moved(value, to)
            for key, value in schema.items()
        }
    except RecursionError:
        raise RequestError("A function's parameters are nested too deeply", param="tools") from None


def _json(schema: dict[str, Any]) -> str:
    return msgspec.json.encode(schema).decode()


def arguments_bytes(calls: Sequence[ToolCall] | None) -> int:
    """Return the length of the JSON that ``called`` decodes."""
    return sum(num_bytes(call.function.arguments) for call in calls or ())


def called(calls: Sequence[ToolCall], at: str) -> list[dict[str, Any]]:
    """Return calls of the history for a chat template, with the arguments as an object of bounded length."""
    entries = []
    for index, call in enumerate(calls):
        arguments = _arguments(call.function.arguments, f"{at}.tool_calls[{index}].function.arguments")
        entry: dict[str, Any] = {"type": "function", "function": {"name": call.function.name, "arguments": arguments}}
        if call.id is not None:
            entry["id"] = call.id
        entries.append(entry)
    return entries


def _arguments(raw: msgspec.Raw, at: str) -> dict[str, Any]:
    if is_null(raw):
        return {}
    if num_bytes(raw) > MAX_ARGUMENTS_BYTES:
        raise RequestError(
            f"{at} has {num_bytes(raw)} bytes of JSON, expected at most {MAX_ARGUMENTS_BYTES}", param="messages"
        )
    try:
        if bytes(memoryview(raw)[:1]) == b'"':
            text = msgspec.json.decode(raw, type=str)
            return msgspec.json.decode(text, type=dict[str, Any]) if text else {}
        return msgspec.json.decode(raw, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        raise RequestError(f"{at} is not a JSON object", param="messages") from None
