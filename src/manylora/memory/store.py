"""The one store of pages: KV of running sequences, idle prefix blocks and adapters, taken from one pool.

Nothing here has a size of its own. Idle prefix blocks and idle adapters fill whatever running sequences
leave free, and a claim drops exactly as many of them as it needs, in the order of the eviction policy.

A thing with pages is in one of these classes; a claim may reach down to a depth that its claimant is owed:

::

    free                     anybody
    idle     prefix blocks and adapters nobody asks for            anybody           Depth.IDLE
    wanted   adapters that waiting requests ask for                running sequences and the first in line,
                                                                   when nothing idle is left    Depth.WANTED
    held     KV of running sequences, adapters in use, on their way, or pinned       nobody

Source: Chameleon, section 4.2 (cache in idle memory; adapters of queued requests are spared while anything
else can go).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum

from manylora.memory.eviction import EvictionPolicy, IdleItem
from manylora.memory.pool import Owner, PagePool
from manylora.memory.prefix import PrefixIndex
from manylora.types import AdapterKey

__all__ = ["Depth", "PageStore"]


class Depth(Enum):
    """How far down a claim may reach."""

    IDLE = 1
    WANTED = 2


class PageStore:
    """Claims pages, remembers idle ones, drops them when others need the room.

    Args:
        num_pages: Pages in the pool.
        page_bytes: Bytes in a page.
        idle: Ranks what nobody asks for.
        wanted: Ranks adapters that waiting requests ask for.
        on_adapter_dropped: Told, with the time, of each adapter dropped for room; its pages are free by then.
        on_prefix_dropped: Told, with the time, how many prefix pages were dropped for room.
    """

    def __init__(
        self,
        num_pages: int,
        page_bytes: int,
        *,
        idle: EvictionPolicy,
        wanted: EvictionPolicy,
        on_adapter_dropped: Callable[[AdapterKey, float], None],
        on_prefix_dropped: Callable[[int, float], None],
    ) -> None:
        self.pool = PagePool(num_pages)
        self.prefix = PrefixIndex()
        self._page_bytes = page_bytes
        self._policies = {Depth.IDLE: idle, Depth.WANTED: wanted}
        self._on_adapter_dropped = on_adapter_dropped
        self._on_prefix_dropped = on_prefix_dropped
        self._refs: dict[int, int] = {}  # KV page -> sequences that use it
        self._adapter_pages: dict[AdapterKey, tuple[int, ...]] = {}
        self._adapter_depth: dict[AdapterKey, Depth] = {}  # absent: held
        self._droppable = {Depth.IDLE: 0, Depth.WANTED: 0}  # pages per class

    # -- claims ------------------------------------------------------------------------------------------------------

    def num_claimable(self, depth: Depth, spare: AdapterKey | None = None) -> int:
        """Return how many pages a claim of that depth could get, ``spare`` left alone."""
        num_pages = self.pool.num_free + self._droppable[Depth.IDLE]
        if depth is Depth.WANTED:
            num_pages += self._droppable[Depth.WANTED]
        if spare is not None:
            spared = self._adapter_depth.get(spare)
            if spared is Depth.IDLE or (spared is Depth.WANTED and depth is Depth.WANTED):
                num_pages -= len(self._adapter_pages[spare])
        return num_pages

    def claim(
        self, num_pages: int, owner: Owner, now: float, depth: Depth, *, spare: AdapterKey | None = None
    ) -> list[int] | None:
        """Take pages, dropping idle (then wanted) things as needed; all, or ``None`` and nothing is dropped."""
        if num_pages > self.num_claimable(depth, spare):
            return None
        num_prefix_dropped = 0
        for level in (Depth.IDLE, Depth.WANTED):
            while self.pool.num_free < num_pages:
                victim = self._policies[level].victim(now, spare)
                if victim is None:
                    break
                if isinstance(victim.key, int):
                    self._drop_prefix_block(victim.key)
                    num_prefix_dropped += 1
                else:
                    self.release_adapter(victim.key)
                    self._on_adapter_dropped(victim.key, now)
        if num_prefix_dropped:
            self._on_prefix_dropped(num_prefix_dropped, now)
        pages = self.pool.allocate(num_pages, owner)
        assert pages is not None, "claimable pages were miscounted"
        return pages

    # -- KV ----------------------------------------------------------------------------------------------------------

    def claim_kv(
        self, num_pages: int, now: float, depth: Depth, *, spare: AdapterKey | None = None
    ) -> list[int] | None:
        """Take pages for a sequence's KV, with one reference each."""
        pages = self.claim(num_pages, Owner.KV, now, depth, spare=spare)
        for page in pages or ():
            self._refs[page] = 1
        return pages

    def share_kv(self, pages: Iterable[int]) -> None:
        """Add a reference to pages found in the prefix index, idle or in use."""
        for page in pages:
            if page in self._refs:
                self._refs[page] += 1
            else:
                self._policies[Depth.IDLE].remove(page)
                self._droppable[Depth.IDLE] -= 1
                self.pool.transfer(page, Owner.KV)
                self._refs[page] = 1

    def release_kv(self, pages: list[int], now: float) -> None:
        """Drop one reference to each page; indexed ones go idle, the others free.

        Last page first: of one sequence's blocks the deepest, useless without those before it, is the oldest.
        """
        for page in reversed(pages):
            self._refs[page] -= 1
            if self._refs[page]:
                continue
            del self._refs[page]
            if page in self.prefix:
                self.pool.transfer(page, Owner.PREFIX)
                self._policies[Depth.IDLE].add(IdleItem(page, 1, self._page_bytes), now)
                self._droppable[Depth.IDLE] += 1
            else:
                self.pool.free((page,))

    def _drop_prefix_block(self, page: int) -> None:
        self._policies[Depth.IDLE].remove(page)
        self._droppable[Depth.IDLE] -= 1
        self.prefix.remove(page)
        self.pool.free((page,))

    # -- adapters ----------------------------------------------------------------------------------------------------

    def claim_adapter(
        self, key: AdapterKey, num_pages: int, now: float, depth: Depth, *, spare: AdapterKey | None = None
    ) -> tuple[int, ...] | None:
        """Take pages for an adapter, which is held from here on."""
        assert key not in self._adapter_pages
        pages = self.claim(num_pages, Owner.ADAPTER, now, depth, spare=spare)
        if pages is None:
            return None
        self._adapter_pages[key] = tuple(pages)
        return self._adapter_pages[key]

    def adapter_pages(self, key: AdapterKey) -> tuple[int, ...]:
        """Return the pages of an adapter that has some."""
        return self._adapter_pages[key]

    def set_adapter_depth(self, key: AdapterKey, depth: Depth | None, now: float) -> None:
        """Say who may claim an adapter's pages: anybody, those owed wanted ones, or (``None``) nobody."""
        old = self._adapter_depth.get(key)
        if old is depth:
            return
        num_pages = len(self._adapter_pages[key])
        if old is not None:
            self._policies[old].remove(key)
            self._droppable[old] -= num_pages
            del self._adapter_depth[key]
        if depth is not None:
            self._policies[depth].add(IdleItem(key, num_pages, num_pages * self._page_bytes), now)
            self._droppable[depth] += num_pages
            self._adapter_depth[key] = depth

    def release_adapter(self, key: AdapterKey) -> None:
        """Free an adapter's pages, whatever its class."""
        self.set_adapter_depth(key, None, 0.0)
        self.pool.free(self._adapter_pages.pop(key))

    def check_integrity(self) -> None:
        """Assert that pool, references, index and classes agree; O(pages), for tests and soak runs."""
        self.pool.check_integrity()
        assert len(self._refs) == self.pool.count(Owner.KV)
        assert all(self.pool.owner(page) is Owner.KV and count > 0 for page, count in self._refs.items())
        idle_blocks = [page for page in self.prefix.pages() if page not in self._refs]
        assert len(idle_blocks) == self.pool.count(Owner.PREFIX)
        assert all(self.pool.owner(page) is Owner.PREFIX for page in idle_blocks)
        adapter_pages = [page for pages in self._adapter_pages.values() for page in pages]
        assert len(adapter_pages) == len(set(adapter_pages)) == self.pool.count(Owner.ADAPTER)
        assert all(self.pool.owner(page) is Owner.ADAPTER for page in adapter_pages)
        by_depth = {Depth.IDLE: len(idle_blocks), Depth.WANTED: 0}
        for key, depth in self._adapter_depth.items():
            by_depth[depth] += len(self._adapter_pages[key])
        assert by_depth == self._droppable, (by_depth, self._droppable)
