"""Simulated functions: latencies that can be computed by hand, accounts that add up, and rules that hold throughout."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manylora.core.errors import ConfigError
from manylora.functions.decisions.billing import PLATFORM, PriceList
from manylora.lab.costs.idle import time_on_idle_engine
from manylora.lab.costs.roofline import RooflineCost
from manylora.lab.functions.device import Call, Turns
from manylora.lab.functions.setup import FunctionsSetup, LoadTimes
from manylora.lab.functions.simulation import FunctionsRun, FunctionsSimulation
from manylora.lab.sim.run.simulation import simulate
from manylora.lab.sim.setup import Setup, make_config
from manylora.lab.workloads import AdapterSpec, RequestSpec, Workload

SEVEN = {"models": ("llama-2-7b",), "slo_s": (2.5,)}
NO_HOST_TIME = LoadTimes(first_step_s=0.0)
ALONE = {**SEVEN, "always_on": 1, "joins": True, "batching": "fixed", "preloads": (), "loads": NO_HOST_TIME}
LOADS = LoadTimes()
PUBLISHED = {"joins": False, "patience": 0.0, "rents": False, "preload_copies": "node", "keep_alive_s": 300.0}
"""The settings of ServerlessLoRA, where tests are about what it does."""


def workload(*requests: tuple[float, int, int, int], num_functions: int = 1) -> Workload:
    """Make a workload of (arrival, function, prompt, output)."""
    adapters = tuple(AdapterSpec(name=f"f{index}", rank=16) for index in range(num_functions))
    specs = [
        RequestSpec(arrival_s=at, num_prompt_tokens=prompt, num_output_tokens=output, adapter=f"f{function}")
        for at, function, prompt, output in sorted(requests)
    ]
    return Workload(name="test", requests=tuple(specs), adapters=adapters)


def poisson(rate: float, num: int, num_functions: int) -> Workload:
    """Make requests at equal distances, the functions in turn."""
    return workload(
        *((index / rate, index % num_functions, 60, 90 + 10 * (index % 5)) for index in range(num)),
        num_functions=num_functions,
    )


def run(requests: Workload, **changes: Any) -> FunctionsRun:
    return FunctionsSimulation(requests, FunctionsSetup(**{**PUBLISHED, **changes})).run()


def ttft(call: Call) -> float:
    assert call.answered_from is not None
    return call.answered_from - call.spec.arrival_s


def e2e(call: Call) -> float:
    assert call.finished_at is not None
    return call.finished_at - call.spec.arrival_s


def check(outcome: FunctionsRun) -> None:
    """Hold that every request was answered, in order, and that the accounts add up to the machines' time."""
    for call in outcome.calls:
        assert call.started_at is not None
        assert (
            call.spec.arrival_s <= call.started_at < call.spec.arrival_s + ttft(call) <= call.spec.arrival_s + e2e(call)
        )
    device_ns = sum(one.active_device_ns + one.idle_device_ns for one in outcome.accounts.values())
    assert device_ns == outcome.num_devices * round(outcome.duration_s * 1e9)


def test_a_call_alone_takes_the_time_of_its_steps() -> None:
    found = run(workload((1.0, 0, 300, 41)), **ALONE)
    alone = time_on_idle_engine(RooflineCost("llama-2-7b", "l40s"), 300, 41, rank=16)
    assert ttft(found.calls[0]) == pytest.approx(alone.ttft_s, rel=1e-6)
    assert e2e(found.calls[0]) == pytest.approx(alone.e2e_s, rel=1e-3)
    check(found)


def test_tenants_of_one_process_are_served_as_by_the_engine() -> None:
    """The course of batches stands for the engine's steps: within five per cent of the real scheduler's latencies."""
    requests = poisson(2.0, 120, 8)
    found = run(requests, **ALONE, one_process=True, num_nodes=1, devices_per_node=1)
    engine = simulate(
        requests, make_config(Setup(model="llama-2-7b", hardware="l40s", exact_caps=True, all_resident=True))
    )
    ours = sum(map(e2e, found.calls)) / 120
    assert ours == pytest.approx(sum(one.e2e_s for one in engine.records) / 120, rel=0.05)


