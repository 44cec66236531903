"""Eviction policies against scores worked by hand."""

from __future__ import annotations

import gc
from types import FunctionType, ModuleType

import pytest
from harness import make_rig, request

from manylora.core.config import AdapterConfig
from manylora.core.errors import ConfigError
from manylora.core.events import AdapterEvicted
from manylora.core.memory import EVICTION_POLICIES, Depth, EvictionPolicy, IdleItem, ReloadCosts, make_eviction_policy
from manylora.core.memory.eviction import KeyedEviction
from manylora.core.memory.eviction.published import WeightedScore
from manylora.core.types import AdapterKey, Tier

MB = 1_000_000


def adapter(key: str, num_pages: int, idle_since: float, read_bytes: int = 0) -> IdleItem:
    return IdleItem(AdapterKey(key), num_pages, idle_since, copy_bytes=num_pages * MB, read_bytes=read_bytes)


def block(page: int, idle_since: float) -> IdleItem:
    return IdleItem(page, 1, idle_since, run_tokens=16)


def make(name: str, costs: ReloadCosts | None = None) -> EvictionPolicy:
    return make_eviction_policy(name, costs or ReloadCosts())


def use(policy: EvictionPolicy, key: str, *times: float) -> None:
    for now in times:
        policy.used(AdapterKey(key), now)


def num_reachable(policy: EvictionPolicy) -> int:
    """Return the number of objects that a policy keeps, without code."""
    seen: dict[int, object] = {}
    found: list[object] = [policy]
    while found:
        one = found.pop()
        if id(one) not in seen and not isinstance(one, type | FunctionType | ModuleType):
            seen[id(one)] = one
            found += gc.get_referents(one)
    return len(seen)


def order_of(policy: EvictionPolicy, now: float, depth: Depth = Depth.IDLE) -> list[object]:
    """Evict everything; return the keys as they went."""
    keys: list[object] = []
    while (victim := policy.victim(depth, now)) is not None:
        keys.append(victim.key)
        policy.evict(victim.key, now)
    return keys


def test_an_unknown_policy_is_refused_by_name():
    with pytest.raises(ConfigError, match="'mru', expected one of chameleon, fair, fastlibra, gdsf, lru, none, price"):
        make("mru")


@pytest.mark.parametrize("name", sorted(EVICTION_POLICIES))
def test_the_spared_adapter_is_never_named(name):
    policy = make(name)
    policy.add(adapter("a", 1, 0.0), Depth.IDLE)
    policy.add(adapter("b", 1, 1.0), Depth.IDLE)
    first = policy.victim(Depth.IDLE, 2.0)
    assert first is not None and isinstance(first.key, str)
    other = policy.victim(Depth.IDLE, 2.0, spare=first.key)
    assert other is not None and other.key != first.key
    policy.evict(other.key, 2.0)
    assert policy.victim(Depth.IDLE, 2.0, spare=first.key) is None
    assert policy.victim(Depth.IDLE, 2.0) == first, "sparing it left it in line"


@pytest.mark.parametrize("name", sorted(EVICTION_POLICIES))
def test_wanted_adapters_have_a_ranking_of_their_own(name):
    policy = make(name)
    policy.add(adapter("idle", 1, 5.0), Depth.IDLE)
    policy.add(adapter("wanted", 1, 0.0), Depth.WANTED)
    assert order_of(policy, 6.0) == ["idle"]
    assert order_of(policy, 6.0, Depth.WANTED) == ["wanted"]


@pytest.mark.parametrize("name", sorted(EVICTION_POLICIES))
def test_uses_add_nothing_that_stays_in_a_pool_that_is_never_full(name):
    policy = make(name)
    kept = []
    for first in (0, 1000):
        for number in range(first, first + 1000):
            use(policy, f"adapter-{number % 3}", 10.0 * number)
        kept.append(num_reachable(policy))
    assert kept[1] < kept[0] + 100


def test_lru_is_lru_over_both_kinds():
    policy = make("lru")
    policy.add(adapter("a", 3, 2.0), Depth.IDLE)
    policy.add(block(7, 1.0), Depth.IDLE)
    policy.add(block(8, 3.0), Depth.IDLE)
    policy.add(adapter("b", 3, 0.0), Depth.IDLE)
    assert order_of(policy, 4.0) == ["b", 7, "a", 8]


