"""The sampling parameters that a request body asks for, with the model's defaults, then those of OpenAI's API."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import wraps
from typing import Any, TypeVar

import msgspec

from manylora.core.errors import RequestError
from manylora.core.types import MAX_LOGPROB_TOKEN_IDS, MAX_LOGPROBS, Constraint, SamplingParams
from manylora.serving.api.json_body import NULL, free_form, is_null
from manylora.serving.api.request import AnswerCall
from manylora.serving.api.schemas import (
    INLINE_CHARS,
    MAX_SCHEMA_BYTES,
    ConstraintFields,
    ResponseFormat,
    SamplingFields,
    StructuredOutputs,
)
from manylora.serving.text import Tokenizer

__all__ = ["check_token_ids", "constraint_field", "count_logprobs", "names_max_tokens", "sampling_params"]

MAX_BAD_WORDS = 128  # entries of ``bad_words``; together at most ``INLINE_CHARS`` characters
MAX_STOP_TOKEN_IDS = 1024  # entries of ``stop_token_ids``

MAX_BIAS_BYTES = 64 * 1024
"""JSON of ``logit_bias``, which has at most 1024 entries: some floats take microseconds to decode."""

JSON_OBJECT = '{"type":"object"}'

Value = TypeVar("Value")
Answer = Callable[[AnswerCall[Any]], Awaitable[Value]]


def names_max_tokens(answer: Answer[Value]) -> Answer[Value]:
    """Let errors about ``max_tokens`` name the field that a body of chats or responses has in its place."""

    @wraps(answer)
    async def named(call: AnswerCall[Any]) -> Value:
        try:
            return await answer(call)
        except RequestError as error:
            for name in ("max_completion_tokens", "max_output_tokens"):
                if error.param == "max_tokens" and getattr(call.body, name, None) is not None:
                    error.param, error.args = name, (str(error).replace("max_tokens", name),)
            raise

    return named


def count_logprobs(call: AnswerCall[Any]) -> None:
    """Replace -1, all tokens, in a body's numbers of log-probabilities; ``RequestError`` if one is above its bound."""
    body: SamplingFields = call.body
    most = call.context.config.web.max_logprobs
    most = MAX_LOGPROBS if most == -1 else most
    for param in ("logprobs", "top_logprobs", "prompt_logprobs"):
        num_top = getattr(body, param, None)
        if num_top is None or isinstance(num_top, bool):
            continue
        if num_top < -1:
            raise RequestError(f"Got {num_top}: `{param}` must be a positive value or -1", param=param)
        if num_top == -1:
            num_top = call.context.fleet.engines.info.vocab_size
            setattr(body, param, num_top)
        if num_top > most:
            kind = "prompt" if param == "prompt_logprobs" else "sample"
            raise RequestError(
                f"Requested {kind} logprobs of {num_top}, which is greater than max allowed: {most} (--max-logprobs)",
                param=param,
            )


def sampling_params(
    call: AnswerCall[Any], *, max_tokens: int | None, logprobs: int | None, prompt_logprobs: int | None = None
) -> SamplingParams:
    """Return the sampling parameters of a request, with the model's defaults, then those of OpenAI's API.

    ``max_tokens`` is ``None`` for as many as fit; ``logprobs`` is the number of alternatives to report, ``None`` for no
    log-probabilities. ``RequestError`` if a value is out of range, or two fields contradict each other.
    """
    body: SamplingFields = call.body
    defaults, vocab_size = call.settings.defaults, call.context.fleet.engines.info.vocab_size
    _check_fields(body, vocab_size)
    if body.logprob_token_ids:
        _check_logprob_token_ids(body.logprob_token_ids, logprobs, vocab_size)
        logprobs = 0
    return SamplingParams(
        max_tokens=defaults.cap(max_tokens),
        min_tokens=body.min_tokens or 0,
        temperature=_or(body.temperature, _or(defaults.temperature, 1.0)),
        top_p=_or(body.top_p, _or(defaults.top_p, 1.0)),
        top_k=0 if body.top_k == -1 else _or(body.top_k, defaults.top_k or 0),  # -1 is vLLM's value for all
        min_p=_or(body.min_p, defaults.min_p or 0.0),
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=_or(body.repetition_penalty, _or(defaults.repetition_penalty, 1.0)),
        seed=None if body.seed == -1 else body.seed,  # -1 is vLLM's value for none
        stop=(body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ()),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        include_stop_str_in_output=bool(body.include_stop_str_in_output),
        ignore_eos=bool(body.ignore_eos),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        logprob_token_ids=tuple(dict.fromkeys(body.logprob_token_ids or ())),
        skip_special_tokens=_or(body.skip_special_tokens, True),
        constraint=_constraint_of(body),
        logit_bias=() if body.logit_bias is NULL else _logit_bias(body.logit_bias, vocab_size),
        allowed_token_ids=tuple(dict.fromkeys(body.allowed_token_ids or ())),
        bad_words_token_ids=_bad_words(body.bad_words, call.context.tokenizer) if body.bad_words else (),
    )


