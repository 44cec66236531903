"""The engine core under every interleaving that hypothesis thinks of.

The fake executor holds a model of device memory and fails on stale KV, overwritten weights or a copy from
nowhere; here we only make things happen, and check that everything adds up and every request is served.
"""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from dataclasses import replace

import pytest
from harness import VOCAB_SIZE, Rig, check_reports, make_rig, request
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from manylora.core.config import AdapterConfig
from manylora.core.engine.adapters.residency import TierState
from manylora.core.engine.status import EngineStats
from manylora.core.errors import CapacityError, ManyloraError
from manylora.core.events import AdapterAwaited, Event
from manylora.core.memory import EVICTION_POLICIES
from manylora.core.plan import ARRIVING, IN_HOST, Placement, PlannedSequence
from manylora.core.scheduling import POLICIES
from manylora.core.scheduling.policies.chameleon import queue_plan
from manylora.core.scheduling.policies.chameleon.policy import ChameleonPolicy
from manylora.core.types import Continuation, FinishReason, Request
from manylora.lab.sim.run.contents import synthetic_token

PREFETCHES = [
    (0, False, True, False),
    (3, False, False, False),
    (10, True, True, False),
    (10, False, False, False),
    (0, False, True, True),
]
"""Look-ahead, whether gaps are forecast, whether adapters stay in host memory, and whether by their last run alone."""
DISCIPLINES: list[dict[str, object]] = [
    {},
    {},
    {"plan_ahead": True},
    {"plan_ahead": True},
    {"step_composition": "s-lora-each-step"},
    {"step_composition": "whole-prompts"},
    {"step_composition": "s-lora-chunked"},
    {"step_composition": "s-lora", "reserve_output": "whole"},
    {"step_composition": "s-lora", "reserve_output": "peak"},
    {"plan_ahead": True, "step_composition": "whole-prompts"},
    {"plan_ahead": True, "step_composition": "s-lora-each-step"},
]
"""How steps are made: mostly as by default."""
COLD_STARTS = [
    {},
    {"reads_host": True},
    {"waits_by_layer": True},
    {"reads_host": True, "waits_by_layer": True},
    {"reads_host": True, "mode": "assist"},
    {"waits_by_layer": True, "mode": "layers"},
    {"reads_host": True, "waits_by_layer": True, "mode": "layers"},
]
"""What the executor can do with an adapter that is not on the device, and the mode if it is given."""
NUM_SOAKS = 21
STOPS = tuple(range(0, VOCAB_SIZE, 6))
"""Tokens that end some of the answers."""
INVOCATIONS = {2: (7,), 5: (0, 1), 8: (14, 15)}
"""Tokens that activate some adapters, by their content: behind the first block, at once, and behind short prompts."""
NAMES = [f"a{i}" for i in range(6)]
NAMES_OF_POLICIES = sorted(POLICIES)


