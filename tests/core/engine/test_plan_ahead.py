"""The next step planned while one runs: what it may decide, and what becomes of those that end meanwhile."""

from __future__ import annotations

import pytest
from fake_executor import FakeExecutor
from harness import Rig, make_rig, request, small_base, version

from manylora.core.clock import VirtualClock
from manylora.core.config import AdapterConfig, EngineConfig, MemoryConfig, ModelConfig, SchedulerConfig
from manylora.core.engine.core import EngineCore
from manylora.core.engine.loop import EngineLoop
from manylora.core.engine.steps.plan_ahead import fill_in, plan_at
from manylora.core.events import Event, RequestPreempted
from manylora.core.plan import AdapterLoad, PlannedSequence, StepPlan
from manylora.core.ports import CoreParts, EngineParts
from manylora.core.scheduling import Sequence
from manylora.core.types import Output, Request, SampledToken, SamplingParams, Tier
from manylora.lab.costs.model import FixedCost
from manylora.lab.sim.run.contents import synthetic_token
from manylora.lab.sim.run.executor import SimulatedExecutor


def ahead(**options: object) -> Rig:
    return make_rig(plan_ahead=True, **options)  # type: ignore[arg-type]


def parts(rig: Rig) -> list[dict[int, int]]:
    """Return the steps in flight: tokens by sequence."""
    return [{part.seq_id: part.num_tokens for part in plan.sequences} for plan, _ in rig.executor._steps]


def test_one_step_runs_and_the_next_is_planned() -> None:
    rig = ahead()
    rig.add(request("a", 5), request("b", 3))
    rig.turn()
    assert parts(rig) == [{0: 5, 1: 3}]
    rig.turn()
    assert parts(rig) == [{0: 5, 1: 3}, {0: 1, 1: 1}]
    rig.turn()
    assert rig.executor.num_steps == 2, "never more than two"
    first, second = (plan for plan, _ in rig.executor._steps)
    assert (first.step_id, second.step_id) == (0, 1)
    assert [part.awaits_token for part in (*first.sequences, *second.sequences)] == [False, False, True, True]


def test_a_request_that_arrives_before_it_is_planned_is_in_it() -> None:
    rig = ahead()
    rig.add(request("a"))
    rig.turn()
    rig.add(request("b"))
    rig.turn()
    assert parts(rig) == [{0: 5}, {0: 1, 1: 5}]


def test_it_is_planned_late() -> None:
    rig = ahead()
    rig.add(request("a"))
    rig.core.launch(10.0)
    planned_at = rig.core.next_event_at()
    assert planned_at == plan_at(10.0, rig.core._costs.step.seconds(5))
    rig.core.launch(planned_at - 1e-6)
    assert rig.executor.num_steps == 1
    rig.core.launch(planned_at)
    assert rig.executor.num_steps == 2
    assert plan_at(1.0, 0.004) == 1.002
    assert plan_at(1.0, 0.100) == pytest.approx(1.097)


def test_an_answer_that_is_full_runs_no_more() -> None:
    rig = ahead()
    rig.add(request("a", 5, max_tokens=1), request("b", 5, max_tokens=2))
    rig.turn()
    rig.turn()
    assert parts(rig) == [{0: 5, 1: 5}, {1: 1}]
    rig.drain()
    assert len(rig.tokens("a")) == 1
    assert len(rig.tokens("b")) == 2


def stopped_while_ahead() -> tuple[Rig, int]:
    """Return an engine whose only request ended by its first token while its next step is in flight, and its pages."""
    rig = ahead()
    rig.register("lora")
    rig.add(request("a", 5, 4, "lora", stop_token_ids=tuple(range(1000))))
    rig.turn()
    rig.executor.complete_load()
    rig.turn()
    rig.turn()
    assert parts(rig) == [{0: 5}, {0: 1}]
    num_pages = rig.core.stats().num_kv_pages
    rig.executor.complete_step()
    rig.turn()
    return rig, num_pages


def test_an_answer_that_stops_is_told_at_once_and_keeps_its_pages_until_its_last_step_is_over() -> None:
    rig, num_pages = stopped_while_ahead()
    assert rig.finish("a") == "stop"
    assert len(rig.tokens("a")) == 1
    assert not rig.core.has_requests
    assert rig.core.has_pending_work
    stats = rig.core.stats()
    assert stats.num_kv_pages == num_pages
    assert stats.running_adapters == ("lora",)
    rig.core.check_integrity()
    rig.executor.complete_step()
    rig.turn()
    stats = rig.core.stats()
    assert (stats.num_kv_pages, stats.num_running, stats.running_adapters) == (0, 0, ())
    assert len(rig.outputs["a"]) == 1, "what its last step yielded is dropped"