class TestChameleon:
    """Uses at hand: a 4 times, b twice, c never in the window; sizes 8, 16, 32 pages; at t = 100, window 300 s."""

    def filled(self, name: str) -> EvictionPolicy:
        policy = make(name)
        use(policy, "a", 10.0, 20.0, 30.0, 40.0)
        use(policy, "b", 50.0, 70.0)
        policy.add(adapter("a", 8, 40.0), Depth.IDLE)
        policy.add(adapter("b", 16, 70.0), Depth.IDLE)
        policy.add(adapter("c", 32, 85.0), Depth.IDLE)
        return policy

    def test_scores(self):
        score = WeightedScore(0.45, 0.10, 0.45)
        for now in (10.0, 20.0, 30.0, 40.0):
            score.used(AdapterKey("a"), now)
        for now in (50.0, 70.0):
            score.used(AdapterKey("b"), now)
        a, b, c = adapter("a", 8, 40.0), adapter("b", 16, 70.0), adapter("c", 32, 85.0)
        for item in (a, b, c):
            score.place(item)
        assert score.worth(a, 100.0) == pytest.approx(0.45 * 4 / 4 + 0.10 * (1 - 60 / 300) + 0.45 * 8 / 32)  # 0.6425
        assert score.worth(b, 100.0) == pytest.approx(0.45 * 2 / 4 + 0.10 * (1 - 30 / 300) + 0.45 * 16 / 32)  # 0.54
        assert score.worth(c, 100.0) == pytest.approx(0.45 * 0 / 4 + 0.10 * (1 - 15 / 300) + 0.45 * 32 / 32)  # 0.545
        list(score.moved(345.0))  # a's uses have left the window, b's have not
        assert score.worth(a, 345.0) == pytest.approx(0.45 * 8 / 32)
        assert score.worth(b, 345.0) == pytest.approx(0.45 * 2 / 2 + 0.10 * (1 - 275 / 300) + 0.45 * 16 / 32)

    def test_lowest_score_first(self):
        assert order_of(self.filled("chameleon"), 100.0) == ["b", "c", "a"]

    def test_fair_weighs_alike(self):
        # a: (1 + 0.8 + 0.25) / 3, b: (0.5 + 0.9 + 0.5) / 3, c: (0 + 0.95 + 1) / 3
        assert order_of(self.filled("fair"), 100.0) == ["b", "c", "a"]
        # At 345 s, a's uses are out of the window: a 0 + 0 + 0.25, b 1 + 0.083 + 0.5, c 0 + 0.133 + 1.
        assert order_of(self.filled("fair"), 345.0) == ["a", "c", "b"]

    def test_uses_leave_the_window_while_idle(self):
        policy = self.filled("chameleon")
        assert policy.victim(Depth.IDLE, 100.0).key == "b"  # type: ignore[union-attr]
        # b: 0.45 * 2/2 + .. > c: 0.45 * 0 + 0.1 * .. + 0.45 > a: 0.45 * 0/2 + 0 + 0.1125
        assert order_of(policy, 345.0) == ["a", "c", "b"]

    def test_an_unloaded_adapter_takes_its_uses_along(self):
        policy = self.filled("chameleon")
        policy.remove(AdapterKey("a"))
        policy.forget(AdapterKey("a"), 100.0)
        # b is now the most used: 0.45 + 0.09 + 0.225 = 0.765 against c's 0.545.
        assert order_of(policy, 100.0) == ["c", "b"]

    def test_blocks_and_adapters_yield_by_age(self):
        policy = self.filled("chameleon")
        policy.add(block(1, 60.0), Depth.IDLE)
        policy.add(block(2, 75.0), Depth.IDLE)
        # b (idle since 70) is the adapters' nominee, then c (85), then a (40).
        assert order_of(policy, 100.0) == [1, "b", 2, "c", "a"]


def test_gdsf_counts_uses_per_page_on_top_of_its_clock():
    costs = ReloadCosts()
    policy = make("gdsf", costs)
    use(policy, "a", 1.0, 2.0, 3.0)
    use(policy, "b", 4.0)
    use(policy, "c", 5.0)
    a, b, c = adapter("a", 10, 3.0), adapter("b", 2, 4.0), adapter("c", 40, 5.0)
    per_page = {item.key: costs.reload_s(item) / item.num_pages for item in (a, b, c)}
    # 0.5 ms and 62.5 us a page: 112.5, 312.5 and 75 us a page and use.
    assert per_page == pytest.approx({"a": 112.5e-6, "b": 312.5e-6, "c": 75e-6})
    for item in (a, b, c):
        policy.add(item, Depth.IDLE)
    assert policy.victim(Depth.IDLE, 6.0) == c  # 75 < 312.5 < 3 * 112.5
    policy.evict(c.key, 6.0)
    use(policy, "c", 7.0, 7.1, 7.2, 7.3)
    policy.add(adapter("c", 40, 7.3), Depth.IDLE)  # clock 75 + 4 * 75 = 375, its first use forgotten
    assert order_of(policy, 8.0) == ["b", "a", "c"]


