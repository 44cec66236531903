"""Text and tokens: tokenizer, chat template, incremental detokenisation, stop strings, reasoning and tool calls.

The engine knows only token ids; the server and the offline API use this package.
"""

from manylora.serving.text.detokenizer import (
    Detokenizer,
    StopMatch,
    StopStrings,
    TextDelta,
    TokenLogprob,
    describe_prompt,
)
from manylora.serving.text.message_reader import MessageReader, ReasoningSplitter
from manylora.serving.text.tokenizer import Tokenizer

__all__ = [
    "Detokenizer",
    "MessageReader",
    "ReasoningSplitter",
    "StopMatch",
    "StopStrings",
    "TextDelta",
    "TokenLogprob",
    "Tokenizer",
    "describe_prompt",
]