def test_its_id_can_be_used_again_and_it_cannot_be_cancelled() -> None:
    rig, _ = stopped_while_ahead()
    assert not rig.core.cancel("a", rig.now)
    rig.add(request("a", 5, 2))
    rig.drain()
    assert rig.finish("a") == "length"


def test_cancelled_between_two_steps() -> None:
    rig = ahead()
    rig.add(request("a"), request("b"))
    rig.turn()
    rig.turn()
    assert rig.core.cancel("a", rig.now)
    rig.executor.complete_step()
    rig.turn()
    assert rig.finish("a") == "cancelled"
    assert rig.tokens("a") == []
    assert parts(rig) == [{0: 1, 1: 1}]
    rig.drain()
    assert len(rig.tokens("b")) == 4


def test_cancelled_before_the_next_step_is_planned() -> None:
    rig = ahead()
    rig.add(request("a"), request("b"))
    rig.turn()
    assert rig.core.cancel("a", rig.now)
    rig.turn()
    assert parts(rig) == [{0: 5, 1: 5}, {1: 1}]


def test_nobody_is_preempted_ahead() -> None:
    """Eight pages of four tokens, two requests that come to need five each."""
    rig = ahead(num_pages=8, prefix_caching=False)
    rig.add(request("a", 4, 16), request("b", 4, 16))
    rig.turn()
    for _ in range(100):
        if not rig.core.has_requests:
            break
        rig.turn()  # planned ahead where it can be
        in_flight = {seq_id for step in parts(rig) for seq_id in step}
        held = {sequence.seq_id for sequence in rig.core._running.sequences}
        assert in_flight <= held
        rig.executor.complete_step()
        rig.turn()
    assert any(isinstance(event, RequestPreempted) for event in rig.events)
    assert (len(rig.tokens("a")), len(rig.tokens("b"))) == (16, 16)


def test_nobody_is_squashed_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = ahead()
    rig.add(request("a"), request("b"))
    rig.turn()
    victims = [one for one in rig.core._running.sequences if one.request.request_id == "b"]

    def squash(now: float) -> list[Sequence]:
        return [one for one in victims if one.num_preemptions == 0]

    monkeypatch.setattr(rig.core._policy, "squash", squash)
    rig.turn()
    assert rig.executor.num_steps == 1
    rig.executor.complete_step()
    rig.turn()
    assert rig.core.stats().num_squashes == 1
    rig.drain()
    assert len(rig.tokens("b")) == 4


@pytest.mark.parametrize(("asked", "is_accelerated", "expected"), [(None, True, 2), (None, False, 1), (False, True, 1)])
def test_by_default_on_a_device_of_its_own(asked: bool | None, is_accelerated: bool, expected: int) -> None:
    fake = FakeExecutor(vocab_size=1000, block_size=16)
    parts = EngineParts(
        base=small_base(block_size=16),
        num_pages=8,
        executor=fake,
        reader=None,  # type: ignore[arg-type]
        close=lambda: None,
        is_accelerated=is_accelerated,
    )
    config = EngineConfig(model=ModelConfig(model="base"), scheduler=SchedulerConfig(plan_ahead=asked))
    core = EngineCore(parts, config)
    core.add_request(request("a"), 0.0)
    core.launch(0.0)
    core.launch(1.0)
    assert fake.num_steps == expected


# -- simulated --------------------------------------------------------------------------------------------------------