def test_processes_on_one_device_take_turns() -> None:
    """Two functions at once take twice as long; as tenants of one process they share the steps."""
    both = workload((0.0, 0, 60, 100), (0.0, 1, 60, 100), num_functions=2)
    one = run(workload((0.0, 0, 60, 100)), **ALONE, num_nodes=1, devices_per_node=1)
    apart = run(both, **ALONE, num_nodes=1, devices_per_node=1)
    together = run(both, **ALONE, num_nodes=1, devices_per_node=1, one_process=True)
    assert e2e(apart.calls[0]) == pytest.approx(2 * e2e(one.calls[0]), rel=1e-6)
    assert e2e(together.calls[0]) < 1.1 * e2e(one.calls[0])
    assert abs(apart.accounts["f0"].active_device_ns - apart.accounts["f1"].active_device_ns) <= 2


def test_turns_end_when_their_work_is_done() -> None:
    turns = Turns()
    turns.advance(1.0)
    turns.begin("a", 2.0)
    turns.advance(2.0)
    turns.begin("b", 0.5)
    assert turns.next_at() == pytest.approx(3.0)  # b's half second takes a whole one
    assert turns.advance(3.0) == ["b"]
    assert turns.end("b") == 0.0
    assert turns.next_at() == pytest.approx(3.5)
    assert turns.end("a") == pytest.approx(0.5)


def test_a_cold_start_is_the_sum_of_its_stages() -> None:
    found = run(workload((1.0, 0, 60, 20)), **SEVEN, preloads=())
    weights = RooflineCost("llama-2-7b", "l40s").dims.weight_bytes
    waited = found.calls[0].waited_s
    assert waited["libraries"] == pytest.approx(LOADS.libraries_s)
    assert waited["backbone"] == pytest.approx(weights / LOADS.disk_bytes_per_s + weights / LOADS.link_bytes_per_s)
    assert waited["kernels"] == pytest.approx(LOADS.kernels_s + LOADS.context_s)
    assert found.calls[0].started_at == pytest.approx(1.0 + sum(waited.values()))
    check(found)


@pytest.mark.parametrize(
    ("preloads", "stages"),
    [
        (("libraries", "backbone", "adapter", "kernels"), set()),
        (("libraries", "backbone", "adapter"), {"kernels"}),
        (("libraries",), {"backbone", "adapter", "kernels"}),
    ],
)
def test_a_request_waits_for_the_stages_that_are_not_preloaded(preloads: tuple[str, ...], stages: set[str]) -> None:
    found = run(workload((60.0, 0, 60, 20)), **SEVEN, preloads=preloads)
    assert found.calls[0].waited_s.keys() == stages


def test_a_second_function_maps_the_copy_of_the_first() -> None:
    requests = workload((0.0, 0, 60, 20), (30.0, 1, 60, 20), num_functions=2)
    shared = run(requests, **SEVEN, preloads=(), num_nodes=1, devices_per_node=1).calls[1]
    own = run(requests, **SEVEN, preloads=(), num_nodes=1, devices_per_node=1, sharing=False).calls[1]
    assert "backbone" not in shared.waited_s
    assert own.waited_s["backbone"] > 0.5  # from host memory, where the first one has left it


def test_a_process_ends_with_its_keep_alive() -> None:
    requests = workload((0.0, 0, 60, 20), (40.0, 0, 60, 20), (200.0, 0, 60, 20))
    calls = run(requests, **SEVEN, preloads=(), keep_alive_s=60.0).calls
    assert [bool(one.waited_s) for one in calls] == [True, False, True]


