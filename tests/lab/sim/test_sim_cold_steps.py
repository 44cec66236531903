"""Steps of cold sequences in virtual time, against closed forms."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence as Seq
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from manylora.core.clock import VirtualClock
from manylora.core.config import AdapterConfig, EngineConfig, MemoryConfig, ModelConfig, SchedulerConfig
from manylora.core.costs.shares import MAX_WORKERS
from manylora.core.engine.core import EngineCore
from manylora.core.engine.loop import EngineLoop
from manylora.core.events import Event, RequestPreempted, TokensEmitted
from manylora.core.plan import ARRIVING, IN_HOST, AdapterLoad, Placement, StepPlan, StepResult
from manylora.core.ports import CoreParts
from manylora.core.types import AdapterVersion, Request, SamplingParams, Tier
from manylora.lab.catalog.models import base_shape
from manylora.lab.costs.idle import prompt_step
from manylora.lab.costs.model import FixedCost, SyntheticSequence, synthetic_plan
from manylora.lab.costs.roofline import RooflineCost
from manylora.lab.costs.workers import AssistCost, CpuWorkers
from manylora.lab.sim.run.cold_steps import ColdSteps
from manylora.lab.sim.run.contents import adapter_versions
from manylora.lab.sim.run.executor import SimulatedExecutor, SimulatedLink, SimulatedWork
from manylora.lab.workloads import AdapterSpec

QKV = ("q_proj", "k_proj", "v_proj")
LAYERS = 32
COST = RooflineCost("llama-2-7b", "a10", targets=QKV)
ADAPTERS = adapter_versions(
    (AdapterSpec(name=name, rank=64, targets=QKV) for name in "abcd"), base_shape("llama-2-7b", block_size=16)
)
A, B = ADAPTERS["a"], ADAPTERS["b"]
COPY_S = COST.load_time_s(AdapterLoad(version=A, tier=Tier.DEVICE))
READ_S = COST.load_time_s(AdapterLoad(version=A, tier=Tier.HOST))


def executor(workers: CpuWorkers | None = None) -> SimulatedExecutor:
    assist = AssistCost(COST, workers) if workers is not None else None
    return SimulatedExecutor(COST, vocab_size=100, cold_steps=ColdSteps(COST, LAYERS, assist))


def step(*parts: tuple[AdapterVersion, Placement | None, int], start: int = 0) -> StepPlan:
    """Return a step of sequences: adapter, placement (``None``: on the device) and tokens."""
    plan = synthetic_plan(SyntheticSequence(start, tokens, version.key, version.rank) for version, _, tokens in parts)
    placed = [
        part if placement is None else msgspec.structs.replace(part, placement=placement)
        for part, (_, placement, _) in zip(plan.sequences, parts, strict=True)
    ]
    return StepPlan(step_id=0, sequences=tuple(placed))


def copied(target: SimulatedExecutor, versions: Seq[AdapterVersion], now: float = 0.0) -> list[float]:
    """Start the copies of adapters to the device, and return the times at which they are complete."""
    loads = [AdapterLoad(version=version, tier=Tier.DEVICE) for version in versions]
    return [target.load_adapter(load, now).ready_at for load in loads]


@given(
    read_s=st.floats(0.001, 1.0),
    copy_s=st.floats(0.001, 1.0),
    free_at=st.floats(0.0, 1.0),
    num_layers=st.integers(1, 40),
)
def test_a_copy_follows_its_read_layer_by_layer(read_s: float, copy_s: float, free_at: float, num_layers: int) -> None:
    read = SimulatedLink().load(0.0, read_s, num_layers)
    copy = SimulatedLink().load(free_at, copy_s, num_layers, read)
    at = free_at
    for layer in range(num_layers):
        at = max(at, read.arrivals[layer]) + copy_s / num_layers
        assert copy.arrivals[layer] == pytest.approx(at)
    assert copy.ready_at == copy.arrivals[-1]


@pytest.mark.parametrize("tokens", [1, 16, 1024])
@pytest.mark.parametrize("num_ahead", [0, 3])
def test_a_step_waits_for_each_layer_of_an_adapter_on_its_way(tokens: int, num_ahead: int) -> None:
    target = executor()
    copied(target, [B] * num_ahead)
    copied(target, [A])
    plan = step((A, ARRIVING, tokens))
    step_s = COST.step_time_s(plan)
    # Two stages in line: the slower one is never idle.
    begins_at = num_ahead * COPY_S
    expected = begins_at + max(step_s + COPY_S / LAYERS, COPY_S + step_s / LAYERS)
    assert target.launch(plan, 0.0).ready_at == pytest.approx(max(step_s, expected))


def test_layers_arrive_from_disk_while_later_ones_are_read() -> None:
    target = executor()
    read = target.load_adapter(AdapterLoad(version=A, tier=Tier.HOST), 0.0)
    [copy_ends_at] = copied(target, [A])
    assert read.ready_at == pytest.approx(READ_S) and READ_S > COPY_S
    assert copy_ends_at == pytest.approx(READ_S + COPY_S / LAYERS)  # the last layer, once it has been read
    plan = step((A, ARRIVING, 16))
    assert target.launch(plan, 0.0).ready_at == pytest.approx(copy_ends_at + COST.step_time_s(plan) / LAYERS)
    # A copy that starts after its read waits for nothing.
    assert copied(target, [A], now=1.0) == [pytest.approx(1.0 + COPY_S)]


@pytest.mark.parametrize(
    ("cores", "tokens", "num_shares"), [(1, 256, 1), (24, 16, 1), (24, 1, 1), (24, 256, 12), (24, 512, MAX_WORKERS)]
)
def test_workers_delay_a_layer_by_their_excess_over_the_base_product(cores: int, tokens: int, num_shares: int) -> None:
    """Few rows are one worker's. Each of several reads all weights; copies and handoffs are behind nothing."""
    workers = CpuWorkers(cores=cores)
    target = executor(workers)
    copied(target, [B] * 9 + [A])
    base = COST.price(prompt_step(tokens))
    # q, k and v are a quarter of the attention's weights, and of the layer's 202 million.
    product_s = base.layers_s / LAYERS * 3 * 4096**2 / (COST.dims.active_weights / LAYERS)
    num_weights = 64 * 3 * (4096 + 4096)
    core_s = 2 * num_weights / workers.row_bytes_per_s
    if tokens > 1:
        operations = 2 * -(-tokens // num_shares) * num_weights
        core_s = 2 * num_weights / workers.core_bytes_per_s + operations / workers.core_flops_per_s
    computing_s = max(core_s, num_shares * 2 * num_weights / workers.memory_bytes_per_s)
    moving_s = tokens * (4096 + 3 * 4096) * 4 / COST.hardware.link_bytes_per_s
    delay_s = moving_s + 2 * num_shares * workers.handoff_s + max(0.0, computing_s - product_s)
    expected = sum(base) + LAYERS * delay_s
    assert target.launch(step((A, IN_HOST, tokens)), 0.0).ready_at == pytest.approx(expected)


def test_rows_keep_their_workers_when_the_device_takes_over_others() -> None:
    assist = AssistCost(COST, CpuWorkers(cores=2))
    both = step((A, IN_HOST, 64), (B, IN_HOST, 64)).sequences
    assert assist.layer_delay_s(both, 0.0) > assist.layer_delay_s(both, 0.0, {B.key})
    assert assist.layer_delay_s(both, 0.0, {B.key}) > assist.layer_delay_s(both[1:], 0.0), "alone, B has both workers"


def test_sequences_beside_a_cold_one_pay_for_it() -> None:
    slow = executor(CpuWorkers(cores=1))
    copied(slow, [A])
    warm, cold = step((B, None, 1), (A, None, 512)), step((B, None, 1), (A, IN_HOST, 512))
    assert slow.launch(cold, 0.0).ready_at > 1.5 * executor().launch(warm, 0.0).ready_at


def test_a_step_waits_for_weights_that_no_worker_takes() -> None:
    for workers, tokens, start in (
        (CpuWorkers(cores=999, max_prompt_tokens=256), 257, 0),
        (CpuWorkers(cores=999, prompts_only=True), 1, 20),
    ):
        target = executor(workers)
        copied(target, [B] * 20)
        [arrives_at] = copied(target, [A])
        plan = step((A, IN_HOST, tokens), start=start)
        decoding = StepPlan(
            step_id=0, sequences=tuple(msgspec.structs.replace(one, num_prompt_tokens=20) for one in plan.sequences)
        )
        expected = arrives_at + COST.step_time_s(plan)
        assert target.launch(decoding, 0.0).ready_at == pytest.approx(expected)


def test_the_device_takes_over_the_layers_that_have_arrived() -> None:
    plan = step((A, IN_HOST, 128))
    ends = []
    for takes_over in (False, True):
        target = executor(CpuWorkers(cores=2, takes_over=takes_over))
        copied(target, [A])
        ends.append(target.launch(plan, 0.0).ready_at)
    whole, taken_over = ends
    resident = COST.step_time_s(plan)
    # Layers arrive six times as fast as the device runs: all but the first are there.
    assert resident < taken_over == pytest.approx(resident + (whole - resident) / LAYERS, rel=0.01)


def test_a_cpu_reads_the_host_image_at_no_cost_of_its_own() -> None:
    target = SimulatedExecutor(FixedCost(), vocab_size=100, cold_steps=ColdSteps(FixedCost(), LAYERS))
    copied(target, [A])
    at = target.launch(step((A, IN_HOST, 7)), 0.0).ready_at
    assert at == SimulatedExecutor(FixedCost(), vocab_size=100).launch(step((A, None, 7)), 0.0).ready_at


def test_a_layer_that_has_not_arrived_is_left_to_the_workers_again() -> None:
    """The link is so slow that the device overtakes the copy: the workers then compute every second layer or so."""
    cost = RooflineCost("llama-2-7b", dataclasses.replace(COST.hardware, link_bytes_per_s=3e9), targets=QKV)
    assist = AssistCost(cost, CpuWorkers(cores=2, takes_over=True))
    target = SimulatedExecutor(cost, vocab_size=100, cold_steps=ColdSteps(cost, LAYERS, assist))
    copied(target, [A])
    plan = step((A, IN_HOST, 64))
    copy_s = cost.load_time_s(AdapterLoad(version=A, tier=Tier.DEVICE)) / LAYERS
    layer_s, assisted_s = cost.step_time_s(plan) / LAYERS, assist.step_time_s(plan, plan.sequences) / LAYERS
    assert layer_s < copy_s < assisted_s
    at, num_on_cpu = 0.0, 0
    for layer in range(LAYERS):
        is_there = (layer + 1) * copy_s <= at
        at += layer_s if is_there else assisted_s
        num_on_cpu += not is_there
    assert 2 < num_on_cpu < LAYERS - 2
    work = target.launch(plan, 0.0)
    assert work.ready_at == pytest.approx(at)
    assert isinstance(work.result, StepResult) and work.result.cpu_share == pytest.approx(num_on_cpu / LAYERS)


# -- late adapters -----------------------------------------------------------------------------------------------------


def bounded(max_wait_s: float) -> SimulatedExecutor:
    return SimulatedExecutor(COST, vocab_size=100, cold_steps=ColdSteps(COST, LAYERS, max_wait_s=max_wait_s))


def result_of(work: SimulatedWork) -> StepResult:
    assert isinstance(work.result, StepResult)
    return work.result


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_step_goes_on_without_the_sequences_of_an_adapter_that_is_late(has_begun: bool) -> None:
    """Before its copy has begun, its rows are not in the step; afterwards they are, for nothing."""
    max_wait_s = COPY_S / LAYERS / 2
    target = bounded(max_wait_s)
    copied(target, [B] * (1 - has_begun))
    copied(target, [A])
    plan = step((A, ARRIVING, 16), (B, None, 1))
    work = target.launch(plan, 0.0)
    assert result_of(work).late == {0} and set(result_of(work).tokens) == {1}
    rest = plan if has_begun else step((B, None, 1))
    assert work.ready_at == pytest.approx(max_wait_s + COST.step_time_s(rest))
    # The step that was planned ahead has the sequence, and leaves it out.
    ahead = target.launch(plan, 0.0)
    assert not result_of(ahead).late and set(result_of(ahead).tokens) == {1}
    assert ahead.ready_at == pytest.approx(work.ready_at + COST.step_time_s(step((B, None, 1))))
    again = target.launch(plan, work.ready_at)
    assert not result_of(again).late and set(result_of(again).tokens) == {0, 1}


def test_waits_for_all_adapters_add_up_and_one_that_keeps_up_goes_on() -> None:
    loads = [AdapterLoad(version=version, tier=Tier.DEVICE) for version in (A, B)]
    plan = step((A, ARRIVING, 16), (B, ARRIVING, 16))
    for num_copies, late in ((1.1, set()), (1.01, {1}), (0.5, {1}), (0.5 / LAYERS, {0, 1})):
        max_wait_s = num_copies * COPY_S
        target = bounded(max_wait_s)
        for load in loads:
            target.load_adapter(load, 0.0)
        work = target.launch(plan, 0.0)
        assert result_of(work).late == late
        assert work.ready_at <= max_wait_s + COST.step_time_s(plan) + 1e-9


def test_an_engine_in_virtual_time_gives_a_late_request_up_and_answers_it_later() -> None:
    """Its adapter takes 16 s from disk. Its neighbour waits for it for one second, once."""
    base = base_shape("llama-2-7b", block_size=16)
    cost = FixedCost(disk_bytes_per_s=A.disk_bytes / 16)
    events: list[Event] = []
    core = EngineCore(
        CoreParts(
            base=base,
            num_pages=400,
            executor=SimulatedExecutor(cost, vocab_size=base.vocab_size, cold_steps=ColdSteps(cost, LAYERS)),
            waits_by_layer=True,
        ),
        EngineConfig(
            model=ModelConfig(model="base"),
            scheduler=SchedulerConfig(),
            memory=MemoryConfig(),
            adapters=AdapterConfig(cold_start="layers", look_ahead=0),
        ),
        served_name="base",
        sinks=[events.append],
    )
    core.adapters.register("a", A, 0.0, tier=Tier.DISK)
    requests = []
    for at, model, num_tokens in ((0.0, "base", 100), (0.1, "a", 3)):
        sampling = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
        requests.append((at, Request(request_id=model, prompt=(1,) * 8, sampling=sampling, model=model)))
    EngineLoop(core, VirtualClock(), on_outputs=lambda outputs, now: None, arrivals=requests).run()
    core.check_integrity()
    assert [event.request_id for event in events if isinstance(event, RequestPreempted)] == ["a"]
    tokens = [event for event in events if isinstance(event, TokensEmitted)]
    emitted = {name: [one.at for one in tokens if name in one.request_ids] for name in ("a", "base")}
    assert len(emitted["a"]) == 3 and emitted["a"][0] > 16.0
    gaps = sorted(after - before for before, after in pairwise(emitted["base"]))
    assert len(gaps) == 99 and gaps[-2] < 0.1 < 1.0 <= gaps[-1] < 1.1
