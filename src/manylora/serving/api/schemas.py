"""Request bodies as OpenAI and vLLM define them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from manylora.serving.api.json_body import FieldRules, raw_field

__all__ = [
    "HARMLESS",
    "INLINE_CHARS",
    "MAX_MESSAGES",
    "MAX_SCHEMA_BYTES",
    "REFUSED",
    "TOKENIZE_CONTEXTS",
    "CalledFunction",
    "ChatBody",
    "CompletionBody",
    "ConstraintFields",
    "ContentPart",
    "DetokenizeBody",
    "Effort",
    "FunctionName",
    "JsonSchema",
    "Message",
    "ResponseFormat",
    "SamplingFields",
    "StructuredOutputs",
    "TokenizeBody",
    "Tool",
    "ToolCall",
    "ToolChoice",
    "ToolFunction",
]

MAX_CHOICES = 128  # answers per prompt, ``n``

INLINE_CHARS = 4_000
"""Characters up to which text is tokenized on the event loop, in a millisecond or two; more go to a thread."""

MAX_MESSAGES = 2048  # messages in a chat, and text parts in all of them
MAX_SCHEMA_BYTES = 128 * 1024  # JSON of a response's schema, or of the parameters of all tools

TOKENIZE_CONTEXTS = 4
"""``/tokenize`` and ``/detokenize`` take so many contexts, so that a caller sees how far a text is too long."""


_HARMLESS = """
    metadata mm_payload prediction prompt_cache_key prompt_cache_options prompt_cache_retention request_id
    return_assistant_tokens_mask return_mm_kwargs return_token_offsets routed_experts_prompt_start safety_identifier
    service_tier session_id spaces_between_special_tokens store stream_interval
"""
HARMLESS = frozenset(_HARMLESS.split())  # fields that change nothing in the answer

_REFUSED = """
    access_programs audio background_options context_management documents ec_transfer_params enable_response_messages
    functions image kv_transfer_params logits_processors lora_path lora_request media_io_kwargs
    mm_processor_kwargs moderation previous_input_messages prompt_embeds repetition_detection
    return_prompt_text return_weight_versions suffix thinking_token_budget typical_p verbosity
    vllm_xargs watermarking web_search_options
"""
REFUSED: Mapping[str, tuple[Any, ...]] = dict.fromkeys(_REFUSED.split(), (None, False, 0, "", [], {})) | {
    "function_call": (None, "none", "auto"),
    "include_reasoning": (None, True),
    "modalities": (None, ["text"]),
}
"""Fields that would change the answer, with the values under which they would not."""

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]


class ToolFunction(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A function that the model may call."""

    name: Name
    description: str | None = None
    parameters: msgspec.Raw = raw_field()
    strict: bool | None = None


class Tool(msgspec.Struct, kw_only=True):
    """A tool; every one is a function."""

    type: str
    function: ToolFunction


class FunctionName(msgspec.Struct, kw_only=True):
    """A function by name."""

    name: Name


class ToolChoice(msgspec.Struct, kw_only=True):
    """A ``tool_choice`` that names a function."""

    type: str
    function: FunctionName


class CalledFunction(msgspec.Struct, kw_only=True):
    """The function of a call in the history."""

    name: Name
    arguments: msgspec.Raw = raw_field()


class ToolCall(msgspec.Struct, kw_only=True):
    """A call in the history."""

    function: CalledFunction
    id: str | None = None
    type: str | None = None


class StreamOptions(msgspec.Struct, kw_only=True):
    """OpenAI's ``stream_options``."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchema(msgspec.Struct, kw_only=True):
    """``response_format.json_schema``."""

    schema: msgspec.Raw
    name: str | None = None


class ResponseFormat(msgspec.Struct, kw_only=True):
    """OpenAI's ``response_format``; ``structural_tag`` is vLLM's."""

    type: str
    json_schema: JsonSchema | None = None
    structures: msgspec.Raw = raw_field()
    triggers: list[str] | None = None


class StructuredOutputs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """vLLM's ``structured_outputs``: one of the first six."""

    json: msgspec.Raw = raw_field()
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    structural_tag: str | None = None
    disable_fallback: bool | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: str | None = None


class ConstraintFields(msgspec.Struct, kw_only=True):
    """The fields that ask for an answer of a given form: OpenAI's, vLLM's, and vLLM's older names."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: msgspec.Raw = raw_field()
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None


class SamplingFields(ConstraintFields, kw_only=True):
    """Fields of completions, chat completions and responses."""

    field_rules: ClassVar[FieldRules] = FieldRules(HARMLESS, REFUSED)
    needs_model: ClassVar[bool] = True  # whether a body without a model is an error; else it asks for the base

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
    logit_bias: msgspec.Raw = raw_field()
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    n: Annotated[int, msgspec.Meta(ge=1, le=MAX_CHOICES)] | None = None
    best_of: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    cache_salt: str | None = None
    priority: int | None = None


class ChoicesFields(SamplingFields, kw_only=True):
    """Fields of completions and chat completions, which may have several answers."""

    use_beam_search: bool | None = None
    length_penalty: float | None = None


class CompletionBody(ChoicesFields, kw_only=True):
    """``POST /v1/completions``."""

    prompt: msgspec.Raw
    logprobs: int | None = None
    echo: bool | None = None


class ContentPart(msgspec.Struct, kw_only=True, gc=False):
    """A part of a message; only text is supported."""

    type: str | None = None
    text: msgspec.Raw = raw_field()


class Message(msgspec.Struct, kw_only=True, gc=False):
    """One chat message."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    function_call: msgspec.Raw = raw_field()
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class ChatBody(ChoicesFields, kw_only=True):
    """``POST /v1/chat/completions``."""

    messages: Annotated[list[Message], msgspec.Meta(min_length=1)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: msgspec.Raw = raw_field()
    echo: bool | None = None
    tools: list[Tool] | None = None
    tool_choice: str | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None


class TokenizeBody(msgspec.Struct, kw_only=True):
    """``POST /tokenize``: a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: msgspec.Raw = raw_field()
    tools: list[Tool] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """``POST /detokenize``."""

    tokens: list[int]
    model: str | None = None
