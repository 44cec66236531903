"""Decisions that learn: accounts of a machine, times of batches, rates, and what a node holds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from manylora.functions.decisions.batching import RATE_WINDOW_S, FirstTokenFit, FirstTokenTime, RequestRate
from manylora.functions.decisions.billing import PLATFORM, MachineState, Usage, UsageMeter
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
    held = revise_holding((), wanted, backbones, 193)
    assert held == {"backbone:b", "libraries:b", "adapter:busy", "adapter:calm", "process:busy"}
    assert revise_holding((), wanted, backbones, 99) == frozenset()
    equal = [replace(one, requests_per_s=1.0 + 0.01 * (one.name == "calm")) for one in wanted[:2]]
    assert revise_holding(held, equal, backbones, 193) == held  # another choice is worth little more
    alone = revise_holding(held, equal[1:], backbones, 193)
    assert alone == {"backbone:b", "libraries:b", "adapter:calm", "process:calm"}
    assert not revise_holding(held, wanted, backbones, 99)  # no longer fits