def test_a_device_that_holds_something_is_paid_by_the_functions_it_is_held_for() -> None:
    """Also while all of them sleep; the platform pays for devices that hold nothing, and for no memory."""
    requests = workload((100.0, 0, 60, 20), (4000.0, 0, 60, 20), num_functions=2)
    held = run(requests, **SEVEN, keep_alive_s=60.0)
    kept = held.accounts["f0"].idle_device_ns + held.accounts["f0"].active_device_ns
    assert kept > 4000e9  # a device of each node, while there is a rate
    assert "f1" not in held.accounts  # nothing is held for a function without requests
    bare = run(requests, **SEVEN, keep_alive_s=60.0, preloads=())
    assert bare.accounts["f0"].idle_device_ns < 160e9
    for found in (held, bare):
        assert found.accounts[PLATFORM].device_byte_ns == 0
        check(found)


def test_a_device_is_let_go_when_its_rent_exceeds_the_start_that_it_saves() -> None:
    """By the ski rental at first; once the gaps are known to be longer than that, at once."""
    prices = PriceList(wait_s=0.01)
    ours = {**SEVEN, "joins": True, "rents": True, "preload_copies": "load", "keep_alive_s": None, "prices": prices}
    found = run(workload(*((100.0 + 200.0 * index, 0, 60, 20) for index in range(8))), **ours)
    weights = RooflineCost("llama-2-7b", "l40s").dims.weight_bytes
    adapter = found.functions[0].adapter_bytes
    copies_s = (weights + adapter) / LOADS.link_bytes_per_s
    start_s = copies_s + LOADS.adapter_s + LOADS.kernels_s + LOADS.context_s
    even_s = prices.even_s(start_s)
    assert even_s == pytest.approx(start_s * 0.01 / (7e-6 * 48))
    idle = found.accounts["f0"].idle_device_ns / 1e9
    assert idle == pytest.approx(4 * even_s + 8 * start_s, abs=12.0)  # four gaps until the history counts
    busy = run(workload(*((100.0 + 20.0 * index, 0, 60, 20) for index in range(40))), **ours)
    assert sum(bool(one.waited_s) for one in busy.calls) == 1  # gaps that are worth it are kept


def test_a_batch_shares_a_ready_device_rather_than_open_one() -> None:
    """While that answers sooner than a cold start and its rent; with dear waiting the second device is opened."""
    requests = workload((100.0, 0, 60, 100), (100.5, 1, 60, 100), num_functions=2)
    ours = {**SEVEN, "joins": True, "rents": True, "preload_copies": "load", "keep_alive_s": None}
    shared = run(requests, **ours, prices=PriceList(wait_s=0.002))
    assert not shared.calls[1].waited_s or shared.counts["starts"] == 1
    sizes = {len(device) for device in (shared.accounts["f0"], shared.accounts["f1"])}
    assert sizes == {5}


def test_a_batch_waits_by_its_window() -> None:
    requests = workload((100.0, 0, 60, 20), (101.0, 0, 60, 20))
    at_once = run(requests, **SEVEN).calls
    assert ttft(at_once[0]) < 0.3
    to_the_letter = run(requests, **SEVEN, patience=1.0).calls
    assert ttft(to_the_letter[0]) == pytest.approx(2.5, abs=0.01)
    assert to_the_letter[1].batch_size == 2
    fixed = run(requests, **SEVEN, batching="fixed", batch_size=2, batch_delay_s=5.0).calls
    assert ttft(fixed[0]) == pytest.approx(1.0 + ttft(fixed[1]))


def test_memory_is_taken_from_idle_artefacts_or_waited_for() -> None:
    """A 13B copy beside three others of 7B does not fit; without offloading its call waits for a keep-alive to end."""
    tight = {"models": ("llama-2-7b", "llama-2-13b"), "slo_s": (2.5, 4.0), "num_nodes": 1, "devices_per_node": 1}
    requests = workload(*((float(index), index, 60, 20) for index in range(3)), (60.0, 3, 60, 20), num_functions=6)
    changes = {**tight, "preloads": (), "sharing": False, "keep_alive_s": 100.0}
    prompt, late = (run(requests, **changes, offloads=offloads) for offloads in (True, False))
    assert prompt.counts["offloads"] > 0 == late.counts["offloads"]
    assert prompt.calls[3].started_at is not None and late.calls[3].started_at is not None
    assert prompt.calls[3].started_at < 75.0 < late.calls[3].started_at
    check(prompt)
    check(late)


