"""Request bodies as OpenAI and vLLM define them, and the sampling parameters that they ask for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal, TypeVar

import msgspec

from manylora.core.errors import RequestError
from manylora.core.generation import NO_DEFAULTS, GenerationDefaults
from manylora.core.types import SamplingParams
from manylora.serving.api.constraints import NULL, ConstraintFields, constraint_of, free_form
from manylora.serving.api.tools import Tool, ToolCall, ToolChoice
from manylora.serving.http.bounds import INLINE_CHARS, MAX_BAD_WORDS, MAX_BIAS_BYTES, MAX_CHOICES, MAX_STOP_TOKEN_IDS
from manylora.serving.text import Tokenizer

__all__ = [
    "ChatBody",
    "CompletionBody",
    "ContentPart",
    "DetokenizeBody",
    "Message",
    "SamplingFields",
    "StreamOptions",
    "TokenizeBody",
    "check_token_ids",
    "sampling_params",
    "template_arguments",
]

Value = TypeVar("Value")


class StreamOptions(msgspec.Struct, kw_only=True):
    """OpenAI's ``stream_options``."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingFields(ConstraintFields, kw_only=True):
    """Fields of completions and of chat completions."""

    model: str
    add_special_tokens: bool | None = None
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
    logit_bias: msgspec.Raw = NULL
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    truncate_prompt_tokens: int | None = None
    n: Annotated[int, msgspec.Meta(ge=1, le=MAX_CHOICES)] | None = None
    best_of: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    cache_salt: str | None = None
    priority: int | None = None


class CompletionBody(SamplingFields, kw_only=True):
    """``POST /v1/completions``."""

    prompt: msgspec.Raw
    logprobs: int | None = None
    echo: bool | None = None


class ContentPart(msgspec.Struct, kw_only=True, gc=False):
    """A part of a message; only text is supported."""

    type: str | None = None
    text: msgspec.Raw = NULL


class Message(msgspec.Struct, kw_only=True, gc=False):
    """One chat message."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    function_call: msgspec.Raw = NULL
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class ChatBody(SamplingFields, kw_only=True):
    """``POST /v1/chat/completions``."""

    messages: Annotated[list[Message], msgspec.Meta(min_length=1)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: msgspec.Raw = NULL
    echo: bool | None = None
    tools: list[Tool] | None = None
    tool_choice: str | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None


class TokenizeBody(msgspec.Struct, kw_only=True):
    """``POST /tokenize``: a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: msgspec.Raw = NULL
    tools: list[Tool] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """``POST /detokenize``."""

    tokens: list[int]
    model: str | None = None


def template_arguments(body: ChatBody | TokenizeBody) -> dict[str, bool]:
    """Return the arguments of a chat template: the end is the model's turn, to begin or to go on with.

    Raises:
        RequestError: Both are asked for.
    """
    if body.continue_final_message and body.add_generation_prompt:
        raise RequestError(
            "Got continue_final_message and add_generation_prompt, expected one of them", param="continue_final_message"
        )
    return {
        "add_generation_prompt": not body.continue_final_message and body.add_generation_prompt is not False,
        "continue_final_message": bool(body.continue_final_message),
        "add_special_tokens": bool(body.add_special_tokens),  # beside those that the template writes
    }


def sampling_params(
    body: SamplingFields,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    tokenizer: Tokenizer,
    vocab_size: int,
    prompt_logprobs: int | None = None,
    defaults: GenerationDefaults = NO_DEFAULTS,
) -> SamplingParams:
    """Return the sampling parameters of a request, with the model's defaults, then those of OpenAI's API.

    Args:
        body: The request.
        max_tokens: Most tokens to generate; ``None`` for as many as fit.
        logprobs: Number of alternatives to report; ``None`` for no log-probabilities.
        tokenizer: The base model's tokenizer, for words.
        vocab_size: Token ids are below this.
        prompt_logprobs: As ``logprobs``, for the prompt.
        defaults: The defaults of the model.

    Raises:
        RequestError: A value is out of range, or two fields contradict each other.
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
    if len(stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise RequestError(
            f"Got {len(stop_token_ids)} stop_token_ids, expected at most {MAX_STOP_TOKEN_IDS}", param="stop_token_ids"
        )
    check_token_ids(stop_token_ids, vocab_size, "stop_token_ids")
    if body.allowed_token_ids == []:
        raise RequestError("Got no allowed_token_ids, expected at least one", param="allowed_token_ids")
    if len(body.allowed_token_ids or ()) > vocab_size:
        raise RequestError("Got more allowed_token_ids than the vocabulary has", param="allowed_token_ids")
    allowed_token_ids = tuple(dict.fromkeys(body.allowed_token_ids or ()))
    check_token_ids(allowed_token_ids, vocab_size, "allowed_token_ids")
    return SamplingParams(
        max_tokens=defaults.cap(max_tokens),
        min_tokens=_or(body.min_tokens, 0),
        temperature=_or(body.temperature, _or(defaults.temperature, 1.0)),
        top_p=_or(body.top_p, _or(defaults.top_p, 1.0)),
        top_k=0 if body.top_k == -1 else _or(body.top_k, defaults.top_k or 0),  # -1 is vLLM's value for all
        min_p=_or(body.min_p, defaults.min_p or 0.0),
        presence_penalty=_or(body.presence_penalty, 0.0),
        frequency_penalty=_or(body.frequency_penalty, 0.0),
        repetition_penalty=_or(body.repetition_penalty, _or(defaults.repetition_penalty, 1.0)),
        seed=body.seed,
        stop=stop,
        stop_token_ids=stop_token_ids,
        include_stop_str_in_output=bool(body.include_stop_str_in_output),
        ignore_eos=bool(body.ignore_eos),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        skip_special_tokens=_or(body.skip_special_tokens, True),
        constraint=constraint_of(body),
        logit_bias=() if body.logit_bias is NULL else _logit_bias(body.logit_bias, vocab_size),
        allowed_token_ids=allowed_token_ids,
        bad_words_token_ids=_bad_words(body.bad_words, tokenizer) if body.bad_words else (),
    )


def _or(value: Value | None, default: Value) -> Value:
    return default if value is None else value


def check_token_ids(token_ids: Sequence[int], vocab_size: int, param: str) -> None:
    """Raise ``RequestError``, which names the field, for a token id outside the vocabulary."""
    for token_id in (min(token_ids, default=0), max(token_ids, default=0)):
        if not 0 <= token_id < vocab_size:
            raise RequestError(f"Got the token id {token_id} in {param}, expected 0 to {vocab_size - 1}", param=param)


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