def simulate(*, plan_ahead: bool, decide_s: float = 0.002) -> tuple[float, dict[str, list[int]], int]:
    """Serve thirty requests; return when the last ended, all tokens, and the number of steps."""
    events: list[Event] = []
    tokens: dict[str, list[int]] = {}
    core = EngineCore(
        CoreParts(
            base=small_base(max_model_len=128),
            num_pages=200,
            executor=SimulatedExecutor(
                FixedCost(step_s=0.01, token_s=0.0),
                vocab_size=1000,
                scheduler_time_s=decide_s,
                interference={Tier.DEVICE: 0.2},
            ),
        ),
        EngineConfig(
            model=ModelConfig(model="base"),
            scheduler=SchedulerConfig(max_num_seqs=8, plan_ahead=plan_ahead),
            memory=MemoryConfig(block_size=4),
            adapters=AdapterConfig(),
        ),
        served_name="base",
        sinks=[events.append],
    )
    for index in range(4):
        core.adapters.register(f"a{index}", version(f"k{index}", 3), 0.0)
    arrivals = []
    for index in range(30):
        sampling = SamplingParams(max_tokens=20 + index, temperature=0.0, stop_token_ids=tuple(range(0, 1000, 30)))
        name = f"a{index % 5}" if index % 5 < 4 else ""
        arrivals.append((0.0, Request(request_id=str(index), prompt=(index,), sampling=sampling, model=name)))

    def take(outputs: list[Output], now: float) -> None:
        for output in outputs:
            tokens.setdefault(output.request_id, []).extend(token.token_id for token in output.tokens)

    clock = VirtualClock()
    EngineLoop(core, clock, on_outputs=take, arrivals=arrivals).run()
    core.check_integrity()
    assert core.stats().num_kv_pages == 0
    return clock.now(), tokens, core.stats().num_steps


def test_the_same_tokens_sooner() -> None:
    ended_at, tokens, num_steps = simulate(plan_ahead=False)
    ahead_at, ahead_tokens, num_ahead = simulate(plan_ahead=True)
    assert ahead_tokens == tokens
    assert num_ahead < 1.1 * num_steps, "who waits for a seat gets it a step later; nothing else takes longer"
    assert ended_at >= num_steps * (0.010 + 0.002)
    assert ahead_at < num_ahead * (0.010 + 0.1 * 0.002), "deciding is hidden behind nine steps of ten, at least"
    assert simulate(plan_ahead=True) == (ahead_at, ahead_tokens, num_ahead)


def planned(seq_id: int, **options: object) -> PlannedSequence:
    values: dict[str, object] = {
        "seq_id": seq_id,
        "tokens": [1, 2, 3],
        "num_prompt_tokens": 3,
        "start": 0,
        "num_tokens": 3,
        "pages": (0,),
        "adapter": None,
        "rank": 0,
        "sampling": SamplingParams(temperature=0.0),
        "is_sampled": True,
        "seed": 0,
    }
    return PlannedSequence(**{**values, **options})  # type: ignore[arg-type]


def test_a_load_delays_both_steps_in_flight() -> None:
    executor = SimulatedExecutor(FixedCost(step_s=1.0, token_s=0.0), vocab_size=10, interference={Tier.DEVICE: 0.5})
    first = executor.launch(StepPlan(step_id=0, sequences=(planned(0),)), 0.0)
    second = executor.launch(StepPlan(step_id=1, sequences=(planned(0),)), 0.5)
    assert (first.ready_at, second.begins_at, second.ready_at) == (1.0, 1.0, 2.0)
    load = executor.load_adapter(AdapterLoad(version=version("k", 1), tier=Tier.DEVICE), 0.8)
    beside_s = min(load.ready_at, first.ready_at) - 0.8
    assert first.ready_at == pytest.approx(1.0 + 0.5 * beside_s)
    assert second.begins_at == first.ready_at
    beside_s = min(load.ready_at, second.ready_at) - second.begins_at
    assert second.ready_at == pytest.approx(second.begins_at + 1.0 + 0.5 * max(0.0, beside_s))


# -- tokens that are filled in ----------------------------------------------------------------------------------------


def test_filled_in_tokens_read_like_the_list_they_will_be() -> None:
    known = [10, 11, 12]
    plan = StepPlan(
        step_id=1, sequences=(planned(7, tokens=known, start=3, num_tokens=1, awaits_token=True), planned(8))
    )
    filled = fill_in(plan, {7: SampledToken(token_id=99)})
    assert filled.sequences[1] is plan.sequences[1]
    tokens = filled.sequences[0].tokens
    known += [99, 100]  # the core takes the token in, and the next one after it, while the step runs
    expected = [10, 11, 12, 99]
    assert len(tokens) == 4
    assert list(tokens) == expected
    assert not filled.sequences[0].awaits_token
    for index in range(-4, 4):
        assert tokens[index] == expected[index]
    for start in range(6):
        for stop in range(6):
            assert tokens[start:stop] == expected[start:stop]
    for index in (4, -5):
        with pytest.raises(IndexError):
            tokens[index]
    assert synthetic_token(filled.sequences[0], 1000) == synthetic_token(plan.sequences[0], 1000)


def test_a_plan_that_awaits_nothing_stays_as_it_is() -> None:
    plan = StepPlan(step_id=1, sequences=(planned(8),))
    assert fill_in(plan, {}) is plan
