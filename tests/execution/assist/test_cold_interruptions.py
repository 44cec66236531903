"""Cold requests that are interrupted, with everything in the hands of hypothesis: tokens are those of PEFT.

A request is cancelled, its adapter unloaded or replaced, its pages taken for an older one: between two chunks of its
prompt, between two tokens, while workers compute an exchange of its step, or while its step waits for a layer. Layers
arrive in between, or only when they are waited for. With ``auto`` one adapter may be assisted and another arrive in the
same step. The engine's real core and executor, on the path of a GPU whose stream is a thread.
"""

from __future__ import annotations

import math
import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

sys.path.append(str(Path(__file__).parents[2] / "support"))

pytest.importorskip("numba")
from live_executor import BLOCK, executor_of, folders
from peft import PeftModel
from staged_link import Stage, StagedLink
from thread_stream import ThreadStream
from transformers import LlamaForCausalLM

from manylora.core.adapters.shape import BaseShape
from manylora.core.clock import WallClock
from manylora.core.config import AdapterConfig, EngineConfig, MemoryConfig, ModelConfig, SchedulerConfig
from manylora.core.costs.arriving import WaitBudget
from manylora.core.engine.adapters.cold_starts import ColdStarts
from manylora.core.engine.core import EngineCore
from manylora.core.plan import ARRIVING, IN_HOST, Placement
from manylora.core.ports import CoreParts
from manylora.core.types import ColdStart, FinishReason, Output, Request, SamplingParams, Tier
from manylora.execution.assist.exchange import Assistant
from manylora.execution.build import build_parts
from manylora.execution.storage.arrival import ArrivingAdapter
from manylora.execution.storage.device_load import DeviceLoad

__all__ = ["folders"]

BASE_NAME = "base"
NUM_OUT = 5
CHUNK = 8
PROMPTS = {
    "warm": (BASE_NAME, [7, 3, 9, 4]),
    "first": ("one", list(range(10, 32))),
    "second": ("one", list(range(40, 57))),
    "other": ("two", list(range(60, 79))),
    "late": ("two", list(range(10, 32))),
}
"""Requests: the adapter whose weights they get, and the prompt. ``late`` asks for the name that was replaced."""

MODES = ("assist", "layers", "auto")
WAYS = (ColdStart.ASSIST, ColdStart.LAYERS)
"""Choices of ``auto``, in turn, as far as they are possible."""

Action = Callable[[EngineCore, float], None]


@pytest.fixture(scope="module")
def answers(folders: dict[str, Path]) -> dict[str, list[int]]:
    """Greedy answers of transformers + PEFT, one request at a time."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(folders["base"]), folders["one"], "one")
        model.load_adapter(folders["two"], "two")
    model.eval()
    found = {}
    with torch.inference_mode():
        for request_id, (name, prompt) in PROMPTS.items():
            tokens = list(prompt)
            for _ in range(NUM_OUT):
                if name == BASE_NAME:
                    with model.disable_adapter():
                        logits = model(input_ids=torch.tensor([tokens])).logits
                else:
                    model.set_adapter(name)
                    logits = model(input_ids=torch.tensor([tokens])).logits
                tokens.append(int(logits[0, -1].argmax()))
            found[request_id] = tokens[len(prompt) :]
    return found


@dataclass
class Run:
    """One engine core, and the answers so far.

    Args:
        core: The core; touched by ``drive``'s thread alone.
        commands: Of other threads, for that one.
    """

    core: EngineCore
    clock: WallClock
    stage: Stage
    commands: deque[Action] = field(default_factory=deque)
    outputs: dict[str, list[Output]] = field(default_factory=dict)
    num_exchanges: int = 0
    num_waits: int = 0
    placements: set[frozenset[Placement]] = field(default_factory=set)  # those of each step

    def drive(self, between: Callable[[int], None]) -> None:
        """Serve until nothing is left; ``between`` is called, with a number, whenever no step is in flight."""
        core, num_between = self.core, 0
        while core.has_requests or core.has_pending_work or self.commands:
            now = self.clock.now()
            while self.commands:
                self.commands.popleft()(core, now)
            for output in core.collect(now):
                self.outputs.setdefault(output.request_id, []).append(output)
            if not core._steps.in_flight:
                between(num_between)
                num_between += 1
            core.launch(now)
            core.check_integrity()
            self.placements |= {
                frozenset(part.placement for part in plan.sequences)
                for plan in (step.plan for step in core._steps.in_flight)
            }
            if not core._steps.in_flight and core.has_pending_work:
                self.stage.permits.release(10)  # only loads are left to wait for: an adapter has fewer pages
            if core.has_pending_work and not self.commands:
                self.clock.wait_until(math.inf)

    def act_within_the_exchange(self, action: Action) -> None:
        """Let the core's thread do something, and wait for it; on the thread of a worker or of the step."""
        is_done = threading.Event()

        def command(core: EngineCore, now: float) -> None:
            action(core, now)
            core.check_integrity()
            is_done.set()

        self.commands.append(command)
        self.clock.wake()
        assert is_done.wait(60)

    def add(self, request_id: str, model: str) -> None:
        sampling = SamplingParams(temperature=0.0, max_tokens=NUM_OUT, ignore_eos=True)
        request = Request(request_id=request_id, prompt=tuple(PROMPTS[request_id][1]), sampling=sampling, model=model)
        self.core.add_request(request, self.clock.now())

    def tokens(self, request_id: str) -> list[int]:
        return [token.token_id for output in self.outputs.get(request_id, ()) for token in output.tokens]


