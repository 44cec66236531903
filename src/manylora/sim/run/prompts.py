"""Prompts without text: tokens that are equal exactly where the workload says that prompts are.

Only the prefix cache reads them: it hashes blocks in a chain, and a block that differs in its first tokens
differs, and so does everything behind it. So a prompt is filler that costs a copy, behind a few tokens that say whose
it is::

    | name of block 7 | filler ........ | name of block 9 | filler ........ | own name | filler ....... |
      prefix_block_tokens                 prefix_block_tokens                 the rest
"""

from __future__ import annotations

from manylora.workloads import RequestSpec

__all__ = ["PromptMaker"]

FILLER = 0
SHARED, OWN = 1, 2
"""What a name begins with: that of a block never equals that of a request."""


class PromptMaker:
    """Makes prompts.

    Args:
        vocab_size: Tokens are below this; at least 16.
        max_tokens: Longest prompt.
    """

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
        """Return ``num_tokens`` tokens that begin with a name, cut off where they are fewer than it has.

        A name is its kind and its digits, lowest first: filler of zeros behind it leaves the number as it is.
        """
        name = [kind]
        while number:
            number, digit = divmod(number, self._base)
            name.append(digit)
        return tuple(name[:num_tokens]) + self._filler[: max(0, num_tokens - len(name))]
