"""Prompts for servers that really read them: random, of the right length, equal where a workload says they are.

As token ids, which arrive exactly as long as they were meant, or as text, for chats and for servers that take nothing
else. Text is random tokens decoded by the model's own tokenizer (reading it back may give a few tokens more or less),
or without a tokenizer random short words, about a token each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from manylora.lab.workloads import RequestSpec

__all__ = ["LEAST_TOKEN", "TextPrompts", "TokenPrompts"]

LEAST_TOKEN = 10
"""Ids below are left out: many vocabularies begin with tokens that mean something to the server."""

WORDS = ("the", "of", "and", "to", "in", "is", "that", "it", "was", "for", "on", "are", "as", "with", "his", "they")

SHARED, OWN = 0, 1


class TokenPrompts:
    """Prompts as token ids.

    Args:
        vocab_size: Ids are below this.
        seed: Of every draw; two runs with one seed ask the same.
    """

    def __init__(self, vocab_size: int, seed: int) -> None:
        self._vocab_size = vocab_size
        self._seed = seed
        self._blocks: dict[tuple[int, int], list[int]] = {}

    def make(self, index: int, request: RequestSpec) -> list[int]:
        """Return the prompt of request number ``index``; blocks of one name are the same in every prompt."""
        left = request.num_prompt_tokens
        tokens: list[int] = []
        for name in request.prefix:
            size = min(request.prefix_block_tokens, left - len(tokens))
            tokens += self._shared(name, request.prefix_block_tokens)[:size]
        return tokens + self._draw(OWN, index, left - len(tokens))

    def _shared(self, name: int, size: int) -> list[int]:
        block = self._blocks.get((name, size))
        if block is None:
            block = self._blocks[name, size] = self._draw(SHARED, name, size)
        return block

    def _draw(self, kind: int, number: int, count: int) -> list[int]:
        rng = np.random.default_rng([self._seed, kind, number])
        drawn: list[int] = rng.integers(LEAST_TOKEN, self._vocab_size, count).tolist()
        return drawn


class TextPrompts:
    """Prompts as text.

    Args:
        tokens: The prompts as token ids.
        decode: Turns token ids into text; without it each id is a word.
    """

    def __init__(self, tokens: TokenPrompts, decode: Callable[[Sequence[int]], str] | None = None) -> None:
        self._tokens = tokens
        self._decode = decode or (lambda ids: " ".join(WORDS[token % len(WORDS)] for token in ids))

    def make(self, index: int, request: RequestSpec) -> str:
        """Return the prompt of request number ``index``."""
        return self._decode(self._tokens.make(index, request))
