"""Loads of one tenant push out no adapter of another that has fewer, while it has an idle one itself."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manylora.core.memory import Depth, PageCache, ReloadCosts, make_eviction_policy
from manylora.core.memory.allocator import KEEP_S
from manylora.core.types import AdapterKey

NUM_PAGES = 24


class Pool:
    """A page cache, and who owns which idle adapter by this test's own count."""

    def __init__(self, eviction: str) -> None:
        self.now = 0.0
        self.dropped: list[AdapterKey] = []
        self.owned: dict[AdapterKey, tuple[str, int, float]] = {}  # tenant, pages, idle since
        self.cache = PageCache(
            NUM_PAGES,
            4,
            policy=make_eviction_policy(eviction, ReloadCosts()),
            on_adapter_dropped=lambda key, now: self.dropped.append(key),
            on_prefix_dropped=lambda num, now: None,
        )

    def pages_of(self, tenant: str) -> int:
        return sum(num for its, num, _ in self.owned.values() if its == tenant)

    def load(self, tenant: str, name: int, num_pages: int) -> list[AdapterKey]:
        """Load an adapter of a tenant, which is idle from then on; return the adapters that were dropped for it."""
        key = AdapterKey(f"{tenant}/{name}")
        self.cache.adapter_used(key, self.now)
        if key not in self.owned:
            self.dropped.clear()
            assert self.cache.claim_adapter(key, num_pages, self.now, Depth.IDLE, tenant=tenant) is not None
        else:
            num_pages = self.owned[key][1]
            self.cache.set_adapter_depth(key, None, self.now, copy_bytes=1)
            self.dropped.clear()
        self.cache.set_adapter_depth(key, Depth.IDLE, self.now, copy_bytes=100)
        return list(self.dropped)


@given(
    eviction=st.sampled_from(["lru", "price"]),
    steps=st.lists(
        st.tuples(
            st.sampled_from("aaaabc"), st.integers(0, 20), st.integers(1, 4), st.sampled_from([0.1, 5.0, KEEP_S])
        ),
        max_size=80,
    ),
)
def test_a_load_takes_from_a_tenant_with_fewer_pages_only_what_its_own_cannot_give(eviction, steps):
    pool = Pool(eviction)
    for tenant, name, num_pages, gap in steps:
        pool.now += gap
        before, had = dict(pool.owned), pool.pages_of(tenant)
        key = AdapterKey(f"{tenant}/{name}")
        others = {one: its for one, its in before.items() if its[0] != tenant}
        dropped = pool.load(tenant, name, num_pages)
        for one in dropped:
            if one in others and pool.now - others[one][2] <= KEEP_S:
                its_own = {mine for mine, its in before.items() if its[0] == tenant}
                had_fewer = had + num_pages <= pool.pages_of(others[one][0])
                assert had_fewer or its_own <= set(dropped[: dropped.index(one)])
            del pool.owned[one]
            had = pool.pages_of(tenant)
        pool.owned[key] = (tenant, before[key][1] if key in before else num_pages, pool.now)
        pool.cache.check_integrity()


@pytest.mark.parametrize("is_known", [True, False])
def test_a_tenant_that_goes_through_a_thousand_adapters_leaves_the_only_one_of_another(is_known):
    pool = Pool("lru")
    pool.load("light", 0, 3)
    lost = False
    for number in range(1000):
        pool.now += 0.1
        lost |= AdapterKey("light/0") in pool.load("flood" if is_known else "light", 1 + number, 3)
    assert lost is not is_known
