"""Adapters that are expected by their recent traffic."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from manylora.core.engine.adapters.forecast import INTERVAL_S, THRESHOLD, Traffic
from manylora.core.types import AdapterKey

BUSY, RARE, NEW = AdapterKey("busy"), AdapterKey("rare"), AdapterKey("new")


def taught(num_intervals: int) -> Traffic:
    """One adapter is asked for in every interval, another in every twentieth."""
    traffic = Traffic()
    for interval in range(num_intervals):
        now = (interval + 0.5) * INTERVAL_S
        traffic.used(BUSY, now)
        if interval % 20 == 0:
            traffic.used(RARE, now)
    return traffic


def test_nothing_is_due_before_anything_is_known():
    assert Traffic().due(0.0) == []
    assert taught(2).due(2 * INTERVAL_S) == []


def test_a_busy_adapter_is_due_and_a_rare_one_is_not():
    now = 100 * INTERVAL_S
    ((key, until),) = taught(100).due(now)
    assert key == BUSY
    assert now < until <= now - INTERVAL_S / math.log(1 - THRESHOLD)


def test_what_was_learnt_of_one_adapter_holds_for_a_new_one():
    traffic, begin = taught(100), 100 * INTERVAL_S
    for interval in range(4):
        traffic.used(NEW, begin + interval * INTERVAL_S)
        traffic.used(BUSY, begin + interval * INTERVAL_S)
    assert [key for key, _ in traffic.due(begin + 4 * INTERVAL_S)] == [BUSY, NEW]


def test_an_adapter_that_falls_silent_is_no_longer_due():
    assert taught(100).due(130 * INTERVAL_S) == []


def test_a_forgotten_adapter_is_not_due_and_may_come_back():
    traffic = taught(100)
    now = 100 * INTERVAL_S
    assert traffic.due(now)
    traffic.forget(BUSY)
    assert traffic.due(now) == []
    traffic.used(BUSY, now)
    assert traffic.due(now) == [], "in the interval that it is used in nothing is decided anew"


def test_adapters_that_come_and_go_take_no_more_room():
    traffic = taught(1)
    num_rows = len(traffic._keys)
    for number in range(100):
        traffic.used(AdapterKey(str(number)), number)
        traffic.forget(AdapterKey(str(number)))
    assert len(traffic._keys) == num_rows + 1


@given(st.lists(st.tuples(st.integers(0, 40), st.floats(0.0, 30.0), st.booleans()), max_size=120))
@settings(max_examples=60, deadline=None)
def test_only_known_adapters_are_due_in_order_and_in_the_future(uses):
    traffic, now, known = Traffic(), 0.0, set()
    for number, gap_s, is_forgotten in uses:
        now += gap_s
        key = AdapterKey(str(number))
        if is_forgotten:
            traffic.forget(key)
            known.discard(key)
        else:
            traffic.used(key, now)
            known.add(key)
        due = traffic.due(now)
        assert {key for key, _ in due} <= known
        assert all(until > now for _, until in due)
        assert due == sorted(due, key=lambda one: one[1])
