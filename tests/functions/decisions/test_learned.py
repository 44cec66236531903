"""Decisions that learn: accounts of a machine, times of batches, rates, and what a node holds."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manylora.functions.decisions.batching import RATE_WINDOW_S, BatchTimes, FirstTokenFit, FirstTokenTime, RequestRate
from manylora.functions.decisions.billing import PLATFORM, MachineState, PriceList, Usage, UsageMeter
from manylora.functions.decisions.keeping import IdleGaps, num_devices_worth
from manylora.functions.decisions.placement import HoldingCost, Wanted, revise_holding


def test_every_state_of_a_machine_is_charged_until_the_next() -> None:
    meter = UsageMeter(0, num_cpus=2)
    meter.change(10, MachineState(awake=["a", "b"], host_bytes={"a": 3}, shared_host_bytes=[(10, ["a", "b"])]))
    meter.change(25, MachineState(running={0: ["a"]}, awake=["a", "b"]))
    meter.use_cpu("a", 7)
    meter.use_cpu("b", 1000)  # readings may exceed the machine's time: the rest is charged with the next interval
    taken = meter.take(30)
    assert dict(taken.accounts) == {
        PLATFORM: Usage(idle_device_ns=10),
        "a": Usage(active_device_ns=5, idle_device_ns=8, cpu_ns=7, host_byte_ns=45 + 75),
        "b": Usage(idle_device_ns=7, cpu_ns=53, host_byte_ns=75),
    }
    assert (taken.device_ns, taken.cpu_ns, taken.host_byte_ns) == (30, 60, 45 + 150)
    later = meter.take(530)
    assert later.accounts["b"].cpu_ns == 947
    assert sum(one.cpu_ns for one in later.accounts.values()) == 1000


def test_the_time_of_a_batch_is_learned_from_batches() -> None:
    fit = FirstTokenFit(FirstTokenTime(1.0, 1.0))
    for size in (1, 4, 2, 8, 3):
        fit.observe(size, 0.2 + 0.05 * (size - 1))
    assert fit.time.single_s == pytest.approx(0.2)
    assert fit.time.each_s == pytest.approx(0.05)


def test_a_batch_whose_request_ends_without_a_token_is_not_timed() -> None:
    times = BatchTimes(2.0, 16)
    for now in range(2):  # the first of a process is not learned from
        times.begin(now, 2, 1)
        times.note(now + 0.2, 2)
    known = times.window.time
    times.begin(2.0, 2, 1)
    times.note(2.1, 1)
    times.note(2.1, 0, 1)
    times.note(60.0, 1)  # of a request that came later
    assert times.window.time == known


def test_rates_fade() -> None:
    rate = RequestRate()
    for second in range(600):
        rate.note(float(second), 3)
    assert rate.per_s(599.0) == pytest.approx(3.0, rel=0.02)
    assert rate.per_s(599.0 + 20 * RATE_WINDOW_S) == 0.0


def test_what_is_held_is_most_value_with_all_that_it_needs() -> None:
    base, libraries = HoldingCost(100, 10.0), HoldingCost(50, 5.0)
    wanted = [
        Wanted(
            name="busy", backbone="b", requests_per_s=1.0, adapter=HoldingCost(1, 0.1), process=HoldingCost(40, 0.3)
        ),
        Wanted(
            name="calm", backbone="b", requests_per_s=0.1, adapter=HoldingCost(1, 0.1), process=HoldingCost(40, 0.3)
        ),
        Wanted(
            name="idle", backbone="b", requests_per_s=0.0, adapter=HoldingCost(1, 0.1), process=HoldingCost(40, 0.3)
        ),
    ]
    backbones = {"b": (base, libraries)}
    prices = PriceList()
    held = revise_holding((), wanted, backbones, 193, prices)
    assert held == {"backbone:b", "libraries:b", "adapter:busy", "adapter:calm", "process:busy"}
    assert revise_holding((), wanted, backbones, 99, prices) == frozenset()
    equal = [replace(one, requests_per_s=1.0 + 0.01 * (one.name == "calm")) for one in wanted[:2]]
    assert revise_holding(held, equal, backbones, 193, prices) == held  # another choice is worth little more
    alone = revise_holding(held, equal[1:], backbones, 193, prices)
    assert alone == {"backbone:b", "libraries:b", "adapter:calm", "process:calm"}
    assert not revise_holding(held, wanted, backbones, 99, prices)  # no longer fits


def test_what_is_held_is_worth_its_rent() -> None:
    """Nothing is held whose memory is dearer than its load, nor anything that needs it."""
    process = HoldingCost(10**8, 0.3)
    (one,) = wanted = [
        Wanted(name="x", backbone="b", requests_per_s=0.01, adapter=HoldingCost(1, 0.1), process=process)
    ]
    backbones = {"b": (HoldingCost(10**9, 10.0), HoldingCost(10**8, 5.0))}
    rent = 2e-6 * 0.1  # of the process
    for wait_s, has_process in ((1.1 * rent / 0.4 / 0.01, True), (0.9 * rent / 0.4 / 0.01, False)):
        held = revise_holding((), wanted, backbones, 2 * 10**9, PriceList(wait_s=wait_s))
        assert ("process:x" in held) is has_process
        assert {"backbone:b", "libraries:b", "adapter:x"} <= held
    seldom = [replace(one, requests_per_s=1e-6)]
    assert not revise_holding((), seldom, backbones, 2 * 10**9, PriceList(wait_s=0.06))


def test_a_device_is_kept_for_what_would_have_cost_least() -> None:
    gaps = IdleGaps()
    assert gaps.keep_s(10.0) == 10.0  # nothing is known: at most twice the cost of the best choice in hindsight
    for _ in range(8):
        gaps.note(30.0)
    assert gaps.keep_s(10.0) == 0.0  # every gap is longer than a start is worth
    assert gaps.keep_s(40.0) == pytest.approx(33.0)
    gaps = IdleGaps()
    for gap_s in (1.0, 2.0, 3.0, 500.0) * 4:
        gaps.note(gap_s)
    assert gaps.keep_s(10.0) == pytest.approx(3.3)


@settings(max_examples=60)
@given(st.lists(st.floats(0.01, 1000.0), min_size=4, max_size=20), st.floats(0.1, 300.0))
def test_keeping_costs_at_most_what_any_other_time_would_have(seen: list[float], even_s: float) -> None:
    """Over the gaps that are known, and up to the tenth by which it keeps longer."""
    gaps = IdleGaps()
    for one in seen:
        gaps.note(one)

    def cost(keep_s: float) -> float:
        return sum(one if one <= keep_s else keep_s + even_s for one in seen)

    kept_s = gaps.keep_s(even_s)
    assert cost(kept_s) <= 1.1 * min(map(cost, [0.0, *(one for one in seen if one <= 4.0 * even_s)])) + 1e-6


def test_devices_are_opened_while_one_more_is_worth_it() -> None:
    assert num_devices_worth([0.2, 0.2], 0.0, 100.0) == 0
    assert num_devices_worth([0.2, 0.2], 0.4, 2.0) == 0  # less than one request in the time that a start is worth
    assert num_devices_worth([0.2, 0.2], 0.4, 3.0) == 1
    both_busy = [0.5, 0.5, 0.5]
    # One device is found busy by 7 in 8 requests, two by 4 in 8: 0.4 x 0.875 x 3 > 1 > 0.4 x 0.5 x 3.
    assert num_devices_worth(both_busy, 0.4, 3.0) == 2
    assert num_devices_worth(both_busy, 0.4, 1e9) == 3  # a function's requests join each other
