"""Cold starts in the core: loads by layers, their failures, and the choice of a mode."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from fake_executor import FakeExecutor, FakeWork
from harness import Rig, make_rig, request, small_base, version

from manylora.core.clock import VirtualClock
from manylora.core.config import AdapterConfig, EngineConfig, ModelConfig
from manylora.core.engine.adapters.cold_starts import ColdStarts
from manylora.core.engine.adapters.loader import LATE, LoadsInFlight
from manylora.core.engine.adapters.residency import Residency, TierState
from manylora.core.engine.loop import EngineLoop
from manylora.core.engine.status import ColdStartStatus, EngineStats
from manylora.core.errors import ConfigError
from manylora.core.events import ColdStartChosen, ColdStartEnded, RequestAdmitted, RequestPreempted
from manylora.core.memory import ReloadCosts
from manylora.core.plan import ARRIVING, IN_HOST, ON_DEVICE, PlannedSequence, StepPlan, StepResult
from manylora.core.ports import CoreParts
from manylora.core.types import AdapterKey, ColdStart, SamplingParams, Tier
from manylora.serving.hosting.fleet.snapshot import merge_snapshots
from manylora.serving.metrics.scrape import snapshot_metrics


def rig_of(mode: str = "layers", *, on_disk: bool = False, **options: Any) -> Rig:
    """Make a rig with an adapter ``x`` in host memory or on disk."""
    options.setdefault("waits_by_layer", True)
    adapters = AdapterConfig(max_cpu_loras=1 if on_disk else None, cold_start=mode, look_ahead=0)
    rig = make_rig(adapters=adapters, **options)
    rig.register("x", 3)
    if on_disk:
        rig.register("y")  # which sends x to disk
    return rig


def placements(rig: Rig) -> list[object]:
    return [part.placement for part in rig.executor.plan.sequences]


def of(rig: Rig, kind: type) -> list[Any]:
    return [event for event in rig.events if isinstance(event, kind)]


# -- the option -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "able", "expected"),
    [
        ("assist", {}, "auto, wait"),
        ("layers", {"reads_host": True}, "auto, wait, assist"),
        ("assist", {"waits_by_layer": True}, "auto, wait, layers"),
    ],
)
def test_a_mode_that_the_executor_cannot_do_is_refused_by_name(mode, able, expected):
    with pytest.raises(ConfigError, match=f"cold_start = '{mode}'.* expected one of {expected}"):
        make_rig(adapters=AdapterConfig(cold_start=mode), **able)
    with pytest.raises(ConfigError, match="cold_start = 'x', expected one of auto, wait, assist, layers"):
        AdapterConfig(cold_start="x")


def test_nothing_is_chosen_or_counted_where_the_executor_can_only_wait():
    rig = rig_of("auto", waits_by_layer=False)
    rig.add(request("a", model="x"))
    rig.drain()
    assert not of(rig, ColdStartChosen) and not rig.core.stats().cold_starts


# -- loads by layers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_disk", [False, True])
def test_a_request_runs_while_its_weights_arrive(on_disk):
    rig = rig_of(on_disk=on_disk)
    rig.add(request("a", model="x"), request("b", model="x"))
    rig.turn()
    assert [load.tier for load, _ in rig.executor.loads] == ([Tier.HOST] if on_disk else []) + [Tier.DEVICE]
    assert all(load.is_urgent for load, _ in rig.executor.loads if load.tier is Tier.HOST)
    assert placements(rig) == [ARRIVING, ARRIVING]
    rig.core.check_integrity()
    rig.executor.complete_step()  # it has waited for every layer
    rig.turn()
    assert placements(rig) == [ARRIVING, ARRIVING]
    rig.core.check_integrity()
    rig.step()
    assert placements(rig) == [ON_DEVICE, ON_DEVICE]
    rig.drain()
    assert rig.finish("a") == rig.finish("b") == "length"
    assert rig.core.adapters.status("x", rig.now).tier is Tier.DEVICE
    assert not any(event.adapter_was_resident for event in of(rig, RequestAdmitted))


@pytest.mark.parametrize("mode", ["assist", "layers"])
def test_the_host_copy_of_a_cold_start_stays_until_no_sequence_reads_it(mode):
    adapters = AdapterConfig(cold_start=mode, look_ahead=0, keep_host_copies=False)
    rig = make_rig(adapters=adapters, waits_by_layer=True, reads_host=True)
    rig.register("x", 3)
    rig.add(request("a", model="x", max_tokens=4))
    rig.turn()
    assert placements(rig)[0] is not ON_DEVICE and rig.core.stats().num_host == 1
    rig.step()
    rig.step()
    assert placements(rig) == [ON_DEVICE] and rig.core.stats().num_host == 1
    rig.drain()
    assert rig.finish("a") == "length"
    assert rig.core.adapters.status("x", rig.now).tier is Tier.DEVICE and rig.core.stats().num_host == 0
    rig.core.check_integrity()


def test_a_copy_starts_beside_a_read_that_is_in_flight():
    rig = rig_of(on_disk=True, num_pages=10)
    rig.core.adapters.warm("x", rig.now)
    assert [load.tier for load, _ in rig.executor.loads] == [Tier.HOST]
    rig.add(request("a", model="x"))
    rig.turn()
    assert [load.tier for load, _ in rig.executor.loads] == [Tier.HOST, Tier.DEVICE]
    assert placements(rig) == [ARRIVING]
    rig.drain()
    assert rig.finish("a") == "length"


def test_a_request_without_pages_for_its_adapter_waits():
    rig = rig_of(num_pages=6, prefix_caching=False)
    rig.add(request("base", num_prompt=16, max_tokens=3), request("a", model="x", max_tokens=2))
    rig.turn()
    assert len(rig.executor.plan.sequences) == 1 and not rig.executor.loads
    rig.drain()
    assert rig.finish("a") == "length"


def test_a_copy_that_waits_for_its_read_leaves_the_link_to_others():
    costs = ReloadCosts()
    slow, other = version("slow"), version("other")
    loads = LoadsInFlight(costs)
    own_s = costs.copy.seconds(slow.host_bytes)
    loads.started(slow, Tier.HOST, FakeWork(), 0.0)
    loads.started(slow, Tier.DEVICE, FakeWork(), 0.0)
    waiting = Residency(other, host=TierState.RESIDENT)
    assert loads.route(waiting, 100.0).copy_begins_s == pytest.approx(own_s)
    loads.ended(loads.in_flight[0], 100.0, ok=True)
    late_s = 10 * own_s  # from here on the link holds it up
    assert loads.route(waiting, 100.0 + late_s).copy_begins_s == pytest.approx((LATE - 1) * late_s)


def test_a_read_that_yields_no_layers_is_known_as_such_until_it_has_found_their_digests():
    rig = rig_of("wait", on_disk=True)
    made = dataclasses.replace(version("new"), is_whole=True)
    rig.core.adapters.register("z", made, rig.now, tier=Tier.DISK)
    for digests in (b"", b"digests"):
        rig.core.adapters.warm("z", rig.now)
        load, work = rig.executor.loads[0]
        assert (load.version.layer_digests, load.version.is_whole) == (digests, not digests)
        assert rig.core._loader.loads.route(rig.core._cache.residencies[made.key], rig.now).is_whole == (not digests)
        rig.executor.complete_load()
        work.result = dataclasses.replace(work.result, layer_digests=b"digests")
        rig.turn()
        rig.executor.complete_load(error="the link is down")
        rig.turn()
        rig.register("y", key=f"key-{digests!r}", replace=True)  # which sends z to disk


def test_a_copy_may_be_reported_before_its_read_and_the_read_may_fail_then():
    rig = rig_of(on_disk=True)
    rig.add(request("a", model="x", max_tokens=6))
    rig.turn()
    rig.executor.complete_load(1)
    rig.executor.complete_step()
    rig.turn()
    assert placements(rig) == [ON_DEVICE]
    rig.core.check_integrity()
    rig.executor.complete_load(0, error="no memory for the image")
    rig.drain()
    assert rig.finish("a") == "length"


@pytest.mark.parametrize("then", ["arrives", "fails", "is cancelled"])
@pytest.mark.parametrize("plan_ahead", [False, True])
def test_requests_that_a_step_gave_up_wait_for_the_whole_adapter(plan_ahead, then):
    """Others go on meanwhile; neither they nor requests to come begin on the layers of that load."""
    rig = rig_of(on_disk=True, plan_ahead=plan_ahead)
    rig.add(request("other", max_tokens=20), request("a", model="x", prompt_logprobs=0))
    rig.turn()
    assert placements(rig) == [ON_DEVICE, ARRIVING]
    rig.turn()
    assert rig.executor.num_steps == 1 + plan_ahead
    rig.executor.complete_step(late=["key-x"])
    rig.turn()
    rig.core.check_integrity()
    rig.add(request("b", model="x"))
    for _ in range(3):
        rig.executor.complete_step(late=["key-x"])
        rig.turn()
        rig.core.check_integrity()
        assert placements(rig) == [ON_DEVICE]
    assert rig.core._cold_starts._corrections.factor(ColdStart.LAYERS) >= 1.0
    if then == "is cancelled":
        assert rig.core.cancel("a", rig.now)
    rig.executor.complete_load(0, error="its server is gone" if then == "fails" else None)
    rig.executor.complete_load(0)
    rig.drain()
    rig.core.check_integrity()
    assert rig.finish("other") == "length"
    assert rig.finish("a") == {"arrives": "length", "fails": "error", "is cancelled": "cancelled"}[then]
    assert rig.finish("b") == ("error" if then == "fails" else "length")
    reports = [output.prompt_logprobs for output in rig.outputs["a"] if output.prompt_logprobs]
    assert [len(report.ranks) // 4 for report in reports] == ([4] if then == "arrives" else [])


# -- failures ---------------------------------------------------------------------------------------------------------


def test_pages_of_a_failed_load_are_free_once_no_step_uses_them_and_only_its_requests_end():
    rig = rig_of(on_disk=True, prefix_caching=False)
    rig.add(request("a", model="x"), request("other"))
    rig.turn()
    rig.executor.complete_load(0, error="its files changed on disk")
    rig.executor.complete_load(0)  # the copy fails with its read
    rig.turn()
    rig.add(request("late", model="x", max_tokens=2))
    rig.turn()  # a step still uses the pages
    rig.core.check_integrity()
    assert rig.core.stats().num_adapter_pages == 3
    assert "late" not in rig.outputs
    rig.executor.complete_step()
    rig.turn()
    rig.core.check_integrity()
    assert rig.finish("a") == "error"
    assert rig.outputs["a"][-1].error == "adapter 'x': its files changed on disk"
    rig.drain()
    assert (rig.finish("other"), rig.finish("late")) == ("length", "length")


def test_requests_that_are_not_in_a_step_end_with_the_load():
    rig = rig_of(max_num_batched_tokens=4, prefix_caching=False)
    rig.add(request("a", num_prompt=12, model="x"), request("b", num_prompt=12))
    rig.turn()
    rig.executor.complete_step()
    rig.add(request("waits", model="x"))
    rig.executor.complete_load(error="gone")
    rig.turn()
    assert rig.finish("a") == rig.finish("waits") == "error"
    assert rig.core.stats().num_adapter_pages == 0
    rig.drain()
    assert rig.finish("b") == "length"


def test_a_step_that_loses_a_layer_ends_that_adapters_requests_alone():
    rig = rig_of()
    rig.register("z")
    rig.add(request("a", model="x"), request("b", model="z"), request("c", model="x"), request("d"))
    rig.turn()
    assert placements(rig) == [ARRIVING, ARRIVING, ARRIVING, ON_DEVICE]
    rig.executor.complete_step(lost={"key-x"})
    rig.turn()
    rig.core.check_integrity()
    assert rig.finish("a") == rig.finish("c") == "error"
    assert rig.outputs["a"][-1].error == "adapter 'x': its layers did not arrive"
    assert rig.outputs["a"][-1].tokens == ()
    rig.drain()
    assert rig.finish("b") == rig.finish("d") == "length"


def test_a_sequence_that_failed_is_left_out_of_the_step_behind():
    rig = rig_of(plan_ahead=True)
    rig.add(request("a", model="x", max_tokens=8), request("b", max_tokens=8))
    rig.turn()
    rig.turn()
    assert rig.executor.num_steps == 2
    rig.executor.complete_step(lost={"key-x"})
    rig.turn()
    rig.core.check_integrity()
    assert rig.finish("a") == "error" and rig.core.stats().num_adapter_pages == 3
    rig.executor.complete_step()
    rig.turn()
    rig.core.check_integrity()
    rig.drain()
    assert len(rig.tokens("b")) == 8
    assert rig.core.stats().num_adapter_pages == 0


def test_kv_of_a_load_that_fails_later_is_never_found_again():
    """The step has waited for all weights and gave a token; then the hash of the files turned out wrong."""
    rig = rig_of()
    rig.add(request("a", num_prompt=9, model="x", max_tokens=6))
    rig.turn()
    rig.executor.complete_step()
    rig.turn()
    assert len(rig.tokens("a")) == 1
    rig.executor.complete_load(error="its hash is wrong")
    rig.executor.complete_step()
    rig.turn()
    assert rig.finish("a") == "error"
    rig.add(dataclasses.replace(request("a", num_prompt=9, model="x", max_tokens=6), request_id="again"))
    rig.drain()  # the executor fails a step that reads such KV
    assert rig.finish("again") == "length"
    assert rig.outputs["again"][-1].num_cached_tokens == 0


def test_kv_of_a_load_that_succeeds_is_found():
    rig = rig_of()
    rig.add(request("a", num_prompt=9, model="x", max_tokens=6))
    rig.drain()
    rig.add(dataclasses.replace(request("a", num_prompt=9, model="x", max_tokens=1), request_id="again"))
    rig.drain()
    assert rig.outputs["again"][-1].num_cached_tokens == 8


@pytest.mark.parametrize("plan_ahead", [False, True])
def test_cancelled_while_its_weights_arrive(plan_ahead):
    rig = rig_of(on_disk=True, plan_ahead=plan_ahead)
    rig.add(request("a", model="x"))
    rig.turn()
    rig.turn()
    assert rig.core.cancel("a", rig.now)
    rig.executor.complete_step(lost={"key-x"})
    while rig.core.has_requests or rig.core.has_pending_work:
        rig.step()
        rig.core.check_integrity()
    assert rig.finish("a") == "cancelled"
    assert rig.core.stats().num_adapter_pages == rig.core.stats().num_kv_pages == 0


@pytest.mark.parametrize("then", ["arrives", "fails", "is cancelled"])
@pytest.mark.parametrize("mode", ["layers", "assist"])
def test_preempted_while_its_weights_arrive(mode, then):
    """An older sequence takes its KV; the pages of the copy in flight stay claimed until that has ended."""
    rig = rig_of(mode, num_pages=6, prefix_caching=False, reads_host=True)
    rig.add(request("old", num_prompt=2, max_tokens=8))
    rig.turn()
    rig.executor.complete_step()
    rig.add(request("a", model="x", max_tokens=3))
    rig.turn()
    assert placements(rig) == [ON_DEVICE, ARRIVING if mode == "layers" else IN_HOST]
    while not of(rig, RequestPreempted):
        rig.executor.complete_step()
        rig.turn()
        rig.core.check_integrity()
    assert rig.executor.loads and rig.core.stats().num_adapter_pages == 3
    if then == "is cancelled":
        assert rig.core.cancel("a", rig.now)
    rig.executor.complete_load(0, error="the link is down" if then == "fails" else None)
    while rig.core.has_requests or rig.core.has_pending_work:
        rig.step()
        rig.core.check_integrity()
    assert rig.finish("old") == "length"
    assert rig.finish("a") == {"arrives": "length", "fails": "error", "is cancelled": "cancelled"}[then]
    assert rig.core.stats().num_kv_pages == 0


def test_sequences_of_an_adapter_share_its_placement():
    rig = rig_of("auto", reads_host=True)
    rig.add(request("a", model="x", max_tokens=9))
    rig.turn()
    assert placements(rig) == [IN_HOST]
    rig.executor.complete_step()
    rig.register("y")
    rig.add(request("b", model="x"))
    rig.turn()
    assert placements(rig) == [IN_HOST, IN_HOST]
    assert list(rig.core._cache.host.recent()) == ["key-x", "key-y"], "each use of an image counts"
    rig.drain()


# -- the choice -------------------------------------------------------------------------------------------------------


def test_a_request_alone_begins_when_its_layers_are_due_and_the_loop_wakes_for_it():
    rig = rig_of("auto")
    rig.core._costs.copy.observe(3 * 512, 1.0)
    for _ in range(50):
        rig.core._costs.copy.observe(3 * 512, 1.0)
        rig.core._costs.step.observe(5, 0.1)
    rig.add(request("a", model="x"))
    rig.core.launch(0.0)
    assert rig.executor.loads and rig.executor.plan is None
    begins_at = rig.core.next_event_at()
    assert begins_at == pytest.approx(1.0 - 0.1 / 2, rel=0.05)
    rig.core.launch(begins_at - 0.001)
    assert rig.executor.plan is None
    rig.core.launch(rig.core.next_event_at())
    assert placements(rig) == [ARRIVING]
    (chosen,) = of(rig, ColdStartChosen)
    assert chosen.mode is ColdStart.LAYERS
    assert chosen.expected_s[ColdStart.LAYERS] < chosen.expected_s[ColdStart.WAIT]


@pytest.mark.parametrize("mode", ["auto", "assist"])
def test_an_assisted_prompt_beside_others_runs_in_chunks_that_the_device_hides(mode):
    rig = rig_of(mode, reads_host=True, waits_by_layer=False, is_accelerated=True)
    costs, assist = rig.core._costs, rig.core._cold_starts._assist
    for _ in range(50):
        costs.copy.observe(3 * 512, 1.0)
        costs.step.observe(1, 0.1)
    rig.add(request("old", max_tokens=40))
    rig.turn()
    rig.step()
    assist._handoff_s, assist._row_rank_s = (
        0.0,
        0.1 / 2 / 20 / next(iter(rig.core._cache.residencies.values())).version.rank,
    )
    rig.add(request("a", num_prompt=100, model="x", max_tokens=2))
    rig.step()
    *_, part = rig.executor.plan.sequences
    assert part.placement is IN_HOST
    chunk = part.num_tokens
    assert 16 <= chunk < 40 if mode == "auto" else chunk == 100
    rig.executor.complete_load()
    rig.step()
    *_, part = rig.executor.plan.sequences
    assert part.placement is ON_DEVICE and part.num_tokens == (100 - chunk if mode == "auto" else 1)
    rig.drain()


def test_a_request_that_is_cancelled_before_it_begins_leaves_no_event():
    rig = rig_of("auto")
    rig.add(request("a", model="x"))
    rig.core.launch(0.0)
    assert rig.core.next_event_at() < 1.0
    rig.core.cancel("a", 0.0)
    rig.executor.complete_load()
    rig.core.collect(0.0)
    EngineLoop(rig.core, VirtualClock(), on_outputs=lambda outputs, now: None).run()


def test_a_choice_is_made_again_when_the_adapter_has_moved():
    rig = rig_of("auto", on_disk=True, reads_host=True, waits_by_layer=False)
    rig.add(request("a", model="x"))
    rig.turn()
    rig.executor.complete_load()
    rig.turn()
    assert placements(rig) == [IN_HOST]
    rig.executor.complete_step()
    rig.turn()
    assert [event.mode for event in of(rig, ColdStartChosen)] == [ColdStart.ASSIST, ColdStart.ASSIST]
    (ended,) = of(rig, ColdStartEnded)
    assert (ended.mode, ended.actual_s, ended.is_measured) == (ColdStart.ASSIST, 1.0, True)
    rig.drain()
    (assist,) = (one for one in rig.core.stats().cold_starts if one.mode == "assist")
    assert (assist.num_starts, assist.num_measured, assist.actual_s) == (1, 1, 1.0)
    assert assist.error_s == pytest.approx(1.0 - ended.expected_s)


def test_a_wait_for_memory_teaches_nothing():
    rig = rig_of(num_pages=6, prefix_caching=False)
    rig.add(request("base", num_prompt=16, max_tokens=3), request("a", model="x", max_tokens=2))
    rig.drain()
    (ended,) = of(rig, ColdStartEnded)
    assert not ended.is_measured
    (layers,) = (one for one in rig.core.stats().cold_starts if one.mode == "layers")
    assert (layers.num_starts, layers.num_measured, layers.correction) == (1, 0, 1.0)


def test_a_handoff_is_learnt_beside_steps_that_become_longer():
    """Nearly every step has cold rows while KV grows: the line of steps over tokens is old, and teaches no handoff."""
    costs, layers, handoff_s = ReloadCosts(), 32, 20e-6
    core, config = make_rig().core, EngineConfig(model=ModelConfig(model="base"))
    parts = CoreParts(
        base=dataclasses.replace(small_base(), num_layers=layers),
        num_pages=64,
        executor=FakeExecutor(vocab_size=1, block_size=4),
        is_accelerated=True,
        reads_host=True,
        waits_by_layer=True,
    )
    cold_starts = ColdStarts(parts, config, core._cache, core._loader.loads, costs, lambda event: None)
    part = PlannedSequence(
        seq_id=0,
        tokens=[1],
        num_prompt_tokens=1,
        start=0,
        num_tokens=1,
        pages=(0,),
        adapter=AdapterKey("x"),
        rank=16,
        sampling=SamplingParams(),
        is_sampled=True,
        seed=0,
        placement=IN_HOST,
    )
    for number in range(400):
        took_s = 0.020 + 0.00002 * number
        if number < 50 or number % 20 == 0:
            costs.step.observe(8, took_s)
        else:
            plan = StepPlan(step_id=number, sequences=(part,))
            assert not cold_starts.learn_step(plan, 8, took_s + 2 * layers * handoff_s, StepResult())
    assert cold_starts._assist.delay_s(16, 0.020, layers) == pytest.approx(2 * layers * handoff_s, rel=0.15)

    # Launched one by one, it teaches that, and not the line of replayed steps: also where the device took over.
    line_s = costs.step.seconds(8)
    for cpu_share in (1.0, 0.0):
        result = StepResult(cpu_share=cpu_share, launch_s=0.080)
        assert not cold_starts.learn_step(StepPlan(step_id=900, sequences=(part,)), 8, 0.081, result)
    assert cold_starts.learn_step(StepPlan(step_id=900, sequences=(part,)), 8, 0.020, StepResult(cpu_share=0.0))
    learnt_s = cold_starts._corrections.launch_s(ColdStart.ASSIST)
    assert learnt_s == pytest.approx((0.080 - line_s) * (0.2 + 0.2 * 0.8) * 0.8)
    assert cold_starts._assist.delay_s(16, 0.020, layers) == pytest.approx(2 * layers * handoff_s, rel=0.3)


def test_cold_starts_of_several_engines_are_merged_and_scraped():
    def stats(*modes: ColdStartStatus) -> EngineStats:
        numbers: dict[str, Any] = {
            field.name: 1 for field in dataclasses.fields(EngineStats) if field.default is dataclasses.MISSING
        }
        return EngineStats(**{**numbers, "running_adapters": (), "waiting_adapters": ()}, cold_starts=modes)

    def status(mode: str, count: int, error_s: float) -> ColdStartStatus:
        return ColdStartStatus(
            mode=mode,
            num_starts=count + 1,
            num_measured=count,
            expected_s=0.5 * count,
            actual_s=1.0 * count,
            error_s=error_s,
            relative_error=error_s,
            correction=1.0,
        )

    parts = [stats(status("wait", 1, 0.4), status("assist", 0, 0.0)), stats(status("wait", 3, 0.8))]
    merged, _ = merge_snapshots([(part, ()) for part in parts])
    wait, assist = merged.cold_starts
    assert (wait.num_starts, wait.num_measured, wait.actual_s) == (6, 4, 4.0)
    assert wait.error_s == pytest.approx(0.7)
    assert assist == status("assist", 0, 0.0)
    config = EngineConfig(model=ModelConfig(model="m"))
    samples = {
        (sample.name, sample.labels.get("mode")): sample.value
        for metric in snapshot_metrics(merged, (), config, max_model_len=256, served_name="m", now_s=0.0)
        for sample in metric.samples
    }
    assert samples["manylora_cold_starts_total", "wait"] == 6
    assert samples["manylora_cold_start_expected_seconds_total", "wait"] == 2.0
    assert samples["manylora_cold_start_actual_seconds_total", "wait"] == 4.0
    assert samples["manylora_cold_start_error_seconds", "wait"] == pytest.approx(0.7)
