"""Block tables: the pages of one sequence's positions.

::

    tokens   0 .. 15 | 16 .. 31 | 32 .. 40
    pages      p7    |    p2    |    p9          position i lies in pages[i // block_size]
    digests    d0    |    d1    |                full blocks only; d0, d1 are in the prefix index once computed
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from manylora.core.memory.prefix import PrefixIndex, block_digests

__all__ = ["BlockTable", "num_blocks"]


def num_blocks(num_tokens: int, block_size: int) -> int:
    """Return the number of pages for ``num_tokens`` positions."""
    return -(-num_tokens // block_size)


class BlockTable:
    """Pages of ``block_size`` tokens and block digests of one sequence, chained from ``root`` (``prefix_root``)."""

    __slots__ = ("_digests", "_num_indexed", "_root", "block_size", "pages")

    def __init__(self, root: bytes, block_size: int) -> None:
        self.pages: list[int] = []
        self._root = root
        self.block_size = block_size
        self._digests: list[bytes] = []
        self._num_indexed = 0

    def match(self, tokens: Seq[int], index: PrefixIndex, most: int | None = None) -> list[int]:
        """Return pages that hold the longest computed prefix of ``tokens``, at most ``most`` tokens of it.

        By default all but the last token, which is always run: the next token is drawn from its logits.
        """
        self._extend_digests(tokens, len(tokens))
        return index.match(self._digests, (len(tokens) - 1 if most is None else most) // self.block_size)

    def adopt(self, pages: Seq[int]) -> None:
        """Start from shared pages."""
        assert not self.pages
        self.pages.extend(pages)
        self._num_indexed = len(pages)

    def grow(self, pages: Seq[int]) -> None:
        """Add pages for further positions."""
        self.pages.extend(pages)

    def index_computed(self, tokens: Seq[int], num_computed: int, index: PrefixIndex) -> None:
        """Put every full block below ``num_computed`` into the index."""
        num_full = num_computed // self.block_size
        if num_full <= self._num_indexed:
            return
        self._extend_digests(tokens, num_computed)
        for block in range(self._num_indexed, num_full):
            parent = self._digests[block - 1] if block else self._root
            index.insert(self._digests[block], self.pages[block], parent)
        self._num_indexed = num_full

    def clear(self) -> list[int]:
        """Remove and return the pages; digests stay, because the tokens stay.

        The list is not changed, because a step in flight may still read it: the table starts another.
        """
        pages, self.pages = self.pages, []
        self._num_indexed = 0
        return pages

    def _extend_digests(self, tokens: Seq[int], stop: int) -> None:
        start = len(self._digests) * self.block_size
        parent = self._digests[-1] if self._digests else self._root
        self._digests += block_digests(parent, tokens, start, stop, self.block_size)
