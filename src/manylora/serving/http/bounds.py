"""The bounds of a request, before any of it costs more than reading it.

A JSON decoder, a tokenizer's conversions and a chat template hold Python's lock, so a thread does not take their cost
off the event loop. Each is therefore bounded by the size of its input. docs/limits.md lists all bounds.
"""

from __future__ import annotations

__all__ = [
    "INLINE_CHARS",
    "MAX_ANSWER_LOGPROBS",
    "MAX_ARGUMENTS_BYTES",
    "MAX_BAD_WORDS",
    "MAX_BIAS_BYTES",
    "MAX_BODIES_BYTES",
    "MAX_CHOICES",
    "MAX_FORMS_WAITING",
    "MAX_MESSAGES",
    "MAX_MODEL_CHARS",
    "MAX_PROMPT_LOGPROBS",
    "MAX_SALT_CHARS",
    "MAX_SCHEMA_BYTES",
    "MAX_STOP_TOKEN_IDS",
    "MAX_TEMPLATE_BYTES",
    "MAX_TEMPLATE_CHARS",
    "MAX_TEMPLATE_DEPTH",
    "MAX_TEMPLATE_NUMBER",
    "MAX_TEXT_WAITING",
    "MAX_TOOLS",
    "MAX_UNREAD_BYTES",
    "SHORT_BODY_BYTES",
    "TOKENIZE_CONTEXTS",
]

MAX_CHOICES = 128
"""Answers per prompt, ``n``."""

MAX_MODEL_CHARS = 600
"""Characters of ``model``: the base's name, a colon and an adapter's."""

MAX_SALT_CHARS = 1024
"""Characters of ``cache_salt``, which an engine hashes for each answer."""

MAX_MESSAGES = 2048
"""Messages in a chat, and text parts in all of them."""

MAX_BAD_WORDS = 128
"""Entries of ``bad_words``; together at most ``INLINE_CHARS`` characters."""

MAX_PROMPT_LOGPROBS = 1 << 20
"""Log-probabilities of the prompts of a request: each is some 70 bytes of JSON."""

MAX_ANSWER_LOGPROBS = 1 << 22
"""Log-probabilities of the answers of a request, or as many as an answer of the whole context has, if that is more."""

MAX_STOP_TOKEN_IDS = 1024
"""Entries of ``stop_token_ids``."""

MAX_BIAS_BYTES = 64 * 1024
"""JSON of ``logit_bias``, which has at most 1024 entries: some floats take microseconds to decode."""

MAX_SCHEMA_BYTES = 128 * 1024
"""JSON of a response's schema, or of the parameters of all tools."""

MAX_TOOLS = 128
"""Tools of a request."""

MAX_ARGUMENTS_BYTES = 64 * 1024
"""JSON of the arguments of one call in the history."""

MAX_TEMPLATE_BYTES = 16 * 1024
"""JSON of ``chat_template_kwargs``."""

MAX_TEMPLATE_CHARS = 64 * 1024
"""Characters of a request's ``chat_template``."""

MAX_TEMPLATE_DEPTH = 16
"""Nesting of ``chat_template_kwargs``."""

MAX_TEMPLATE_NUMBER = 1_000_000
"""Largest number in ``chat_template_kwargs``: a template can repeat or indent by it."""

INLINE_CHARS = 4_000
"""Characters up to which text is tokenized on the event loop, in a millisecond or two; more go to a thread."""

MAX_TEXT_WAITING = 256
"""Long texts that wait for their turn to be tokenized, half of them of one caller; more get a 429."""

MAX_FORMS_WAITING = 64
"""Requests with new forms that wait for their turn to be checked, half of them of one caller; more get a 429."""

TOKENIZE_CONTEXTS = 4
"""``/tokenize`` and ``/detokenize`` take so many contexts, so that a caller sees how far a text is too long."""

MAX_BODIES_BYTES = 256 << 20
"""Bytes of all bodies longer than ``SHORT_BODY_BYTES`` that arrive at a time; beyond them a body alone is taken."""

MAX_UNREAD_BYTES = 256 << 20
"""Bytes of all long answers that wait for their clients; beyond them the slowest readers are left."""

SHORT_BODY_BYTES = 64 * 1024
"""A body up to this is taken whatever else arrives: connections bound these."""