def _check_fields(body: SamplingFields, vocab_size: int) -> None:
    """Raise ``RequestError`` for lists of tokens that are too long or out of range, and fields that contradict."""
    if body.best_of not in (None, body.n or 1):
        raise RequestError(
            f"Got best_of = {body.best_of} and n = {body.n or 1}, expected both the same: "
            "ranking more answers than are returned is not supported",
            param="best_of",
        )
    if body.stream_options is not None and not body.stream:
        raise RequestError("Stream options can only be defined when `stream=True`.", param="stream_options")
    if getattr(body, "length_penalty", None) not in (None, 1.0) and not getattr(body, "use_beam_search", False):
        raise RequestError("length_penalty belongs to beam search: set use_beam_search", param="length_penalty")
    if (num_stops := len(body.stop_token_ids or ())) > MAX_STOP_TOKEN_IDS:
        raise RequestError(
            f"Got {num_stops} stop_token_ids, expected at most {MAX_STOP_TOKEN_IDS}", param="stop_token_ids"
        )
    check_token_ids(body.stop_token_ids or (), vocab_size, "stop_token_ids")
    if body.allowed_token_ids == []:
        raise RequestError("Got no allowed_token_ids, expected at least one", param="allowed_token_ids")
    if len(body.allowed_token_ids or ()) > vocab_size:
        raise RequestError("Got more allowed_token_ids than the vocabulary has", param="allowed_token_ids")
    check_token_ids(body.allowed_token_ids or (), vocab_size, "allowed_token_ids")


def _check_logprob_token_ids(token_ids: Sequence[int], logprobs: int | None, vocab_size: int) -> None:
    param = "logprob_token_ids"
    if logprobs is None:
        raise RequestError("when using `logprob_token_ids`, `logprobs` must be set", param=param)
    if len(token_ids) > MAX_LOGPROB_TOKEN_IDS:
        raise RequestError(
            f"Requested logprob_token_ids of length {len(token_ids)}, which is greater than max allowed: "
            f"{MAX_LOGPROB_TOKEN_IDS}",
            param=param,
        )
    check_token_ids(token_ids, vocab_size, param)


def _or(value: Value | None, default: Value) -> Value:
    return default if value is None else value


def check_token_ids(token_ids: Sequence[int], vocab_size: int, param: str) -> None:
    """Raise ``RequestError``, which names the field, for a token id outside the vocabulary."""
    for token_id in (min(token_ids, default=0), max(token_ids, default=0)):
        if not 0 <= token_id < vocab_size:
            raise RequestError(
                f"Token id {token_id} is out of vocabulary: {param} takes ids from 0 to {vocab_size - 1}", param=param
            )