class Rig:
    """The executor, which all cores share one after another."""

    def __init__(self, folders: dict[str, Path]) -> None:
        self.stage, self.clock = Stage(), WallClock()

        def start(device: torch.device, base: BaseShape) -> Assistant:
            return Assistant(ThreadStream(), base, num_workers=2, serve=self.stage.source, exchange_limit_s=600.0)

        config = EngineConfig(
            model=ModelConfig(model=str(folders["base"]), device="cpu"),
            memory=MemoryConfig(block_size=BLOCK, num_pages=64),
        )
        self.parts = build_parts(config, self.clock, open_assistant=start)
        self.executor = executor_of(self.parts)
        self.executor._copies.link = StagedLink(self.executor._copies.pages, self.stage)
        self._folders = folders
        self.num_waits = 0

    def patch(self, patch: pytest.MonkeyPatch) -> None:
        """Let a step's wait for a layer be interrupted like an exchange; then the pages come that it waits for."""
        wait, arriving = ArrivingAdapter.wait, DeviceLoad.arriving

        def let_one_through() -> None:
            self.stage.permits.release()
            self.stage.handled.acquire()

        def wait_for(adapter: ArrivingAdapter, group: str) -> None:
            arrival, num_pages = adapter.arrival, adapter._num_pages(group)
            if arrival.num_arrived < num_pages:
                self.num_waits += 1
                self.stage.during(self.num_waits - 1)
            while arrival.num_arrived < num_pages and arrival.error is None:
                let_one_through()
            wait(adapter, group)

        def arriving_once_begun(load: DeviceLoad, patience: WaitBudget) -> ArrivingAdapter:
            while not load._views.done():  # behind the copy of another adapter
                let_one_through()
            return arriving(load, patience)

        patch.setattr(ArrivingAdapter, "wait", wait_for)
        patch.setattr(DeviceLoad, "arriving", arriving_once_begun)

    def begin(self, mode: str, num_pages: int, *, is_ahead: bool) -> Run:
        core = EngineCore(
            CoreParts(
                base=self.parts.base,
                num_pages=num_pages,
                executor=self.executor,
                reads_host=True,
                waits_by_layer=True,
                is_accelerated=is_ahead,
            ),
            EngineConfig(
                model=ModelConfig(model="base"),
                scheduler=SchedulerConfig(max_num_batched_tokens=CHUNK, max_num_seqs=4, plan_ahead=False),
                memory=MemoryConfig(block_size=BLOCK),
                adapters=AdapterConfig(cold_start=mode, eviction="none", look_ahead=0),
            ),
            served_name=BASE_NAME,
        )
        for name in ("one", "two"):
            core.adapters.register(name, self.parts.reader.read(name, str(self._folders[name])), self.clock.now())
        return Run(core, self.clock, self.stage)

    def end(self) -> None:
        """Forget the core's adapters."""
        for key in [*self.executor._resident]:
            self.executor.drop_adapter(key, Tier.DEVICE)
        self.stage.clear()
        self.stage.during = lambda number: None
        self.stage.source.num_served = self.num_waits = 0


@pytest.fixture(scope="module")
def rig(folders: dict[str, Path]) -> Iterator[Rig]:
    rig = Rig(folders)
    with pytest.MonkeyPatch.context() as patch:
        rig.patch(patch)
        yield rig
    rig.stage.let_all_through()
    rig.parts.close()


def cancel(request_id: str) -> Action:
    def action(core: EngineCore, now: float) -> None:
        core.cancel(request_id, now)

    return action


def unload(core: EngineCore, now: float) -> None:
    if "one" in core.adapters:
        core.adapters.unregister("one", now)


def preempt(core: EngineCore, now: float) -> None:
    """Take the youngest sequence's pages, as an older one does that must grow."""
    running = core._running.sequences
    if running and not core._steps.in_flight:
        core._running.preempt(running[-1], now)


def choose_in_turn(ways: Sequence[ColdStart], patch: pytest.MonkeyPatch) -> None:
    """Let ``auto`` choose these ways one after another, and begin at once: timings are those of a toy."""
    turns = cycle(ways)

    def choose(expected: object, allowed: Sequence[ColdStart], num_sharing: int) -> ColdStart:
        return next((way for way in islice(turns, len(ways)) if way in allowed), ColdStart.WAIT)

    patch.setattr("manylora.core.engine.adapters.cold_starts.choose", choose)
    patch.setattr(ColdStarts, "begins_at", lambda self, sequence: 0.0)


ACTIONS = ("cancel first", "cancel second", "cancel other", "unload", "replace", "preempt")


