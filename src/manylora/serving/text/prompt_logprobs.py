"""The log-probabilities of a prompt's tokens, with their texts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from manylora.core.types import PromptLogprobs
from manylora.serving.text.detokenizer import TokenLogprob, token_logprob
from manylora.serving.text.tokenizer import Tokenizer

__all__ = ["describe_prompt"]


def describe_prompt(
    tokenizer: Tokenizer, prompt: Sequence[int], logprobs: PromptLogprobs, *, skip_special_tokens: bool = True
) -> Iterator[TokenLogprob]:
    """Yield the tokens of a prompt from its second on; the first has no probability.

    Args:
        tokenizer: The base model's tokenizer.
        prompt: Token ids.
        logprobs: A row for each of the tokens.
        skip_special_tokens: Whether ``text_offset`` counts a text without special tokens.
    """
    pieces = tokenizer.pieces((), skip_special_tokens=skip_special_tokens)
    offset = len(pieces.add(prompt[0]))
    for token in logprobs.rows():
        yield token_logprob(tokenizer, token.token_id, token.logprob, token.top, offset)
        offset += len(pieces.add(token.token_id))
