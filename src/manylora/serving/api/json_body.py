"""JSON bodies, read and checked strictly, at a cost that is bounded by their size.

Fields that a body's type does not have are skipped by the decoder. They are of three kinds. Fields that change nothing
in the answer (``metadata``, ``store``) are accepted. Fields that would change the answer and are not supported are
refused by name, because a wrong answer is worse than none. All others are ignored and logged once, as vLLM does.

A field of any shape stays JSON (``msgspec.Raw``) until its size is known. Large bodies are decoded in slices.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from manylora.core.errors import ContextExceeded, RequestError
from manylora.serving.api.large_body import (
    SLICE_BYTES,
    decode,
    decode_integers,
    decode_items,
    decode_shallow,
    split,
    struct_of,
)
from manylora.serving.api.schemas import SamplingFields
from manylora.serving.http.turns import next_turn

__all__ = ["REFUSED", "decode_prompts", "parse"]

logger = logging.getLogger(__name__)

_HARMLESS = """
    metadata mm_payload prediction prompt_cache_key prompt_cache_options prompt_cache_retention request_id
    return_assistant_tokens_mask return_mm_kwargs return_token_offsets routed_experts_prompt_start safety_identifier
    service_tier session_id spaces_between_special_tokens store stream_interval
"""
HARMLESS = frozenset(_HARMLESS.split())
"""Fields that change nothing in the answer."""

_REFUSED = """
    access_programs audio background_options context_management documents ec_transfer_params enable_response_messages
    functions image kv_transfer_params logits_processors logprob_token_ids lora_path lora_request media_io_kwargs
    mm_processor_kwargs moderation previous_input_messages prompt_embeds repetition_detection
    return_prompt_text return_weight_versions suffix thinking_token_budget typical_p use_beam_search verbosity
    vllm_xargs watermarking web_search_options
"""
REFUSED: Mapping[str, tuple[Any, ...]] = dict.fromkeys(_REFUSED.split(), (None, False, 0, "", [], {})) | {
    "function_call": (None, "none", "auto"),
    "include_reasoning": (None, True),
    "length_penalty": (None, 1.0),
    "modalities": (None, ["text"]),
    "truncation_side": (None, "left"),
}
"""Fields that would change the answer, with the values under which they would not."""

REASONS = {
    "use_beam_search": "ask for n sampled answers with logprobs, and keep the most likely one",
}
"""The way to get the same by other means, for fields that have one."""

MAX_NEUTRAL_BYTES = 64
"""JSON of a value in ``REFUSED`` is shorter."""

MAX_REPORTED, MAX_NAME_CHARS = 100, 100
"""Unknown fields that are logged, and characters of a name by which they are told apart."""

_FIRST_ITEM = re.compile(rb"\[\s*(.)", re.DOTALL)
_KINDS = {"[": "list", '"': "str", "n": "NoneType", "t": "bool", "f": "bool"}
_reported: set[str] = set()

Body = TypeVar("Body", bound=msgspec.Struct)


async def parse(data: bytes, body: type[Body]) -> Body:
    """Read a JSON request body.

    Raises:
        RequestError: Not JSON, not an object, a wrong type or value, or a field that is not supported; names the field.
    """
    made = _small(data, body) if len(data) <= SLICE_BYTES else await _large(data, body)
    for index, value in enumerate(msgspec.structs.astuple(made)):
        if type(value) is int and not -(2**63) <= value < 2**64:
            name = body.__struct_fields__[index]
            raise RequestError(f"Got a number beyond 64 bits for {name}", param=name)
    return made


def _small(data: bytes, body: type[Body]) -> Body:
    try:
        fields = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
    except msgspec.ValidationError:
        raise _no_object(data) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"The body is not valid JSON: {error}") from None
    except RecursionError:
        raise RequestError("The body is nested too deeply") from None
    if issubclass(body, SamplingFields):
        _check_fields(fields, body)
    return decode(data, body)


async def _large(data: bytes, body: type[Body]) -> Body:
    data = data.strip()
    refused = REFUSED if issubclass(body, SamplingFields) else ()
    if not data.startswith(b"{"):
        decode(data, msgspec.Raw)
        raise _no_object(data)
    fields = decode_shallow(data, body, refused)
    if refused:
        _check_fields(fields, body)
    made: Body = await struct_of(fields, body)
    return made


def _no_object(data: bytes) -> RequestError:
    first = data.lstrip()[:1].decode("ascii", "replace")
    return RequestError(f"Got a {_KINDS.get(first, 'number')} as the body, expected a JSON object")


async def decode_prompts(raw: msgspec.Raw, most: int, limit: int) -> list[str] | list[list[int]]:
    """Read the ``prompt`` of a completion: a text, token ids, or a list of either.

    The first item decides the type of the others. Items and numbers are counted before they are decoded.

    Args:
        raw: The prompt.
        most: Most prompts.
        limit: A prompt has fewer tokens.

    Raises:
        ContextExceeded: A prompt has more token ids.
        RequestError: It is none of them, empty, of different kinds, or has too many items.
    """
    data = bytes(memoryview(raw))
    if not data.startswith(b"["):
        return [decode(data, str, "prompt")]
    item = _FIRST_ITEM.match(data)
    first = item.group(1) if item else b"]"
    if first == b"]":
        raise RequestError("Got an empty list, expected at least one prompt", param="prompt")
    if first in b"-0123456789":
        return [await _token_ids(data, limit, "prompt")]
    if first not in b'["':
        raise RequestError("Expected a text, texts, token ids, or lists of token ids", param="prompt")
    items = split(raw, most, "prompt")
    if len(data) > SLICE_BYTES:
        await next_turn()
    if first == b"[":
        return [await _token_ids(bytes(memoryview(one)), limit, f"prompt[{index}]") for index, one in enumerate(items)]
    try:
        return await decode_items(items, str, "prompt")
    except RequestError:
        raise RequestError(
            "Got a list of different kinds, expected texts, token ids, or lists of token ids", param="prompt"
        ) from None


async def _token_ids(data: bytes, limit: int, at: str) -> list[int]:
    num_tokens = data.count(b",") + 1
    if num_tokens > limit:
        raise ContextExceeded(
            f"The prompt has {num_tokens} tokens; this model's context is {limit}, one of them at least to answer",
            param="prompt",
        )
    return await decode_integers(data, at)


def _check_fields(values: Mapping[str, msgspec.Raw], body: type[msgspec.Struct]) -> None:
    known = body.__struct_fields__
    for name, raw in values.items():
        if name in known or name in HARMLESS:
            continue
        if name in REFUSED:
            value = memoryview(raw)
            if len(value) > MAX_NEUTRAL_BYTES or decode(raw, object, name) not in REFUSED[name]:
                reason = f": {REASONS[name]}" if name in REASONS else ""
                raise RequestError(f"{name} is not supported by this server{reason}", param=name)
        elif (short := name[:MAX_NAME_CHARS]) not in _reported and len(_reported) < MAX_REPORTED:
            _reported.add(short)
            logger.warning("unknown_field_ignored name=%r", short)