def serve(
    rig: Rig,
    answers: dict[str, list[int]],
    order: Sequence[str],
    plan: Sequence[tuple[bool, int, str]],
    through: Sequence[int] = (),
    *,
    mode: str,
    num_pages: int = 56,
    is_ahead: bool = False,
) -> Run:
    """Serve the requests with these interruptions, and compare the tokens.

    Args:
        rig: The executor.
        answers: The reference.
        order: The requests, as they arrive.
        plan: Interruptions: whether within an exchange or a wait, its number or that of the moment between steps, and
            which.
        through: Pages that may arrive within each exchange and wait.
        mode: The cold start.
        num_pages: Pages of the core: with few of them, growing sequences take those of younger ones.
        is_ahead: Whether a step is planned while one runs.
    """
    run = rig.begin(mode, num_pages, is_ahead=is_ahead)
    cancelled: set[str] = set()
    late: list[str] = []

    def replace(core: EngineCore, now: float) -> None:
        if "one" in core.adapters and not late:
            core.adapters.register("one", core._registry.get("two").version, now, replace=True)
            late.append("late")
            run.add("late", "one")

    def interrupt(is_within: bool, number: int, act: Callable[[Action], None]) -> None:
        for within, moment, what in plan:
            if (within, moment) == (is_within, number):
                kind, _, request_id = what.partition(" ")
                cancelled.update([request_id] if kind == "cancel" else [])
                act(cancel(request_id) if kind == "cancel" else known[what])

    def during(number: int) -> None:
        for _ in range(through[number] if number < len(through) else 0):
            rig.stage.permits.release()
        interrupt(True, number, run.act_within_the_exchange)

    known: dict[str, Action] = {"unload": unload, "replace": replace, "preempt": preempt}
    rig.stage.during = during
    for request_id in order:
        run.add(request_id, PROMPTS[request_id][0])
    try:
        run.drive(lambda number: interrupt(False, number, lambda action: action(run.core, rig.clock.now())))
    finally:
        run.num_exchanges, run.num_waits = rig.stage.source.num_served, rig.num_waits
        rig.end()
    for request_id in [*order, *late]:
        last, tokens = run.outputs[request_id][-1], run.tokens(request_id)
        assert tokens == answers[request_id][: len(tokens)]
        if last.finish is FinishReason.CANCELLED:
            assert request_id in cancelled
        else:
            assert last.finish is FinishReason.LENGTH and len(tokens) == NUM_OUT
    stats = run.core.stats()
    assert stats.num_running == stats.num_waiting == 0
    return run


@pytest.mark.parametrize("is_within", [False, True])
@pytest.mark.parametrize("what", ACTIONS)
@pytest.mark.parametrize("mode", MODES)
def test_each_interruption_in_the_middle_of_a_cold_prompt(
    mode: str, what: str, is_within: bool, rig: Rig, answers: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the first chunk, or within it; no layer arrives unless a step waits for it."""
    order = ["other", "second", "warm", "first"] if what == "cancel other" else ["first", "second", "warm", "other"]
    choose_in_turn(WAYS, monkeypatch)
    run = serve(rig, answers, order, [(is_within, 1, what)], mode=mode)
    least = 8 if mode == "assist" else 0  # auto may assist one that ends soon
    assert (run.num_exchanges > least, run.num_waits > 2) == (mode != "layers", mode != "assist")
    if what.startswith("cancel"):
        request_id = what.split()[1]
        assert run.outputs[request_id][-1].finish is FinishReason.CANCELLED and not run.tokens(request_id)
    if what == "preempt":
        assert run.core.stats().num_preemptions == (not is_within)  # in flight, nothing is taken
    if what == "replace":
        assert run.tokens("late") == answers["late"]


def test_a_step_may_hold_assisted_and_arriving_adapters(
    rig: Rig, answers: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    choose_in_turn(WAYS, monkeypatch)
    run = serve(rig, answers, ["first", "other", "warm"], [], mode="auto")
    assert any({IN_HOST, ARRIVING} <= placements for placements in run.placements)


@given(
    mode=st.sampled_from(MODES),
    ways=st.lists(st.sampled_from([*WAYS, ColdStart.WAIT]), min_size=1, max_size=6),
    num_pages=st.integers(20, 56),
    is_ahead=st.booleans(),
    order=st.permutations(["warm", "first", "second", "other"]),
    plan=st.lists(st.tuples(st.booleans(), st.integers(0, 12), st.sampled_from(ACTIONS)), max_size=4),
    through=st.lists(st.integers(0, 4), max_size=30),
)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_interrupted_requests_leave_the_tokens_of_all_others_as_they_are(
    mode: str,
    ways: list[ColdStart],
    num_pages: int,
    is_ahead: bool,
    order: Sequence[str],
    plan: list[tuple[bool, int, str]],
    through: list[int],
    rig: Rig,
    answers: dict[str, list[int]],
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        choose_in_turn(ways, patch)
        serve(rig, answers, order, plan, through, mode=mode, num_pages=num_pages, is_ahead=is_ahead)
