"""The start of every route: the server's parts, and the body of the request, read and checked strictly.

Only ``application/json`` is accepted: clients send it, and a web page of another site cannot send it without a
preflight request.

Fields that a body's type does not have are of three kinds. Fields that change nothing in the answer (``metadata``,
``store``) are accepted. Fields that would change the answer and are not supported are refused by name, because a wrong
answer is worse than none. All others are ignored and logged once, as vLLM does.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from manylora.config import EngineConfig, ServerConfig
from manylora.errors import RequestError
from manylora.functions.wire import FunctionState
from manylora.server.api.schemas import SamplingFields
from manylora.server.auth import Gate
from manylora.server.errors import HttpError
from manylora.server.metrics.prometheus import Metrics
from manylora.server.model_settings import ModelSettings
from manylora.server.served import ServedFleet
from manylora.text import Tokenizer

__all__ = ["REFUSED", "Context", "context_of", "parse", "read_body"]

logger = logging.getLogger(__name__)

_HARMLESS = """
    add_special_tokens metadata prediction prompt_cache_key prompt_cache_retention
    request_id safety_identifier service_tier spaces_between_special_tokens store stream_interval
"""
HARMLESS = frozenset(_HARMLESS.split())
"""Fields that change nothing in the answer."""

_REFUSED = """
    audio bad_words chat_template documents functions kv_transfer_params
    logits_processors lora_path lora_request mm_processor_kwargs prompt_embeds prompt_logprobs reasoning_effort
    return_token_ids return_tokens_as_token_ids suffix thinking_token_budget truncate_prompt_tokens
    typical_p use_beam_search verbosity vllm_xargs web_search_options
"""
REFUSED: Mapping[str, tuple[Any, ...]] = dict.fromkeys(_REFUSED.split(), (None, False, 0, "", [], {})) | {
    "function_call": (None, "none", "auto"),
    "include_reasoning": (None, True),
    "length_penalty": (None, 1.0),
    "modalities": (None, ["text"]),
    "prompt_logprobs": (None,),  # 0 asks for those of the prompt's own tokens
}
"""Fields that would change the answer, with the values under which they would not."""

_PATH = re.compile(r" - at `\$\.?([^`]*)`")
_MISSING = re.compile(r"missing required field `([^`]*)`")
_reported: set[str] = set()


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """The server's parts, in the state of the application.

    Args:
        engine_config: Configuration of the engines.
        config: Configuration of the server.
        fleet: The engines.
        tokenizer: The base model's tokenizer.
        gate: Checks API keys.
        settings: Sampling defaults and chat templates, by model.
        metrics: Shown by ``/metrics`` and ``/status``.
        lora_roots: Directories from which adapters may be loaded at run time.
        fingerprint: Digest of all that answers depend on besides the adapter, for ``system_fingerprint``.
        started_at: Start of the server, in seconds since the epoch.
        epoch_s: Returns the time in seconds since the epoch.
        monotonic_s: Returns a time in seconds that never steps back.
        model_list: The answer of ``/v1/models``, under the number of changes of the adapters at the time; routers ask
            for it every few seconds.
        serves_base: Whether the base is a model of its own.
        functions: Returns the states of isolated functions, for ``/status`` and ``/metrics``.
    """

    engine_config: EngineConfig
    config: ServerConfig
    fleet: ServedFleet
    tokenizer: Tokenizer
    gate: Gate
    settings: ModelSettings
    metrics: Metrics
    lora_roots: tuple[Path, ...]
    fingerprint: str
    started_at: int
    epoch_s: Callable[[], float]
    monotonic_s: Callable[[], float]
    model_list: dict[int, bytes] = field(default_factory=dict)
    serves_base: bool = True
    functions: Callable[[], Sequence[FunctionState]] = tuple


def context_of(request: Request) -> Context:
    """Return the server's parts."""
    context = request.app.state.context
    assert isinstance(context, Context)
    return context


Body = TypeVar("Body", bound=msgspec.Struct)


async def read_body(request: Request, body: type[Body]) -> Body:
    """Read and check the body of a request.

    Raises:
        HttpError: 415 for another media type; 413 above ``max_body_bytes``; 400 if the client disconnected.
        RequestError: As ``parse``.
    """
    max_bytes = context_of(request).config.max_body_bytes
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
        RequestError: Not JSON, not an object, a wrong type or value, or a field that is not supported; names the field.
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
