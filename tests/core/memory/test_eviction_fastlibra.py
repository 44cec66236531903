"""FastLibra's rule: blocks before their adapter, and one worth over both kinds."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manylora.core.memory import Depth, IdleItem, ReloadCosts
from manylora.core.memory.eviction.fastlibra import BATCH, HALF_LIFE_S, FastLibraEviction
from manylora.core.types import AdapterKey

A, B = AdapterKey("a"), AdapterKey("b")


def adapter(key: AdapterKey, since: float = 0.0, num_pages: int = 8) -> IdleItem:
    return IdleItem(key, num_pages, since, copy_bytes=num_pages << 20)


def block(page: int, since: float = 0.0, of: AdapterKey | None = None) -> IdleItem:
    return IdleItem(page, 1, since, run_tokens=16, adapter=of)


def emptied(policy: FastLibraEviction, now: float) -> list[object]:
    """Evict everything; return the keys as they went."""
    keys: list[object] = []
    while (victim := policy.victim(Depth.IDLE, now)) is not None:
        keys.append(victim.key)
        policy.evict(victim.key, now)
    return keys


def test_an_adapter_outlives_its_blocks_and_no_others():
    policy = FastLibraEviction(ReloadCosts())
    policy.used(A, 0.0)
    policy.add(adapter(A), Depth.IDLE)  # blocks become idle behind their adapter, and before it
    policy.add(block(1, of=B), Depth.IDLE)
    policy.add(adapter(B), Depth.IDLE)
    policy.add(block(2, of=A), Depth.IDLE)
    policy.add(block(3), Depth.IDLE)
    for page in (1, 2, 3):
        policy.remove(page)
        for _ in range(100):
            policy.used(page, 0.0)
    policy.add(block(1, of=B), Depth.IDLE)
    policy.add(block(2, of=A), Depth.IDLE)
    policy.add(block(3), Depth.IDLE)
    assert emptied(policy, 1.0) == [1, B, 2, A, 3], "a block of the base holds no adapter back"


def test_a_use_counts_half_after_the_half_life_and_worth_is_per_page():
    policy = FastLibraEviction(ReloadCosts())
    for _ in range(3):
        policy.used(A, 0.0)
    for _ in range(2):
        policy.used(B, HALF_LIFE_S)  # worth four uses at 0
    policy.add(adapter(A), Depth.IDLE)
    policy.add(adapter(B), Depth.IDLE)
    assert emptied(policy, HALF_LIFE_S) == [A, B]


def test_adapters_are_worth_more_while_fewer_are_there_than_a_batch_needs():
    policy = FastLibraEviction(ReloadCosts())
    names = [AdapterKey(str(index)) for index in range(100)]
    for name in names:
        for _ in range(2):
            policy.used(name, 0.0)
    policy.add(adapter(names[0]), Depth.IDLE)
    policy.add(block(1), Depth.IDLE)
    needed = 100 * (1 - 0.99**BATCH)
    assert policy._reward() == pytest.approx(math.log2(needed))
    own, other = policy._worth[names[0]], policy._worth[1]
    assert own < other < own + math.log2(needed), "this case tells them apart"
    assert policy.victim(Depth.IDLE, 0.0).key == 1  # type: ignore[union-attr]


moves = st.lists(
    st.tuples(st.sampled_from(["adapter", "wanted", "block", "use", "take", "evict", "forget"]), st.integers(0, 11)),
    max_size=60,
)


@given(moves)
@settings(max_examples=150, deadline=None)
def test_the_victim_is_the_least_of_those_that_nothing_depends_on(steps):
    policy = FastLibraEviction(ReloadCosts())
    idle: dict[object, IdleItem] = {}
    for now, (kind, number) in enumerate(steps):
        key = AdapterKey("abc"[number % 3])
        name = number if kind == "block" else key
        if kind in ("adapter", "block", "wanted"):
            if name not in idle:
                item = block(number, now, [None, A, B][number % 3]) if kind == "block" else adapter(key, now)
                policy.add(item, Depth.WANTED if kind == "wanted" else Depth.IDLE)
                if kind == "wanted":
                    policy.remove(key)
                else:
                    idle[name] = item
        elif kind == "use":
            policy.used(key, now)
        elif kind == "take" and idle:
            taken = list(idle)[number % len(idle)]
            policy.remove(taken)  # type: ignore[arg-type]
            del idle[taken]
        elif kind == "forget":
            policy.forget(key, now)
        victim = policy.victim(Depth.IDLE, now)
        free = [item for item in idle.values() if not any(item.key == other.adapter for other in idle.values())]
        assert (victim is None) == (not idle)
        if victim is not None:
            assert victim in free, "nothing that is idle depends on it"
            same = [one for one in free if isinstance(one.key, str) == isinstance(victim.key, str)]
            assert policy._worth[victim.key] == min(policy._worth[one.key] for one in same)
            if kind == "evict":
                policy.evict(victim.key, now)
                del idle[victim.key]
