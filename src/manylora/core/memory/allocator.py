"""The page allocator: a pool of equal pages, each with exactly one owner.

A page is one KV block across all layers, or the same bytes as a flat array of adapter weights. Any free page serves any
need: there is no contiguity, no reservation and no fragmentation.

Source: unified paging of S-LoRA, section 5; here adapters and KV differ only in the owner.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from enum import IntEnum

__all__ = ["Owner", "PageAllocator"]


class Owner(IntEnum):
    """The holder of a page."""

    FREE = 0
    KV = 1
    PREFIX = 2
    ADAPTER = 3


_FREE = Owner.FREE  # read for every page: looking it up in the enumeration would take most of the time


class PageAllocator:
    """Allocates page numbers and records their owners.

    Invariant: free + KV + prefix + adapter == total (``check_integrity``).
    """

    def __init__(self, num_pages: int) -> None:
        assert num_pages > 0
        self.num_pages = num_pages
        self._owner = bytearray(num_pages)
        # A stack: the page freed last is the most likely to be in a CPU cache.
        self._free = list(range(num_pages - 1, -1, -1))
        self._counts = [num_pages, 0, 0, 0]

    @property
    def num_free(self) -> int:
        """Pages without an owner."""
        return len(self._free)

    def count(self, owner: Owner) -> int:
        """Return the number of pages that ``owner`` holds."""
        return self._counts[owner]

    def owner(self, page: int) -> Owner:
        """Return the owner of ``page``."""
        return Owner(self._owner[page])

    def allocate(self, num_pages: int, owner: Owner) -> list[int] | None:
        """Allocate ``num_pages`` free pages to ``owner``; all of them, or ``None`` and nothing changes."""
        assert owner is not _FREE
        if num_pages > len(self._free):
            return None
        if num_pages == 0:
            return []
        pages = self._free[-num_pages:]
        del self._free[-num_pages:]
        pages.reverse()
        for page in pages:
            self._owner[page] = owner
        self._counts[_FREE] -= num_pages
        self._counts[owner] += num_pages
        return pages

    def free(self, pages: Iterable[int]) -> None:
        """Return pages to the pool."""
        counts = self._counts
        for page in pages:
            owner = self._owner[page]
            assert owner != _FREE, f"page {page} freed twice"
            self._owner[page] = _FREE
            counts[owner] -= 1
            counts[_FREE] += 1
            self._free.append(page)

    def transfer(self, page: int, owner: Owner) -> None:
        """Change the owner of an owned page; its contents stay."""
        old = self._owner[page]
        assert old != _FREE and owner is not _FREE, f"page {page} is free"
        self._owner[page] = owner
        self._counts[old] -= 1
        self._counts[owner] += 1

    def check_integrity(self) -> None:
        """Assert the invariant by recounting; O(pages), for tests and soak runs."""
        counted = Counter(self._owner)
        assert all(counted[owner] == self._counts[owner] for owner in Owner), (counted, self._counts)
        assert sum(self._counts) == self.num_pages
        assert len(self._free) == len(set(self._free)) == self._counts[_FREE]
        assert all(self._owner[page] == _FREE for page in self._free)
