"""Requests at the bounds: the largest that the server answers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from attack_target import MODEL
from corpus import CHAT, COMPLETIONS, RESPONSES

__all__ = ["LONG", "MAXIMA", "Allowed"]

CONTEXT = 32_768
LONG = (MODEL, "--simulate", "h100:mistral-7b", "--max-logprobs", "20")
"""A server whose context is long."""


@dataclass(frozen=True)
class Allowed:
    """A request within the bounds, and the least bytes of its answer."""

    slug: str
    path: str
    body: bytes
    least_bytes: int = 0


def allowed(slug: str, path: str, least_bytes: int = 0, **fields: Any) -> Allowed:
    end = (
        {} if path in ("/tokenize", "/detokenize") else {"max_output_tokens" if path == RESPONSES else "max_tokens": 2}
    )
    return Allowed(slug, path, json.dumps({"model": MODEL, **end, **fields}).encode(), least_bytes)


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


IDS = [20 + i % 90 for i in range(CONTEXT - 100)]
TEXT = "the quick fox jumps " * ((CONTEXT - 4_000) // 20)
NAMES = [f"p{i}" for i in range(3_000)]
SCHEMA = {"type": "object", "properties": {name: {"type": "string"} for name in NAMES}, "required": NAMES}
TOOL = {"type": "object", "properties": {f"p{i}": {"type": "string", "description": "x"} for i in range(20)}}
TOOLS = [{"type": "function", "function": {"name": f"f{i}", "parameters": TOOL}} for i in range(128)]
LISTS = json.dumps({"x": [[[]]] * 12_800}, separators=(",", ":"))
SMALL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
ALLOWED = [i % 90 + 20 for i in range(100)]
BIAS = {str(i): 1.2345678901234567e-300 for i in range(20, 110)}
MAXIMA = [
    allowed("a prompt as long as the context", COMPLETIONS, prompt=TEXT),
    allowed("ids as many as the context, and n", COMPLETIONS, prompt=IDS, n=128),
    allowed("two thousand prompts", COMPLETIONS, prompt=["a"] * 2_000),
    allowed("two thousand prompts of ids", COMPLETIONS, prompt=[[20, 21]] * 2_000),
    allowed(
        "two thousand streams with usage",
        COMPLETIONS,
        prompt=["a"] * 2_000,
        stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
    ),
    allowed("an echo of the context", COMPLETIONS, prompt=TEXT, echo=True),
    allowed("an echo of ids", COMPLETIONS, prompt=IDS, echo=True),
    allowed("a stream of many echoes", COMPLETIONS, 4 << 20, prompt=IDS, echo=True, n=128, stream=True),
    allowed("a stream of many prompts", COMPLETIONS, 8 << 20, prompt=IDS, return_token_ids=True, n=128, stream=True),
    allowed("answers with the prompt", COMPLETIONS, 8 << 20, prompt=IDS, return_token_ids=True, n=128),
    allowed("a report of the context", COMPLETIONS, 1 << 20, prompt=IDS, prompt_logprobs=20, return_token_ids=True),
    allowed("log-probabilities of an echo", COMPLETIONS, 1 << 20, prompt=IDS, echo=True, logprobs=20),
    allowed(
        "log-probabilities of many answers",
        COMPLETIONS,
        1 << 20,
        prompt="a",
        n=128,
        logprobs=20,
        max_tokens=50,
        ignore_eos=True,
    ),
    allowed(
        "a long answer with log-probabilities",
        CHAT,
        1 << 18,
        messages=user("a"),
        logprobs=True,
        top_logprobs=20,
        max_tokens=300,
        ignore_eos=True,
    ),
    allowed(
        "stop strings",
        COMPLETIONS,
        prompt="a",
        n=128,
        stop=["a" * 4_095 + chr(98 + i) for i in range(16)],
        max_tokens=50,
        ignore_eos=True,
    ),
    allowed("bad words", COMPLETIONS, prompt="a", bad_words=["ab"] * 128),
    allowed(
        "logit bias and allowed tokens", COMPLETIONS, prompt="a", logit_bias=BIAS, allowed_token_ids=[*range(20, 110)]
    ),
    allowed("a salt of many answers", COMPLETIONS, prompt=["a"] * 16, n=128, cache_salt="s" * 1_024),
    allowed("allowed tokens of many answers", COMPLETIONS, prompt=["a"] * 16, n=128, allowed_token_ids=ALLOWED, seed=5),
    allowed("an expression of many answers", COMPLETIONS, prompt="a", n=128, guided_regex="(" + "a" * 8_000 + ")?b"),
    allowed("messages", CHAT, messages=user("a") * 2_000),
    allowed("parts", CHAT, messages=[{"role": "user", "content": [{"type": "text", "text": "a"}] * 2_000}]),
    allowed("a long chat", CHAT, messages=user(TEXT)),
    allowed(
        "calls in the history",
        CHAT,
        messages=[
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}] * 2_000,
            },
            *user("a"),
        ],
    ),
    allowed(
        "arguments of many lists",
        CHAT,
        messages=[
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": LISTS}}] * 15,
            },
            *user("a"),
        ],
    ),
    allowed(
        "a schema",
        CHAT,
        messages=user("a"),
        response_format={"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}},
    ),
    allowed("tools", CHAT, messages=user("a"), tools=TOOLS, tool_choice="none"),
    allowed("variables", CHAT, messages=user("a"), chat_template_kwargs={"x": ["a"] * 3_000}),
    allowed("a long response", RESPONSES, input=TEXT),
    allowed("items of a response", RESPONSES, input=user("a") * 2_000),
    allowed("text to tokenize", "/tokenize", prompt=TEXT * 4, return_token_strs=True),
    allowed("tokens to detokenize", "/detokenize", tokens=IDS * 4),
]
