"""Tool calls in a model's text: one incremental parser for each way in which chat templates teach models to write them.

Every parser reads character by character, so the cuts between pieces of text cannot change the calls that it finds.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

from manylora.serving.text.tools.json_formats import HermesParser, Llama3JsonParser, MistralParser, QwenParser
from manylora.serving.text.tools.parser import EventKind, ToolEvent, ToolParser
from manylora.serving.text.tools.pythonic import PythonicParser

__all__ = ["TOOL_PARSERS", "EventKind", "ToolEvent", "ToolParser", "parser_of_template"]

TOOL_PARSERS: Mapping[str, type[ToolParser]] = {
    "hermes": HermesParser,
    "llama3_json": Llama3JsonParser,
    "mistral": MistralParser,
    "qwen": QwenParser,
    "qwen3_coder": QwenParser,
    "pythonic": PythonicParser,
}
"""The parsers, by the names that vLLM gives them; ``qwen`` reads both of Qwen's formats."""

_MARKS: Mapping[str, type[ToolParser]] = {
    "[TOOL_CALLS]": MistralParser,
    "<tool_call>": QwenParser,
    "[func_name1(params_name1=": PythonicParser,
    "<|python_tag|>": Llama3JsonParser,
}
"""Texts by which a template teaches or repeats calls, the most specific first."""


@functools.lru_cache(maxsize=32)
def parser_of_template(template: str) -> type[ToolParser] | None:
    """Return the parser of the calls that a chat template teaches a model to write; ``None`` if it shows no format."""
    return next((parser for mark, parser in _MARKS.items() if mark in template), None)
