"""A tokenizer as ``llguidance`` has it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

__all__ = ["GrammarTokenizer"]

LITERAL_TOKENS = {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]}
"""A decoder that llguidance reads, for tokenizers whose tokens are the text itself."""


class GrammarTokenizer(NamedTuple):
    """A tokenizer whose tokens forms are made of.

    Args:
        tokens: An ``LLTokenizer``.
        special: The texts of its special tokens.
    """

    tokens: Any
    special: frozenset[str]

    @classmethod
    def of(cls, hf: Any, *, vocab_size: int = 0, eos: Sequence[int] = ()) -> GrammarTokenizer:
        """Return the tokenizer of one of Hugging Face's; takes about a second for 128,000 tokens.

        Args:
            hf: A ``PreTrainedTokenizerFast``.
            vocab_size: Rows of the model's head; there may be more than tokens.
            eos: Tokens that end an answer; by default the tokenizer's own.
        """
        from llguidance import LLTokenizer

        description = json.loads(hf.backend_tokenizer.to_str())
        description["truncation"] = description["padding"] = None
        if description["decoder"] is None or description["decoder"]["type"] == "Fuse":
            description["decoder"] = LITERAL_TOKENS
        special = frozenset(token["content"] for token in description["added_tokens"] if token["special"])
        size = max(vocab_size, len(hf))
        return cls(LLTokenizer(json.dumps(description), n_vocab=size, eos_token=list(eos) or hf.eos_token_id), special)
