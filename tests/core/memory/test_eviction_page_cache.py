"""The page store: chains of prefix blocks, claims beside shared pages, and the core's share in eviction."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from harness import make_rig, request, version

from manylora.core.config import AdapterConfig
from manylora.core.events import AdapterLoaded
from manylora.core.memory import (
    EVICTION_POLICIES,
    BlockTable,
    Depth,
    IdleItem,
    PageCache,
    ReloadCosts,
    make_eviction_policy,
)
from manylora.core.memory.blocks import PrefixIndex
from manylora.core.types import AdapterKey

KEY = AdapterKey("a")


def page_cache(num_pages: int, eviction: str = "lru") -> PageCache:
    return PageCache(
        num_pages,
        4,
        policy=make_eviction_policy(eviction, ReloadCosts()),
        on_adapter_dropped=lambda key, now: None,
        on_prefix_dropped=lambda num_pages, now: None,
    )


def run(pages: PageCache, num_tokens: int, now: float, root: bytes = b"r") -> BlockTable:
    """Run a sequence of ``num_tokens`` to its end, and leave it holding its pages."""
    tokens = list(range(num_tokens))
    table = BlockTable(root, 4)
    shared = table.match(tokens, pages.prefix)
    claimed = pages.claim_kv(-(-num_tokens // 4) - len(shared), now, Depth.IDLE, shared=shared)
    assert claimed is not None
    table.adopt(shared)
    table.pages.extend(claimed)
    table.index_computed(tokens, num_tokens, pages.prefix)
    return table


def num_found(pages: PageCache, num_tokens: int, root: bytes = b"r") -> int:
    return len(BlockTable(root, 4).match(list(range(num_tokens)), pages.prefix))


@pytest.mark.parametrize("eviction", sorted(EVICTION_POLICIES))
def test_a_chain_is_dropped_from_its_end(eviction):
    pages = page_cache(8, eviction)
    pages.release_kv(run(pages, 32, 0.0).clear(), 1.0)
    for num_left in range(7, 0, -1):
        pages.claim_kv(1, 2.0, Depth.IDLE)
        assert num_found(pages, 33) == num_left, "whatever is left can still be found"


@pytest.mark.parametrize("eviction", sorted(EVICTION_POLICIES))
def test_a_policy_that_names_the_head_of_a_chain_gets_its_tail(eviction):
    pages = page_cache(4, eviction)
    table = run(pages, 16, 0.0)
    head, *tail = table.clear()
    pages.release_kv([head], 0.0)  # idle for longest, with three blocks behind it
    pages.release_kv(tail, 50.0)
    pages.claim_kv(1, 51.0, Depth.IDLE)
    assert num_found(pages, 17) == 3


def test_a_block_with_only_busy_ones_behind_it_may_go_and_is_found_again():
    pages = page_cache(3)
    table = run(pages, 12, 0.0)
    first, second, third = table.pages
    pages.release_kv([first], 0.0)  # as if another request had computed the first block, and ended
    assert pages.claim_kv(1, 1.0, Depth.IDLE) == [first]
    assert num_found(pages, 13) == 0
    pages.release_kv([first], 1.0)
    again = BlockTable(b"r", 4)
    again.pages.extend(pages.claim_kv(1, 2.0, Depth.IDLE) or ())
    again.index_computed(list(range(12)), 4, pages.prefix)
    assert num_found(pages, 13) == 3, "those behind it were out of reach, not lost"
    pages.release_kv([third], 3.0)
    pages.check_integrity()
    assert second in pages.prefix


def test_prefix_index_finds_the_end_of_a_chain_among_those_that_may_go():
    index = PrefixIndex()
    for digest, page, parent in ((b"0", 10, b"r"), (b"1", 11, b"0"), (b"2", 12, b"1"), (b"2'", 13, b"1")):
        index.insert(digest, page, parent)

    def chain(*begins: int, may_go: Callable[[int], bool] = lambda page: True) -> list[int]:
        pages = list(begins)
        index.follow(pages, may_go)
        return pages

    assert chain(10) == [10, 11, 12]
    assert chain(10, 11) == [10, 11, 12], "from where it was left"
    assert chain(10, may_go=lambda page: page != 12) == [10, 11, 13]
    assert chain(10, may_go=lambda page: page == 12) == [10], "no gap is jumped"
    index.remove(12)
    index.remove(13)
    assert chain(10) == [10, 11]


def test_a_claim_that_fails_leaves_shared_pages_as_they_were():
    pages = page_cache(6)
    pages.release_kv(run(pages, 16, 0.0).clear(), 0.0)
    shared = BlockTable(b"r", 4).match(list(range(17)), pages.prefix)
    assert len(shared) == 4 and pages.num_claimable(Depth.IDLE) == 6
    assert pages.claim_kv(3, 1.0, Depth.IDLE, shared=shared) is None, "four of the six are the ones to be shared"
    pages.check_integrity()
    claimed = pages.claim_kv(2, 1.0, Depth.IDLE, shared=shared)
    assert claimed is not None and not set(claimed) & set(shared)


def test_what_could_be_displaced_is_told_and_left_alone():
    pages = page_cache(10, "price")
    pages.claim_adapter(KEY, 4, 0.0, Depth.IDLE)
    pages.set_adapter_depth(KEY, Depth.IDLE, 0.0, copy_bytes=4 * 512)
    policy = make_eviction_policy("price", ReloadCosts())
    item = IdleItem(KEY, 4, 0.0, copy_bytes=4 * 512)
    policy.add(item, Depth.IDLE)
    price = policy.price(item, 5.0)
    assert pages.can_displace(6, 0.0, 5.0), "free"
    assert not pages.can_displace(7, price, 5.0), "worth as much"
    assert pages.can_displace(7, price * 1.001, 5.0)
    assert pages.can_displace(10, price * 1.001, 5.0)
    assert not pages.can_displace(11, float("inf"), 5.0)
    assert pages.num_claimable(Depth.IDLE) == 10 and KEY in pages.adapters()
    pages.check_integrity()


def test_losing_the_host_copy_makes_the_device_copy_dearer_and_no_younger():
    pages = page_cache(12, "price")
    for now, key in enumerate(("a", "b")):
        pages.claim_adapter(AdapterKey(key), 4, 0.0, Depth.IDLE)
        pages.set_adapter_depth(AdapterKey(key), Depth.IDLE, float(now), copy_bytes=4 * 512)
    pages.set_adapter_depth(KEY, Depth.IDLE, 7.0, copy_bytes=4 * 512, read_bytes=2000)
    pages.claim_kv(8, 8.0, Depth.IDLE)
    assert KEY in pages.adapters(), "the younger one went: the host has it still"
    pages = page_cache(12, "lru")
    for now, key in enumerate(("a", "b")):
        pages.claim_adapter(AdapterKey(key), 4, 0.0, Depth.IDLE)
        pages.set_adapter_depth(AdapterKey(key), Depth.IDLE, float(now), copy_bytes=4 * 512)
    pages.set_adapter_depth(KEY, Depth.IDLE, 7.0, copy_bytes=4 * 512, read_bytes=2000)
    pages.claim_kv(8, 8.0, Depth.IDLE)
    assert AdapterKey("b") in pages.adapters(), "idle since 0 as before"


def test_the_store_hears_of_lost_host_copies():
    rig = make_rig(num_pages=32, adapters=AdapterConfig(eviction="price", max_cpu_loras=1))
    for name in ("x", "y"):
        rig.register(name, 4)
        rig.add(request(f"of-{name}", model=name))
        rig.drain()
    assert rig.executor.host == {"key-y"}
    idle = rig.core.page_cache._droppable.items()
    read_bytes = {key: item.read_bytes for key, (item, _) in idle if isinstance(key, str)}
    assert read_bytes == {"key-x": version("x", 4).disk_bytes, "key-y": 0}


def test_costs_are_measured_without_the_time_in_the_queue():
    rig = make_rig(num_pages=64, adapters=AdapterConfig(eviction="price"))
    for name in ("x", "y"):
        rig.register(name, 4)
        rig.add(request(f"of-{name}", model=name))
    rig.turn()  # both copies start
    rig.now = 100.0
    rig.executor.complete_load()
    rig.turn()
    rig.executor.complete_load()
    rig.turn()
    took = [event.took_s for event in rig.events if isinstance(event, AdapterLoaded)]
    assert took == [100.0, 101.0]
    seconds = rig.core._costs.copy.seconds(version("x", 4).host_bytes)
    assert seconds == pytest.approx((100.0 + 1.0) / 2, rel=0.1)
