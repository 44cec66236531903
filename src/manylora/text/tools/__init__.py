"""Tool calls in a model's text: one incremental parser for each way in which chat templates teach models to write them.

Every parser reads character by character, so the cuts between pieces of text cannot change the calls that it finds.
"""

from __future__ import annotations

from collections.abc import Mapping

from manylora.text.tools.events import Event, EventKind
from manylora.text.tools.forced import NamedCall, RequiredCalls
from manylora.text.tools.hermes import HermesParser
from manylora.text.tools.llama3_json import Llama3JsonParser
from manylora.text.tools.mistral import MistralParser
from manylora.text.tools.parser import ToolParser, ToolSchemas
from manylora.text.tools.pythonic import PythonicParser
from manylora.text.tools.qwen import QwenParser

__all__ = ["TOOL_PARSERS", "Event", "EventKind", "NamedCall", "RequiredCalls", "ToolParser", "ToolSchemas"]

TOOL_PARSERS: Mapping[str, type[ToolParser]] = {
    "hermes": HermesParser,
    "llama3_json": Llama3JsonParser,
    "mistral": MistralParser,
    "qwen": QwenParser,
    "qwen3_coder": QwenParser,
    "pythonic": PythonicParser,
}
"""The parsers, by the names that vLLM gives them; ``qwen`` reads both of Qwen's formats."""
