"""From a request's fields to sampling parameters: OpenAI's defaults, vLLM's extras."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from manylora.errors import RequestError
from manylora.server.api.schemas import ResponseFormat, SamplingFields
from manylora.types import SamplingParams

__all__ = ["check_token_ids", "sampling_params"]

JSON_OBJECT = '{"type":"object"}'


def sampling_params(
    body: SamplingFields, *, max_tokens: int | None, logprobs: int | None, vocab_size: int
) -> SamplingParams:
    """Return how to choose tokens, with the defaults of OpenAI's API.

    Args:
        body: The request.
        max_tokens: Most tokens to generate; ``None`` is as many as fit.
        logprobs: Number of alternatives to report, ``None`` for no log-probabilities.
        vocab_size: Bound of token ids.

    Raises:
        RequestError: A value out of range, or a combination that makes no sense.
    """
    if body.best_of not in (None, body.n or 1):
        raise RequestError(
            f"Got best_of = {body.best_of} and n = {body.n or 1}, expected both the same: "
            "ranking more answers than are returned is not supported",
            param="best_of",
        )
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options needs stream = true", param="stream_options")
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    stop_token_ids = tuple(body.stop_token_ids or ())
    check_token_ids(stop_token_ids, vocab_size, "stop_token_ids")
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=_or(body.min_tokens, 0),
        temperature=_or(body.temperature, 1.0),
        top_p=_or(body.top_p, 1.0),
        top_k=0 if body.top_k == -1 else _or(body.top_k, 0),  # vLLM's word for all is -1
        min_p=_or(body.min_p, 0.0),
        presence_penalty=_or(body.presence_penalty, 0.0),
        frequency_penalty=_or(body.frequency_penalty, 0.0),
        repetition_penalty=_or(body.repetition_penalty, 1.0),
        seed=body.seed,
        stop=stop,
        stop_token_ids=stop_token_ids,
        include_stop_str_in_output=bool(body.include_stop_str_in_output),
        ignore_eos=bool(body.ignore_eos),
        logprobs=logprobs,
        skip_special_tokens=_or(body.skip_special_tokens, True),
        json_schema=_json_schema(body.response_format),
        logit_bias=_logit_bias(body.logit_bias, vocab_size),
    )


Value = TypeVar("Value")


def _or(value: Value | None, default: Value) -> Value:
    return default if value is None else value


def check_token_ids(token_ids: tuple[int, ...], vocab_size: int, param: str) -> None:
    """Refuse numbers that are no tokens.

    Raises:
        RequestError: One lies outside the vocabulary; names the field.
    """
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise RequestError(f"Got the token id {token_id} in {param}, expected 0 to {vocab_size - 1}", param=param)


def _logit_bias(bias: dict[str, float] | None, vocab_size: int) -> tuple[tuple[int, float], ...]:
    pairs = []
    for token, value in (bias or {}).items():
        if not (token.isascii() and token.isdigit() and len(token) < 10):
            raise RequestError(f"Got the key {token[:50]!r} in logit_bias, expected token ids", param="logit_bias")
        pairs.append((int(token), value))
    check_token_ids(tuple(token for token, _ in pairs), vocab_size, "logit_bias")
    return tuple(pairs)


def _json_schema(form: ResponseFormat | None) -> str | None:
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return JSON_OBJECT
    if form.type != "json_schema":
        raise RequestError(
            f"Got response_format.type = {form.type[:50]!r}, expected one of text, json_object, json_schema",
            param="response_format",
        )
    if form.json_schema is None:
        raise RequestError("response_format of type json_schema needs a json_schema", param="response_format")
    return msgspec.json.encode(form.json_schema.schema).decode()