@pytest.fixture(autouse=True)
def plan_queues_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Examples are short: let queues be cut after a few requests instead of a hundred."""
    monkeypatch.setattr(queue_plan, "FIRST_PLAN_AFTER", 4)


class EngineMachine(RuleBasedStateMachine):
    rig: Rig

    @initialize(
        num_pages=st.integers(12, 30),
        max_num_seqs=st.integers(1, 6),
        budget=st.integers(1, 24),
        max_loras=st.none() | st.integers(1, 3),
        prefix_caching=st.booleans(),
        max_cpu_loras=st.none() | st.integers(1, 4),
        policy=st.sampled_from(NAMES_OF_POLICIES),
        predictor=st.sampled_from(["oracle", "noisy", "quantile"]),
        eviction=st.sampled_from(sorted(EVICTION_POLICIES)),
        prefetch=st.sampled_from(PREFETCHES),
        discipline=st.sampled_from(DISCIPLINES),
        cold=st.sampled_from(COLD_STARTS),
    )
    def start(
        self,
        num_pages,
        max_num_seqs,
        budget,
        max_loras,
        prefix_caching,
        max_cpu_loras,
        policy,
        predictor,
        eviction,
        prefetch,
        discipline,
        cold,
    ) -> None:
        self.rig = make_rig(
            policy=policy,
            predictor=predictor,
            policy_options={"refresh_s": 8.0},
            num_pages=num_pages,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_loras=max_loras,
            prefix_caching=prefix_caching,
            max_model_len=40,
            reads_host=cold.get("reads_host", False),
            waits_by_layer=cold.get("waits_by_layer", False),
            adapters=AdapterConfig(
                max_cpu_loras=max_cpu_loras,
                eviction=eviction,
                look_ahead=prefetch[0],
                forecast=prefetch[1],
                keep_host_copies=prefetch[2],
                by_last_run=prefetch[3],
                cold_start=cold.get("mode", "auto"),
            ),
            sinks=[self.check_wait] if cold.get("mode") == "assist" else [],
            **discipline,
        )
        self.accepted: dict[str, Request] = {}
        self.cancelled: set[str] = set()
        self.version_of: dict[str, str | None] = {}
        self.num_begun: dict[str, int] = {}  # tokens of the answer that came from another engine
        self.broken: set[str] = set()
        self.count = 0
        for index, name in enumerate(NAMES):
            self.register(name, 1 + index % 5, False)

    def check_wait(self, event: Event) -> None:
        """Where every request runs from the host, none waits for a copy of what is there."""
        if isinstance(event, AdapterAwaited):
            assert self.rig.core._cache.residencies[event.adapter].host is not TierState.RESIDENT

    def names(self) -> list[str]:
        return [status.name for status in self.rig.core.adapters.statuses(self.rig.now)]

    @rule(name=st.sampled_from(NAMES), num_pages=st.integers(1, 5), in_place=st.booleans(), is_unread=st.booleans())
    def register(self, name, num_pages, in_place, is_unread=False) -> None:
        self.count += 1
        try:
            # The size is part of the content, so part of the key; a few contents recur under other names.
            content = self.count % 9
            self.rig.register(
                name,
                num_pages,
                key=f"k{content}-{num_pages}",
                replace=in_place,
                is_unread=is_unread,
                invocation=INVOCATIONS.get(content, ()),
            )
        except ManyloraError:
            assert name in self.names()

    @rule(name=st.sampled_from(NAMES))
    def unregister(self, name) -> None:
        if name in self.names():
            self.rig.core.adapters.unregister(name, self.rig.now)

    @rule(name=st.sampled_from(NAMES), pinned=st.booleans())
    def pin(self, name, pinned) -> None:
        if name in self.names():
            try:
                self.rig.core.adapters.pin(name, pinned, self.rig.now)
            except CapacityError:
                assert pinned

    @rule(name=st.sampled_from(NAMES))
    def warm(self, name) -> None:
        if name in self.names():
            with contextlib.suppress(CapacityError):
                self.rig.core.adapters.warm(name, self.rig.now)

    @rule(
        asks=st.lists(
            st.tuples(st.sampled_from(["", *NAMES]), st.integers(1, 20), st.integers(1, 16), st.booleans()),
            min_size=1,
            max_size=8,
        )
    )
    def ask(self, asks) -> None:
        for model, num_prompt, max_tokens, may_stop in asks:
            self.ask_one(model, num_prompt, max_tokens, may_stop)

    def ask_one(self, model, num_prompt, max_tokens, may_stop) -> None:
        self.count += 1
        # Few distinct prompts, so that prefixes are shared.
        stops = STOPS if may_stop else ()
        made = request(f"r{self.count}", 1, max_tokens, model, stop_token_ids=stops)
        made = replace(made, prompt=tuple(range(num_prompt)), tenant=f"t{self.count % 4}", weight=1.0 + self.count % 2)
        if self.count % 3 == 0:
            made = replace(made, sampling=replace(made.sampling, prompt_logprobs=self.count % 2))
        try:
            self.rig.add(made)
        except ManyloraError:
            return
        self.note(made, self.rig.core.adapters.status(model, self.rig.now).version.key if model else None)

    def note(self, accepted: Request, key: str | None, num_begun: int = 0) -> None:
        self.accepted[accepted.request_id] = accepted
        self.version_of[accepted.request_id] = key
        self.num_begun[accepted.request_id] = num_begun

    @precondition(lambda self: any(key is not None for key in self.version_of.values()))
    @rule(data=st.data(), num_begun=st.integers(1, 3))
    def resume(self, data, num_begun) -> None:
        """Take over the rest of an answer that another engine began, of an adapter that may be gone here."""
        begun = data.draw(st.sampled_from([one for one, key in self.version_of.items() if key is not None]))
        asked, key = self.accepted[begun], self.version_of[begun]
        tokens = tuple(expected_tokens(asked, key)[:num_begun])
        if self.num_begun[begun] or tokens[-1] in asked.sampling.stop_token_ids:
            return
        self.count += 1
        made = replace(asked, request_id=f"r{self.count}", continuation=Continuation(tokens=tokens, adapter=key))
        try:
            self.rig.add(made)
        except ManyloraError:
            return
        self.note(made, key, num_begun)

    @precondition(lambda self: self.accepted)
    @rule(data=st.data())
    def cancel(self, data) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.accepted)))
        if self.rig.core.cancel(request_id, self.rig.now):
            self.cancelled.add(request_id)

    @rule()
    def turn(self) -> None:
        self.rig.turn()

    @rule(loses=st.integers(0, 9))
    def complete_step(self, loses) -> None:
        plan = self.rig.executor.plan
        if plan is not None:
            arriving = {part.adapter for part in plan.sequences if part.placement is ARRIVING}
            lost = arriving if loses == 0 else set()
            self.broken |= lost
            self.rig.executor.complete_step(lost, late=arriving if loses == 1 else ())

    @precondition(lambda self: self.rig.executor.loads)
    @rule(data=st.data(), fails=st.integers(0, 9))
    def complete_load(self, data, fails) -> None:
        index = data.draw(st.integers(0, len(self.rig.executor.loads) - 1))
        load = self.rig.executor.loads[index][0]
        if fails == 0:
            self.broken.add(load.version.key)
        self.rig.executor.complete_load(index, error="gone" if fails == 0 else None)

    @rule(num_steps=st.integers(1, 6))
    def run_on(self, num_steps) -> None:
        for _ in range(num_steps):
            self.rig.step()

    @invariant()
    def adds_up(self) -> None:
        if hasattr(self, "rig"):
            self.rig.core.check_integrity()
            check_reports(self.rig.core, self.rig.now)
            if isinstance(self.rig.core._policy, ChameleonPolicy):
                self.rig.core._policy.check_integrity()

    def teardown(self) -> None:
        if not hasattr(self, "rig"):
            return
        self.rig.drain()
        self.rig.core.check_integrity()
        for request_id, asked in self.accepted.items():
            outputs = self.rig.outputs[request_id]
            assert [output.finish for output in outputs[:-1]] == [None] * (len(outputs) - 1)
            reason = outputs[-1].finish
            if reason is FinishReason.ERROR:
                assert self.version_of[request_id] in self.broken
            elif reason is FinishReason.CANCELLED:
                assert request_id in self.cancelled
            else:
                tokens = expected_tokens(asked, self.version_of[request_id])
                num_begun = self.num_begun[request_id]
                assert self.rig.tokens(request_id) == tokens[num_begun:]
                if not num_begun:
                    self.check_report(asked)
                is_stopped = tokens[-1] in asked.sampling.stop_token_ids
                assert reason is (FinishReason.STOP if is_stopped else FinishReason.LENGTH)
        assert not self.rig.core._answers.reports
        for name in self.names():
            self.rig.core.adapters.unregister(name, self.rig.now)
        self.rig.drain()
        stats = self.rig.core.stats()
        assert stats.num_adapter_pages == stats.num_kv_pages == stats.num_host == stats.host_bytes == 0
        assert stats.num_free_pages + stats.num_prefix_pages == stats.num_pages
        assert not self.rig.executor.host

    def check_report(self, asked: Request) -> None:
        """A prompt is reported once, whole and before the first token, if that is asked for, and not otherwise."""
        outputs = self.rig.outputs[asked.request_id]
        reports = [output.prompt_logprobs for output in outputs if output.prompt_logprobs is not None]
        num_top = asked.sampling.prompt_logprobs
        if num_top is None or len(asked.prompt) == 1:
            assert not reports
            return
        assert [report.num_top for report in reports] == [num_top] and not outputs[0].tokens
        assert [token.token_id for token in reports[0].rows()] == list(asked.prompt[1:])
        assert outputs[0].num_cached_tokens == 0


def expected_tokens(asked: Request, key: str | None) -> list[int]:
    """What the executor makes up for a request, whatever happened on the way."""
    tokens = list(asked.prompt)
    if key is not None and not set(INVOCATIONS.get(int(key[1]), ())) <= set(tokens):
        key = None  # the prompt is a range: it has the tokens in a row if it has them
    assert asked.sampling.max_tokens is not None
    for _ in range(asked.sampling.max_tokens):
        part = PlannedSequence(
            seq_id=0,
            tokens=tokens,
            num_prompt_tokens=len(asked.prompt),
            start=0,
            num_tokens=len(tokens),
            pages=(),
            adapter=key,  # type: ignore[arg-type]
            rank=0,
            sampling=asked.sampling,
            is_sampled=True,
            seed=0,
        )
        tokens.append(synthetic_token(part, VOCAB_SIZE).token_id)
        if tokens[-1] in asked.sampling.stop_token_ids:
            break
    return tokens[len(asked.prompt) :]


TestEngine = EngineMachine.TestCase
TestEngine.settings = settings(max_examples=100, stateful_step_count=50)


@pytest.mark.slow
def test_soak_under_pressure() -> None:
    """Hundreds of actions on a pool that is always too small: what short examples do not reach."""
    soaks = [soak(seed) for seed in range(NUM_SOAKS)]
    stats = [one for one, _, _ in soaks]
    assert sum(one.num_preemptions for one in stats) > NUM_SOAKS
    assert sum(one.num_squashes for one in stats) > 0
    assert sum(one.num_evictions for one in stats) > 10 * NUM_SOAKS
    assert sum(one.num_cached_tokens for one in stats) > 100 * NUM_SOAKS
    assert sum(num_pairs for _, num_pairs, _ in soaks) > 2 * NUM_SOAKS
    chosen = sum(
        (one for seed, (_, _, one) in enumerate(soaks) if "mode" not in COLD_STARTS[seed % len(COLD_STARTS)]), Counter()
    )
    assert chosen[IN_HOST] > NUM_SOAKS and chosen[ARRIVING] > 0
    by_mode = Counter[str]()
    for seed, (_, _, placements) in enumerate(soaks):
        cold = COLD_STARTS[seed % len(COLD_STARTS)]
        if "mode" in cold:
            by_mode[str(cold["mode"])] += placements[IN_HOST if cold["mode"] == "assist" else ARRIVING]
        assert not placements[IN_HOST] or cold.get("reads_host")
        assert not placements[ARRIVING] or cold.get("waits_by_layer")
    assert by_mode["assist"] > 0 and by_mode["layers"] > 0


def soak(seed: int) -> tuple[EngineStats, int, Counter[Placement]]:
    """Return the engine's counters, how often a turn left two steps in flight, and from where their rows read."""
    rng = random.Random(seed)
    machine = EngineMachine()
    machine.start(
        num_pages=rng.randint(14, 24),
        max_num_seqs=rng.randint(2, 8),
        budget=rng.randint(2, 24),
        max_loras=rng.choice([None, 1, 2]),
        prefix_caching=rng.random() < 0.7,
        max_cpu_loras=rng.choice([None, 2, 4]),
        # Chameleon's alone squashes, so every third soak is its own, however many policies there are.
        policy="chameleon" if seed % 3 == 2 else NAMES_OF_POLICIES[seed % len(NAMES_OF_POLICIES)],
        predictor=rng.choice(["oracle", "noisy", "quantile"]),
        eviction=sorted(EVICTION_POLICIES)[seed % len(EVICTION_POLICIES)],
        prefetch=PREFETCHES[seed % len(PREFETCHES)],
        discipline=DISCIPLINES[seed // 4 % len(DISCIPLINES)],
        cold=COLD_STARTS[seed % len(COLD_STARTS)],
    )
    num_pairs, placements = 0, Counter[Placement]()
    for _ in range(400):
        action = rng.random()
        if action < 0.35:
            machine.ask_one(rng.choice(["", *NAMES]), rng.randint(1, 20), rng.randint(1, 16), rng.random() < 0.5)
        elif action < 0.75:
            machine.rig.step()
        elif action < 0.8:
            machine.rig.turn()
        elif action < 0.85 and machine.rig.executor.loads:
            machine.rig.executor.complete_load(rng.randrange(len(machine.rig.executor.loads)))
        elif action < 0.86:
            machine.complete_step(0)
        elif action < 0.9 and machine.accepted:
            request_id = rng.choice(sorted(machine.accepted))
            if machine.rig.core.cancel(request_id, machine.rig.now):
                machine.cancelled.add(request_id)
        elif action < 0.93:
            machine.register(rng.choice(NAMES), rng.randint(1, 5), True)
        elif action < 0.95:
            machine.unregister(rng.choice(NAMES))
        elif action < 0.97:
            machine.pin(rng.choice(NAMES), rng.random() < 0.4)
        else:
            machine.warm(rng.choice(NAMES))
        if rng.random() < 0.2:
            machine.rig.turn()  # in the middle of a step
        num_pairs += machine.rig.executor.num_steps == 2
        plan = machine.rig.executor.plan
        placements.update(part.placement for part in (plan.sequences if plan else ()))
        machine.adds_up()
    stats = machine.rig.core.stats()
    machine.teardown()
    return stats, num_pairs, placements