def _bad_words(words: list[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    if len(words) > MAX_BAD_WORDS or sum(map(len, words)) > INLINE_CHARS:
        raise RequestError(
            f"Got {len(words)} bad_words of {sum(map(len, words))} characters, expected at most {MAX_BAD_WORDS} "
            f"of {INLINE_CHARS}",
            param="bad_words",
        )
    if not all(word.strip() for word in words):
        raise RequestError("bad_words has an empty word", param="bad_words")
    return tokenizer.runs_of(words)


def _logit_bias(raw: msgspec.Raw, vocab_size: int) -> tuple[tuple[int, float], ...]:
    bias: dict[str, float] | None = free_form(raw, dict[str, float] | None, MAX_BIAS_BYTES, "logit_bias")  # type: ignore[arg-type]
    pairs = []
    for token, value in (bias or {}).items():
        if not (token.isascii() and token.isdigit() and len(token) < 10):
            raise RequestError(f"Got the key {token[:50]!r} in logit_bias, expected token ids", param="logit_bias")
        pairs.append((int(token), value))
    check_token_ids([token for token, _ in pairs], vocab_size, "logit_bias")
    return tuple(pairs)


def constraint_field(body: ConstraintFields) -> str:
    """Return the field that has the one constraint of a body; no schema is read again for it."""
    for kind in ("json", "regex", "choice", "grammar"):
        if not _is_absent(getattr(body, f"guided_{kind}")):
            return f"guided_{kind}"
    if body.response_format is not None and body.response_format.type != "text":
        return "response_format"
    return "structured_outputs"


def _constraint_of(body: ConstraintFields) -> Constraint | None:
    """Return the constraint that a request asks for, or raise ``RequestError`` if it asks for several."""
    found = _guided(body, "guided_")
    if (given := body.structured_outputs) is not None:
        found += [("structured_outputs", one) for _, one in _guided(given, "")]
        found += [("structured_outputs", one) for one in _of_structured_outputs_alone(given)]
    if body.response_format is not None and body.response_format.type != "text":
        found.append(("response_format", _of_response_format(body.response_format)))
    if len(found) > 1:
        names = ", ".join(sorted(field for field, _ in found))
        raise RequestError(f"Got {len(found)} constraints of the answer in {names}, expected one", param=found[0][0])
    return found[0][1] if found else None


def _guided(values: msgspec.Struct, prefix: str) -> list[tuple[str, Constraint]]:
    """Return the constraints of the kinds that have a field of the older names too, with their fields."""
    found = []
    for kind in ("json", "regex", "choice", "grammar"):
        field = prefix + kind
        value = getattr(values, field)
        if not _is_absent(value):
            if kind == "json":
                value = _read_schema(value, str | dict[str, Any] | bool, field)
            found.append((field, Constraint(kind, value if isinstance(value, str) else _text(value))))
    return found


def _is_absent(value: Any) -> bool:
    return value is None or (isinstance(value, msgspec.Raw) and is_null(value))


def _read_schema(raw: msgspec.Raw, kind: Any, param: str) -> Any:
    return free_form(raw, kind, MAX_SCHEMA_BYTES, param)


def _of_structured_outputs_alone(given: StructuredOutputs) -> list[Constraint]:
    for name in ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern"):
        if getattr(given, name):
            raise RequestError(f"structured_outputs.{name} is not supported by this server", param="structured_outputs")
    found = []
    if given.json_object:
        found.append(Constraint("json", JSON_OBJECT))
    if given.structural_tag is not None:
        found.append(Constraint("structural_tag", given.structural_tag))
    return found


def _of_response_format(form: ResponseFormat) -> Constraint:
    if form.type == "json_object":
        return Constraint("json", JSON_OBJECT)
    if form.type == "structural_tag":
        structures = _read_schema(form.structures, list[dict[str, Any]] | None, "response_format")
        return Constraint("structural_tag", _text({"structures": structures, "triggers": form.triggers}))
    if form.type != "json_schema":
        raise RequestError(
            f"Got response_format.type = {form.type[:50]!r}, expected one of text, json_object, json_schema, "
            "structural_tag",
            param="response_format",
        )
    if form.json_schema is None:
        raise RequestError("response_format of type json_schema needs a json_schema", param="response_format")
    return Constraint("json", _text(_read_schema(form.json_schema.schema, dict[str, Any] | bool, "response_format")))


def _text(value: Any) -> str:
    return msgspec.json.encode(value).decode()
