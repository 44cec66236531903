"""Words that an answer must not have, as runs of tokens."""

from __future__ import annotations

from collections.abc import Sequence

from manylora.serving.text.tokenizer import Tokenizer

__all__ = ["bad_words_token_ids"]


def bad_words_token_ids(tokenizer: Tokenizer, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Return the tokens of words, for ``SamplingParams.bad_words_token_ids``: at the begin of a text, and inside it.

    As in vLLM, a word inside a text is a run of its own only if its space makes another first token, not one more.
    A word that the tokenizer splits in another way within a longer one is not found.
    """
    runs: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = tokenizer.encode(word.lstrip(), add_special_tokens=False)
        spaced = tokenizer.encode(" " + word.lstrip(), add_special_tokens=False)
        if bare:
            runs[tuple(bare)] = None
        if bare and len(spaced) == len(bare) and spaced[0] != bare[0]:
            runs[tuple(spaced)] = None
    return tuple(runs)
