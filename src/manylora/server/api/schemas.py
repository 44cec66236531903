"""Request bodies as OpenAI and vLLM write them, read and checked strictly.

Only ``application/json`` is taken: it is what clients send, and it is what a web page of another site cannot send
without asking first.

Three kinds of fields: those we carry out; those that change nothing in the answer (``metadata``, ``store`` ...),
taken silently; and those that would change the answer and that we cannot carry out, refused by name, because a
wrong answer is worse than none. Anything else is ignored and logged once, as vLLM does.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from manylora.errors import RequestError
from manylora.server.errors import HttpError

__all__ = [
    "ChatBody",
    "CompletionBody",
    "DetokenizeBody",
    "Message",
    "ResponseFormat",
    "SamplingFields",
    "StreamOptions",
    "TokenizeBody",
    "parse",
    "read_body",
]

logger = logging.getLogger(__name__)

MAX_CHOICES = 128

HARMLESS = frozenset(
    {
        "add_special_tokens",
        "function_call",
        "metadata",
        "parallel_tool_calls",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_retention",
        "request_id",
        "safety_identifier",
        "service_tier",
        "spaces_between_special_tokens",
        "store",
        "stream_interval",
        "tool_choice",
    }
)

REFUSED: Mapping[str, tuple[Any, ...]] = dict.fromkeys(
    [
        "allowed_token_ids",
        "audio",
        "bad_words",
        "chat_template",
        "continue_final_message",
        "documents",
        "functions",
        "guided_choice",
        "guided_grammar",
        "guided_json",
        "guided_regex",
        "kv_transfer_params",
        "logits_processors",
        "lora_path",
        "lora_request",
        "mm_processor_kwargs",
        "prompt_embeds",
        "prompt_logprobs",
        "reasoning_effort",
        "return_token_ids",
        "return_tokens_as_token_ids",
        "structured_outputs",
        "suffix",
        "thinking_token_budget",
        "tools",
        "truncate_prompt_tokens",
        "typical_p",
        "use_beam_search",
        "verbosity",
        "vllm_xargs",
        "web_search_options",
    ],
    (None, False, 0, "", [], {}),
) | {"length_penalty": (None, 1.0), "modalities": (None, ["text"])}
"""Fields that would change the answer, with the values under which they would not."""


class StreamOptions(msgspec.Struct, kw_only=True):
    """How to stream."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchema(msgspec.Struct, kw_only=True):
    """OpenAI's wrapping of a schema."""

    schema: dict[str, Any] | bool
    name: str | None = None


class ResponseFormat(msgspec.Struct, kw_only=True):
    """The form that the answer must have."""

    type: str
    json_schema: JsonSchema | None = None


class SamplingFields(msgspec.Struct, kw_only=True):
    """What completions and chat completions share."""

    model: str
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    logit_bias: dict[str, float] | None = None
    n: Annotated[int, msgspec.Meta(ge=1, le=MAX_CHOICES)] | None = None
    best_of: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    user: str | None = None
    cache_salt: str | None = None
    priority: int | None = None


class CompletionBody(SamplingFields, kw_only=True):
    """``POST /v1/completions``."""

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    echo: bool | None = None


class Message(msgspec.Struct, kw_only=True):
    """One chat message."""

    role: str
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[Any] | None = None
    function_call: Any = None
    tool_call_id: str | None = None


class ChatBody(SamplingFields, kw_only=True):
    """``POST /v1/chat/completions``."""

    messages: Annotated[list[Message], msgspec.Meta(min_length=1)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    echo: bool | None = None


class TokenizeBody(msgspec.Struct, kw_only=True):
    """``POST /tokenize``: a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """``POST /detokenize``."""

    tokens: list[int]
    model: str | None = None


Body = TypeVar("Body", bound=msgspec.Struct)

_PATH = re.compile(r" - at `\$\.?([^`]*)`")
_MISSING = re.compile(r"missing required field `([^`]*)`")
_reported: set[str] = set()


async def read_body(request: Request, body: type[Body], *, max_bytes: int) -> Body:
    """Read and check the body of a request.

    Raises:
        HttpError: 415, another media type; 413, too large; 400, the client left in the middle.
        RequestError: As ``parse``.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise HttpError(415, f"Got the media type {media_type[:100]!r}, expected application/json")
    declared = request.headers.get("content-length", "")
    num_bytes = int(declared) if declared.isdigit() else 0
    parts: list[bytes] = []
    if num_bytes <= max_bytes:
        num_bytes = 0
        try:
            async for part in request.stream():
                num_bytes += len(part)
                if num_bytes > max_bytes:
                    break
                parts.append(part)
        except ClientDisconnect:
            raise HttpError(400, "The body ended early") from None
    if num_bytes > max_bytes:
        raise HttpError(413, f"The body is larger than {max_bytes} bytes", headers={"Connection": "close"})
    return parse(b"".join(parts), body)


def parse(data: bytes, body: type[Body]) -> Body:
    """Read a JSON request body.

    Raises:
        RequestError: Not JSON, not an object, a wrong type or value, or a field we cannot honour; names the field.
    """
    try:
        values = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"The body is not valid JSON: {error}") from None
    except RecursionError:
        raise RequestError("The body is nested too deeply") from None
    if not isinstance(values, dict):
        raise RequestError(f"Got a {type(values).__name__} as the body, expected a JSON object")
    if issubclass(body, SamplingFields):
        _check_fields(values, body)
    try:
        return msgspec.convert(values, body)
    except msgspec.ValidationError as error:
        message = str(error)
        missing = _MISSING.search(message)
        at = _PATH.search(message)
        path = at.group(1) if at else ""
        param = f"{path}.{missing.group(1)}".lstrip(".") if missing else path
        raise RequestError(
            f"Got a wrong value for {param}: {_PATH.sub('', message)}" if param else message, param=param or None
        ) from None
    except RecursionError:
        raise RequestError("The body is nested too deeply") from None


def _check_fields(values: dict[str, Any], body: type[msgspec.Struct]) -> None:
    known = body.__struct_fields__
    for name, value in values.items():
        if name in known or name in HARMLESS:
            continue
        if name in REFUSED:
            if value not in REFUSED[name]:
                raise RequestError(f"{name} is not supported by this server", param=name)
        elif name not in _reported and len(_reported) < 100:
            _reported.add(name)
            logger.warning("unknown_field_ignored name=%.100r", name)
