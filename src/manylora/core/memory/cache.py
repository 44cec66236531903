"""The page cache: KV of running sequences, idle prefix blocks and adapters in one pool.

No kind has a size of its own. Idle prefix blocks and idle adapters fill the pages that running sequences leave free. A
claim drops exactly as many of them as it needs, in the order of the eviction policy.

An item with pages is in one of these classes; a claim may drop classes down to the claimant's depth:

::

    class    items                                                  claimed by                               depth
    free     none                                                   all
    idle     prefix blocks and adapters without requests            all                                      IDLE
    wanted   adapters that waiting requests need                    running sequences, the first in line,    WANTED
                                                                    when no idle item is left
    held     KV of running sequences; adapters in use, loading,     none
             or pinned

Source: Chameleon, section 4.2 (cache in idle memory; adapters of queued requests are spared as long as others can be
dropped).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container
from collections.abc import Sequence as Seq
from math import isfinite

from manylora.core.memory.allocator import Owner, PageAllocator, TenantPages
from manylora.core.memory.blocks import PrefixIndex
from manylora.core.memory.eviction import Depth, EvictionPolicy, IdleItem
from manylora.core.memory.eviction.policy import ItemKey
from manylora.core.types import AdapterKey

__all__ = ["PageCache"]


class PageCache:
    """Claims pages, keeps idle pages, and drops them for other claims.

    The policy ranks the items that may be dropped. The two functions are called with each adapter, or the number of
    prefix pages, that was dropped for a claim, and the time.
    """

    def __init__(
        self,
        num_pages: int,
        block_size: int,
        *,
        policy: EvictionPolicy,
        on_adapter_dropped: Callable[[AdapterKey, float], None],
        on_prefix_dropped: Callable[[int, float], None],
    ) -> None:
        self.allocator = PageAllocator(num_pages)
        self.prefix = PrefixIndex()
        self._block_size = block_size
        self._policy = policy
        self.price = policy.price  # worth of keeping an item, in a page or elsewhere
        self._on_adapter_dropped = on_adapter_dropped
        self._on_prefix_dropped = on_prefix_dropped
        self._refs: dict[int, int] = {}  # KV page -> sequences that use it
        self._adapter_pages: dict[AdapterKey, tuple[int, ...]] = {}
        self._tenants = TenantPages()
        self._droppable: dict[ItemKey, tuple[IdleItem, Depth]] = {}  # other adapters are held
        self._num_droppable = {Depth.IDLE: 0, Depth.WANTED: 0}  # pages per class
        self._chain: list[int] = []  # idle blocks, from the policy's last victim to the last block that follows it

    @property
    def keeps_idle_adapters(self) -> bool:
        """Whether adapters stay on the device when no sequence uses or waits for them."""
        return self._policy.keeps_idle_adapters

    # -- claims ------------------------------------------------------------------------------------------------------

    def num_claimable(self, depth: Depth, spare: AdapterKey | None = None) -> int:
        """Return the number of pages that a claim of that depth can get without dropping ``spare``."""
        num_pages = self.allocator.num_free + self._num_droppable[Depth.IDLE]
        if depth is Depth.WANTED:
            num_pages += self._num_droppable[Depth.WANTED]
        if spare is not None and spare in self._droppable:
            item, spared = self._droppable[spare]
            if spared is Depth.IDLE or depth is Depth.WANTED:
                num_pages -= item.num_pages
        return num_pages

    def claim(
        self,
        num_pages: int,
        owner: Owner,
        now: float,
        depth: Depth,
        *,
        spare: AdapterKey | None = None,
        tenant: str | None = None,
    ) -> list[int] | None:
        """Allocate pages, dropping idle (then wanted) items as needed; all, or ``None`` and nothing is dropped.

        With a ``tenant`` they are for an adapter of its own.
        """
        is_short = num_pages > self.allocator.num_free  # mostly not: pages are claimed one by one
        if is_short and num_pages > self.num_claimable(depth, spare):
            return None
        num_blocks_dropped = 0
        for level in (Depth.IDLE, Depth.WANTED) if is_short else ():
            while self.allocator.num_free < num_pages:
                victim = self._victim(level, now, spare)
                if victim is None:
                    break
                if tenant is not None and level is Depth.IDLE:
                    victim = self._tenants.victim(victim, tenant, num_pages, now, self._droppable)
                num_blocks_dropped += isinstance(victim.key, int)
                self._evict(victim, now)
        if num_blocks_dropped:
            self._on_prefix_dropped(num_blocks_dropped, now)
        pages = self.allocator.allocate(num_pages, owner)
        assert pages is not None, "claimable pages were miscounted"
        return pages

    def can_displace(self, num_pages: int, price: float, now: float) -> bool:
        """Return whether free pages and idle items cheaper than ``price`` yield that many pages.

        ``price`` is the eviction policy's for the new item: seconds saved per second and page.
        """
        missing = num_pages - self.allocator.num_free
        taken: dict[ItemKey, IdleItem] = {}
        while missing > 0:
            victim = self._victim(Depth.IDLE, now, None, taken)
            if victim is None or self._policy.price(victim, now) >= price:
                break
            self._policy.remove(victim.key)
            self._left_chain(victim.key)
            taken[victim.key] = victim
            missing -= victim.num_pages
        for item in taken.values():
            self._policy.add(item, Depth.IDLE)
        self._chain.clear()
        return missing <= 0

    def _victim(
        self, depth: Depth, now: float, spare: AdapterKey | None, taken: Container[ItemKey] = ()
    ) -> IdleItem | None:
        """Return the policy's victim; of a chain of prefix blocks, the last one.

        A policy ranks blocks one by one. The blocks of a chain are used together, the first at least as often as the
        last. If the policy names a block inside a chain, the blocks behind it, unreachable without it, are dropped
        first. The policy then names the same block each time, so the path to the last block is kept.
        """
        victim = self._policy.victim(depth, now, spare)
        if victim is None or isinstance(victim.key, str):
            return victim
        chain = self._chain
        if not chain or chain[0] != victim.key:
            chain[:] = [victim.key]
        self.prefix.follow(chain, lambda page: page in self._droppable and page not in taken)
        return victim if len(chain) == 1 else self._droppable[chain[-1]][0]

    def _left_chain(self, key: ItemKey) -> None:
        if self._chain and self._chain[-1] == key:
            self._chain.pop()

    def _evict(self, item: IdleItem, now: float) -> None:
        self._policy.evict(item.key, now)
        _, depth = self._droppable.pop(item.key)
        self._num_droppable[depth] -= item.num_pages
        if isinstance(item.key, int):
            self._left_chain(item.key)
            self.prefix.remove(item.key)
            self.allocator.free((item.key,))
        else:
            self._free_adapter(item.key)
            self._on_adapter_dropped(item.key, now)

    def _set_droppable(self, item: IdleItem, depth: Depth) -> None:
        self._droppable[item.key] = (item, depth)
        self._num_droppable[depth] += item.num_pages
        self._policy.add(item, depth)
        if isinstance(item.key, int):
            self._chain.clear()  # the block may follow one in the chain
        elif depth is Depth.IDLE:
            self._tenants.idle(item.key)

    def _set_held(self, key: ItemKey) -> None:
        item, depth = self._droppable.pop(key)
        self._num_droppable[depth] -= item.num_pages
        self._policy.remove(key)
        if isinstance(key, int):
            self._chain.clear()
        else:
            self._tenants.in_use(key)

    # -- KV ----------------------------------------------------------------------------------------------------------

    def claim_kv(
        self, num_pages: int, now: float, depth: Depth, *, spare: AdapterKey | None = None, shared: Seq[int] = ()
    ) -> list[int] | None:
        """Allocate new pages for a sequence's KV and reference them and ``shared``; all, or ``None``.

        ``shared`` are pages found in the prefix index, idle or in use. ``spare`` is an adapter that is not dropped.
        """
        num_idle = sum([page in self._droppable for page in shared])
        if shared and num_pages > self.num_claimable(depth, spare) - num_idle:
            return None
        for page in shared:
            self._policy.used(page, now)
            if page in self._refs:
                self._refs[page] += 1
            else:
                self._set_held(page)
                self.allocator.transfer(page, Owner.KV)
                self._refs[page] = 1
        pages = self.claim(num_pages, Owner.KV, now, depth, spare=spare)
        assert pages is not None or not shared, "claimable pages were miscounted"
        for page in pages or ():
            self._refs[page] = 1
        return pages

    def release_kv(self, pages: list[int], now: float) -> None:
        """Drop one reference to each page; unreferenced pages become idle if indexed, else free.

        Last page first: a sequence's last block, which depends on those before it, is then the oldest idle one.
        """
        for page in reversed(pages):
            self._refs[page] -= 1
            if self._refs[page]:
                continue
            del self._refs[page]
            if page in self.prefix:
                self.allocator.transfer(page, Owner.PREFIX)
                item = IdleItem(page, 1, now, 0, 0, self._block_size, self.prefix.adapter_of(page))
                self._set_droppable(item, Depth.IDLE)
            else:
                self.allocator.free((page,))

    # -- adapters ----------------------------------------------------------------------------------------------------

    def claim_adapter(
        self,
        key: AdapterKey,
        num_pages: int,
        now: float,
        depth: Depth,
        *,
        spare: AdapterKey | None = None,
        tenant: str = "",
    ) -> tuple[int, ...] | None:
        """Allocate pages for an adapter of a tenant, which is then held."""
        assert key not in self._adapter_pages
        pages = self.claim(num_pages, Owner.ADAPTER, now, depth, spare=spare, tenant=tenant)
        if pages is None:
            return None
        self._tenants.loaded(key, tenant, num_pages)
        self._adapter_pages[key] = tuple(pages)
        return self._adapter_pages[key]

    def adapters(self) -> Collection[AdapterKey]:
        """Return the adapters that have pages: those on the device, or loading to it."""
        return self._adapter_pages.keys()

    def set_adapter_depth(
        self, key: AdapterKey, depth: Depth | None, now: float, *, copy_bytes: int, read_bytes: int = 0
    ) -> None:
        """Set the depth of claims that may drop an adapter on the device; with ``None`` it is held.

        A reload reads ``read_bytes`` from disk, 0 while the host has a copy, and copies ``copy_bytes``.
        """
        item, old = self._droppable.get(key, (None, None))
        if old is depth and (item is None or item.read_bytes == read_bytes):
            return
        if item is not None:
            self._set_held(key)
        if depth is not None:
            num_pages = len(self._adapter_pages[key])
            # Only the cost of a reload has changed, not the time since which it is idle.
            idle_since = item.idle_since if item is not None and old is depth else now
            self._set_droppable(IdleItem(key, num_pages, idle_since, copy_bytes, read_bytes), depth)

    def adapter_used(self, key: AdapterKey, now: float) -> None:
        """Tell the policy that a request needs an adapter, in any tier."""
        self._policy.used(key, now)

    def adapter_price(self, key: AdapterKey, now: float) -> float | None:
        """Return the worth of keeping an idle adapter, in seconds of reloading saved per second and page.

        ``None`` if it is held or absent, or if the eviction policy has another unit.
        """
        if key not in self._droppable:
            return None
        price = self.price(self._droppable[key][0], now)
        return price if isfinite(price) else None

    def forget_adapter(self, key: AdapterKey, now: float) -> None:
        """Remove an unloaded adapter from the policy, and its blocks from the index: no request can ask for them.

        They would stay until the pool is full, which a name that is published again and again fills with them.
        """
        self._policy.forget(key, now)
        self._chain.clear()
        for page in self.prefix.pages_of(key):
            if page in self._droppable:
                self._evict(self._droppable[page][0], now)
            else:
                self.prefix.remove(page)  # it is free with the last sequence that uses it

    def release_adapter(self, key: AdapterKey) -> None:
        """Free an adapter's pages, in any class."""
        if key in self._droppable:
            self._set_held(key)
        self._free_adapter(key)

    def _free_adapter(self, key: AdapterKey) -> None:
        pages = self._adapter_pages.pop(key)
        self.allocator.free(pages)
        self._tenants.in_use(key)
        self._tenants.dropped(key, len(pages))

    def check_integrity(self) -> None:
        """Assert that pool, references, index and classes agree; O(pages), for tests and soak runs."""
        self.allocator.check_integrity()
        assert len(self._refs) == self.allocator.count(Owner.KV)
        assert all(self.allocator.owner(page) is Owner.KV and count > 0 for page, count in self._refs.items())
        idle_blocks = [page for page in self.prefix.pages() if page not in self._refs]
        assert len(idle_blocks) == self.allocator.count(Owner.PREFIX)
        assert all(self.allocator.owner(page) is Owner.PREFIX and page in self._droppable for page in idle_blocks)
        way = self._chain[:1]
        if way:
            self.prefix.follow(way, self._droppable.__contains__)
        assert self._chain == way[: len(self._chain)], "not the path from its first block"
        adapter_pages = [page for pages in self._adapter_pages.values() for page in pages]
        assert len(adapter_pages) == len(set(adapter_pages)) == self.allocator.count(Owner.ADAPTER)
        assert all(self.allocator.owner(page) is Owner.ADAPTER for page in adapter_pages)
        idle = [key for key, (_, depth) in self._droppable.items() if isinstance(key, str) and depth is Depth.IDLE]
        self._tenants.check_integrity({key: len(pages) for key, pages in self._adapter_pages.items()}, frozenset(idle))
        by_depth = {Depth.IDLE: 0, Depth.WANTED: 0}
        for key, (item, depth) in self._droppable.items():
            by_depth[depth] += item.num_pages
            assert item.num_pages == (len(self._adapter_pages[key]) if isinstance(key, str) else 1)
        assert by_depth == self._num_droppable, (by_depth, self._num_droppable)
