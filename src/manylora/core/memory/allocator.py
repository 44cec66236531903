"""The page allocator: a pool of equal pages, each with exactly one owner; and the tenants that adapters' pages are for.

A page is one KV block across all layers, or the same bytes as a flat array of adapter weights. Any free page serves any
need: there is no contiguity, no reservation and no fragmentation.

Source: unified paging of S-LoRA, section 5; here adapters and KV differ only in the owner.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from enum import IntEnum

from manylora.core.memory.eviction.policy import IdleItem, ItemKey
from manylora.core.types import AdapterKey

__all__ = ["Owner", "PageAllocator", "TenantPages"]

KEEP_S = 600.0  # time since its last use for which a tenant's adapter is not displaced by a tenant with more


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


class TenantPages:
    """Counts the adapter pages of each tenant, so that the loads of one do not push out the adapters of all.

    An eviction policy ranks items by what keeping them saves. A tenant that asks for one adapter after the other lets
    each of its loads displace one of others. So a rule stands before the policy's choice of a victim: a load for a
    tenant with more pages of adapters than another drops its own idle adapters, the least recently used first, before
    one that the other used within ``KEEP_S``.

    It concerns loads, and adapters that they would drop. KV and prefixes take pages by the eviction policy's order
    alone, and so does a tenant without an idle adapter: the first in line always gets what it needs. Times are in
    seconds.
    """

    def __init__(self) -> None:
        self._owners: dict[AdapterKey, str] = {}  # of the adapters with pages
        self._pages: Counter[str] = Counter()  # by tenant
        self._idle: dict[str, dict[AdapterKey, None]] = {}  # by tenant, idle for longest first

    def loaded(self, key: AdapterKey, tenant: str, num_pages: int) -> None:
        """Learn that an adapter got pages, for a request of a tenant."""
        self._owners[key] = tenant
        self._pages[tenant] += num_pages

    def dropped(self, key: AdapterKey, num_pages: int) -> None:
        """Learn that an adapter has no pages any more."""
        tenant = self._owners.pop(key)
        self._pages[tenant] -= num_pages
        if not self._pages[tenant]:
            del self._pages[tenant]

    def idle(self, key: AdapterKey) -> None:
        """Learn that no request needs an adapter."""
        self._idle.setdefault(self._owners[key], {})[key] = None

    def in_use(self, key: AdapterKey) -> None:
        """Learn that an adapter is not idle, or was dropped."""
        tenant = self._owners[key]
        if (its := self._idle.get(tenant)) is not None and its.pop(key, self) is None and not its:
            del self._idle[tenant]

    def victim(
        self,
        chosen: IdleItem,
        tenant: str,
        num_pages: int,
        now: float,
        items: Mapping[ItemKey, tuple[IdleItem, object]],
    ) -> IdleItem:
        """Return the item to drop for a load: the eviction policy's choice, or an idle adapter of the tenant itself.

        ``items`` are all that may be dropped, by key.
        """
        if isinstance(chosen.key, int):
            return chosen
        owner = self._owners[chosen.key]
        if owner == tenant or now - chosen.idle_since > KEEP_S:
            return chosen
        if self._pages[tenant] + num_pages <= self._pages[owner]:
            return chosen
        own = next(iter(self._idle.get(tenant, ())), None)
        return chosen if own is None else items[own][0]

    def check_integrity(self, num_pages: Mapping[AdapterKey, int], idle: frozenset[AdapterKey]) -> None:
        """Assert that owners, pages and idle adapters are those of the page cache; slow, for tests."""
        pages: Counter[str] = Counter()
        for key, num in num_pages.items():
            pages[self._owners[key]] += num
        assert pages == self._pages and len(self._owners) == len(num_pages)
        assert idle == {key for its in self._idle.values() for key in its}