def test_wrong_systems_are_refused() -> None:
    with pytest.raises(ConfigError, match="one objective above 0 for each model"):
        FunctionsSetup(models=("llama-2-7b",), slo_s=(1.0, 2.0))
    with pytest.raises(ConfigError, match="some of libraries"):
        FunctionsSetup(preloads=("weights",))
    with pytest.raises(ConfigError, match="tenants of a server"):
        FunctionsSetup(one_process=True)
    with pytest.raises(ConfigError, match="does not fit on one l40s"):
        run(workload((0.0, 0, 1, 1)), models=("llama-2-70b",), slo_s=(1.0,))
    calls = workload((0.0, 0, 1, 1))
    of_base = tuple(replace(one, adapter=None) for one in calls.requests)
    for wrong in (replace(calls, requests=of_base), replace(calls, requests=(), adapters=())):
        with pytest.raises(ConfigError, match="expected an adapter for each"):
            run(wrong)


SYSTEMS = st.fixed_dictionaries(
    {
        "sharing": st.booleans(),
        "offloads": st.booleans(),
        "joins": st.booleans(),
        "batching": st.sampled_from(["adaptive", "fixed"]),
        "patience": st.sampled_from([0.0, 0.5, 1.0]),
        "batch_size": st.sampled_from([1, 3, 64]),
        "batch_delay_s": st.sampled_from([0.0, 0.7]),
        "keep_alive_s": st.sampled_from([0.0, 5.0, 120.0, None]),
        "rents": st.booleans(),
        "preloads": st.sampled_from([(), ("backbone",), ("libraries", "backbone", "adapter", "kernels")]),
        "preload_copies": st.sampled_from(["cluster", "node", "load"]),
        "num_nodes": st.sampled_from([1, 2]),
        "devices_per_node": st.sampled_from([1, 3]),
    }
)
CALLS = st.lists(
    st.tuples(st.floats(0.0, 300.0), st.integers(0, 3), st.integers(1, 400), st.sampled_from([1, 2, 30, 400])),
    min_size=1,
    max_size=40,
)


@settings(max_examples=40, deadline=None)
@given(SYSTEMS, CALLS)
def test_every_call_is_answered_and_accounts_add_up(system: dict[str, Any], calls: list[tuple[float, int, int, int]]):
    if system["preloads"]:
        system = {**system, "offloads": True}  # otherwise what is held ready may hold up a function for ever
    simulation = FunctionsSimulation(workload(*calls, num_functions=4), FunctionsSetup(**system))
    decide = simulation.decide

    def checked(now: float) -> None:
        decide(now)
        for device in simulation._devices:
            assert device.free_bytes >= 0
            for process in device.processes.values():
                for one in process.engine.functions:
                    assert {one.backbone, one.adapter, one.kernels} <= device.held.keys()
        assert all(node.free_bytes >= 0 for node in simulation._nodes)

    simulation.decide = checked  # type: ignore[method-assign]
    outcome = simulation.run()
    check(outcome)
    assert all(not device.kv_bytes and not device.turns for device in simulation._devices)
    assert sum(one.spec.num_output_tokens for one in outcome.calls) == sum(one[3] for one in calls)


def test_loads_wait_for_each_other() -> None:
    """Two functions that start at once on one device read one copy; on two of one node they share its disk."""
    requests = workload((0.0, 0, 60, 20), (0.0, 1, 60, 20), num_functions=2)
    changes = {**SEVEN, "preloads": (), "sharing": False, "num_nodes": 1, "devices_per_node": 2}
    alone = run(replace(requests, requests=requests.requests[:1]), **changes).calls[0]
    second = run(requests, **changes).calls[1]
    read_s = RooflineCost("llama-2-7b", "l40s").dims.weight_bytes / LOADS.disk_bytes_per_s
    assert second.waited_s["backbone"] - alone.waited_s["backbone"] > 0.9 * read_s
