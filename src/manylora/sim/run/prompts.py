"""Synthetic prompts: equal exactly where the workload shares prefixes.

Only the prefix cache reads them. It hashes blocks in a chain, so a block that differs in its first tokens changes all
that follow. So a prompt is filler, which costs one copy, behind a few tokens that identify the block or request::

    | name of block 7 | filler ........ | name of block 9 | filler ........ | own name | filler ....... |
      prefix_block_tokens                 prefix_block_tokens                 the rest
"""

from __future__ import annotations

from manylora.workloads import RequestSpec

__all__ = ["PromptMaker"]

FILLER = 0
SHARED, OWN = 1, 2
"""First token of a name: blocks and requests never share a name."""


class PromptMaker:
    """Makes prompts of at most ``max_tokens`` tokens below ``vocab_size``, which is at least 16."""

    def __init__(self, vocab_size: int, max_tokens: int) -> None:
        assert vocab_size >= 16
        self._base = vocab_size
        self._filler = (FILLER,) * max_tokens

    def prompt(self, index: int, request: RequestSpec) -> tuple[int, ...]:
        """Return the prompt of request number ``index``."""
        num_tokens = request.num_prompt_tokens
        if not request.prefix:
            return self._named(OWN, index, num_tokens)
        parts: list[int] = []
        for name in request.prefix:
            parts += self._named(SHARED, name, min(request.prefix_block_tokens, num_tokens - len(parts)))
        return (*parts, *self._named(OWN, index, num_tokens - len(parts)))

    def _named(self, kind: int, number: int, num_tokens: int) -> tuple[int, ...]:
        """Return ``num_tokens`` tokens that begin with a name, which is cut if it is longer.

        A name is its kind and its digits, lowest first: filler of zeros behind it does not change the number.
        """
        name = [kind]
        while number:
            number, digit = divmod(number, self._base)
            name.append(digit)
        return tuple(name[:num_tokens]) + self._filler[: max(0, num_tokens - len(name))]
