"""Counts of loads: the linear program against Belady's rule, and rules against the fewest."""

from __future__ import annotations

import random

import pytest
from vllm_twin import NUM_HOST, NUM_SLOTS, count_lru, draw_requests, fewest, fewest_known, plugin_rules, vllm_rules

pytest.importorskip("scipy")


def belady(asked: list[str], room: int) -> int:
    kept: set[str] = set()
    num_loads = 0
    for number, adapter in enumerate(asked):
        if adapter not in kept:
            num_loads += 1
            if len(kept) == room:
                later = asked[number + 1 :]
                kept.remove(max(kept, key=lambda one: later.index(one) if one in later else len(asked)))
            kept.add(adapter)
    return num_loads


@pytest.mark.parametrize("room", [1, 2, 4])
def test_the_fewest_loads_of_equal_adapters_are_those_of_belady(room: int) -> None:
    rng = random.Random(room)
    for _ in range(20):
        asked = [f"a{int(8 * rng.random() ** 2)}" for _ in range(40)]
        assert fewest(asked, dict.fromkeys(asked, 1.0), room) == pytest.approx(belady(asked, room))


def test_dear_adapters_are_kept() -> None:
    asked = ["dear", "a", "b", "a", "dear", "a"]
    assert fewest(asked, {"dear": 10.0, "a": 1.0, "b": 1.0}, 2) == 10 + 1 + 1 + 1
    assert fewest(asked, {"dear": 1.0, "a": 1.0, "b": 1.0}, 2) == 4


def test_no_rule_needs_fewer_than_the_fewest() -> None:
    asked = [str(request.adapter) for request in draw_requests(seconds=40.0, rate=10.0, seed=3)]
    reads, copies = count_lru(asked)
    ones = dict.fromkeys(asked, 1.0)
    assert len(reads) >= fewest(asked, ones, NUM_HOST) and len(copies) >= fewest(asked, ones, NUM_SLOTS)
    assert fewest_known(asked, ones, NUM_SLOTS) >= fewest(asked, ones, NUM_SLOTS)
    assert reads <= copies, "an adapter that is read is copied"


def test_arms_are_vllm_but_for_their_options() -> None:
    one = {"policy": "fifo", "eviction": "lru", "look_ahead": 0, "blocking_loads": True}
    assert plugin_rules(one) == vllm_rules()
    scheduler, adapters = plugin_rules({})
    assert (scheduler.policy, scheduler.step_composition) == ("adapter-aware", "mixed")
    assert (adapters.eviction, adapters.look_ahead) == ("price", 10)