class TestNone:
    def test_an_adapter_goes_with_its_last_request(self):
        rig = make_rig(num_pages=64, adapters=AdapterConfig(eviction="none"))
        rig.register("x", 4)
        rig.add(request("one", model="x"), request("two", max_tokens=8, model="x"))
        rig.step()
        rig.step()
        assert rig.core.stats().num_resident == 1
        while "one" not in rig.outputs or rig.finish("one") is None:
            rig.step()
            assert rig.core.stats().num_resident == 1, "the other still runs on it"
        rig.drain()
        assert rig.core.stats().num_resident == 0
        assert [event.num_pages for event in rig.events if isinstance(event, AdapterEvicted)] == [4]

    def test_a_pinned_or_warmed_one_stays(self):
        rig = make_rig(num_pages=64, adapters=AdapterConfig(eviction="none"))
        rig.register("x", 4)
        rig.register("y", 4)
        rig.core.adapters.pin("x", True, rig.now)
        rig.core.adapters.warm("y", rig.now)
        rig.drain()
        rig.add(request("one", model="x"))
        rig.drain()
        assert {status.tier for status in rig.core.adapters.statuses(rig.now)} == {Tier.DEVICE}


class TestPrice:
    def settled(self) -> tuple[EvictionPolicy, ReloadCosts]:
        costs = ReloadCosts()
        return make("price", costs), costs

    def test_of_equals_the_one_idle_longer_is_cheaper(self):
        policy, _ = self.settled()
        for index, key in enumerate("abc"):
            use(policy, key, float(index))
            policy.add(adapter(key, 8, float(index * 4)), Depth.IDLE)
        assert order_of(policy, 9.0) == ["a", "b", "c"]

    def test_one_that_would_have_to_be_read_from_disk_is_dearer(self):
        policy, _ = self.settled()
        policy.add(adapter("disk", 8, 0.0, read_bytes=8 * MB), Depth.IDLE)
        policy.add(adapter("host", 8, 1.0), Depth.IDLE)
        assert order_of(policy, 2.0) == ["host", "disk"]

    def test_what_is_used_more_is_dearer_once_that_was_seen_to_matter(self):
        policy, _ = self.settled()
        now = 0.0
        for turn in range(400):  # "hot" every second, one of 40 others beside it
            for key in ("hot", f"cold{turn % 40}"):
                now += 0.5
                use(policy, key, now)
                policy.add(adapter(key, 8, now), Depth.IDLE)
                policy.remove(AdapterKey(key))
        policy.add(adapter("hot", 8, now), Depth.IDLE)
        policy.add(adapter("cold1", 8, now + 1.0), Depth.IDLE)
        assert order_of(policy, now + 3.0) == ["cold1", "hot"]

    def test_both_kinds_stand_in_one_order_by_measured_seconds(self):
        def first(token_s: float) -> bool:
            policy, costs = self.settled()
            for num_tokens in (64, 128, 256, 512) * 20:
                costs.step.observe(num_tokens, 0.01 + token_s * num_tokens)
            policy.add(block(1, 0.0), Depth.IDLE)
            policy.add(adapter("a", 8, 0.0), Depth.IDLE)
            victim = policy.victim(Depth.IDLE, 1.0)
            assert victim is not None
            return isinstance(victim.key, str)

        # An adapter page costs (0.5 ms + 8 * 62.5 us) / 8 = 125 us, a block 16 tokens.
        assert first(125e-6 / 16 * 1.5), "prefill is slow: the block is dearer"
        assert not first(125e-6 / 16 / 1.5), "prefill is fast: the block is cheaper"

    def test_price_is_seconds_times_rate_per_page(self):
        policy, costs = self.settled()
        item = adapter("a", 8, 0.0)
        policy.add(item, Depth.IDLE)
        # Nothing learnt yet: the rate is 1 / age, in buckets of an octave. 3 s lies in [2, 4): 2**1.5 s.
        assert policy.price(item, 3.0) == pytest.approx(costs.reload_s(item) / 2**1.5 / 8)


@pytest.mark.parametrize("name", sorted(set(EVICTION_POLICIES) - {"price"}))
def test_policies_that_know_no_seconds_let_nothing_guessed_displace_anything(name):
    assert make(name).price(adapter("a", 1, 0.0), 1.0) == float("inf")


def test_one_number_per_item_is_an_order_over_both_kinds():
    """Least first; of equals the first to be idle; wanted adapters apart; what is in use again is not named."""
    policy = KeyedEviction(lambda item: -item.num_pages)
    policy.add(adapter("small", 2, 0.0), Depth.IDLE)
    policy.add(adapter("large", 5, 1.0), Depth.IDLE)
    policy.add(block(7, 2.0), Depth.IDLE)
    policy.add(block(3, 3.0), Depth.IDLE)
    policy.add(adapter("wanted", 9, 0.0), Depth.WANTED)
    policy.add(adapter("used", 8, 0.0), Depth.IDLE)
    policy.remove(AdapterKey("used"))
    assert order_of(policy, 4.0) == ["large", "small", 7, 3]
    assert order_of(policy, 4.0, Depth.WANTED) == ["wanted"]
    assert policy.keeps_idle_adapters and policy.price(block(1, 0.0), 1.0) == float("inf")
