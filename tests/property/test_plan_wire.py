"""A stream of encoded plans rebuilds every plan of a real engine, and an executor can run from it."""

from __future__ import annotations

import contextlib
import random
from dataclasses import dataclass, field

import msgspec
import pytest
from harness import make_rig, request
from hypothesis import given, settings
from hypothesis import strategies as st

from manylora.config import AdapterConfig
from manylora.errors import RequestError
from manylora.plan import AdapterLoad, Placement, PlannedSequence, StepPlan
from manylora.plan_wire import PlanDecoder, PlanEncoder
from manylora.ports import Work
from manylora.sim.run.fake import FakeExecutor
from manylora.types import AdapterKey, Constraint, SamplingParams, Tier

SAMPLINGS: list[dict[str, object]] = [
    {},
    {"seed": 2**64 - 1, "stop": ("\n",), "stop_token_ids": (3, 5)},
    {"logprobs": 2, "prompt_logprobs": 1, "bad_words_token_ids": ((3,), (4, 5)), "logit_bias": ((7, 0.1), (8, -100.0))},
    {"constraint": Constraint("json", "{}"), "presence_penalty": 1.5, "top_p": 0.9},
]


@dataclass
class Wired:
    """Hands plans to the fake executor as a worker would get them; its lists are never the engine's."""

    fake: FakeExecutor
    encoder: PlanEncoder = field(default_factory=PlanEncoder)
    decoder: PlanDecoder = field(default_factory=PlanDecoder)
    seen: set[str] = field(default_factory=set)

    def launch(self, plan: StepPlan, now: float) -> Work:
        decoded = self.decoder.decode(self.encoder.encode(plan))
        assert decoded == plan
        for ours, theirs in zip(plan.sequences, decoded.sequences, strict=True):
            assert theirs.tokens is not ours.tokens and theirs.pages is not ours.pages
            self.seen |= {"awaits"} if ours.awaits_token else set()
            self.seen |= set() if ours.is_sampled else {"chunk"}
        return self.fake.launch(decoded, now)

    def load_adapter(self, load: AdapterLoad, now: float) -> Work:
        return self.fake.load_adapter(load, now)

    def drop_adapter(self, key: AdapterKey, tier: Tier) -> None:
        self.fake.drop_adapter(key, tier)


def run(rng: random.Random, num_actions: int, **options: object) -> set[str]:
    """Let requests come and go; return what happened."""
    wired: list[Wired] = []

    def wire(fake: FakeExecutor) -> Wired:
        wired.append(Wired(fake))
        return wired[0]

    rig = make_rig(executor=wire, adapters=AdapterConfig(max_cpu_loras=3), max_model_len=40, **options)
    names = [f"a{index}" for index in range(4)]
    for index, name in enumerate(names):
        rig.register(name, 1 + index)
    for count in range(num_actions):
        action = rng.random()
        if action < 0.35:
            sampling = rng.choice(SAMPLINGS)
            model = rng.choice(["", *names])
            with contextlib.suppress(RequestError):  # one that could never fit
                rig.add(request(f"r{count}", rng.randint(1, 20), rng.randint(1, 16), model, **sampling))
        elif action < 0.45 and rig.core._sequences:
            rig.core.cancel(rng.choice(sorted(rig.core._sequences)), rig.now)
        elif action < 0.6:
            rig.turn()
        else:
            rig.step()
    rig.drain()
    assert set(wired[0].encoder._sent) == set(wired[0].decoder._kept)
    seen = wired[0].seen
    seen |= {"preempted"} if rig.core.stats().num_preemptions else set()
    seen |= {finish for one in rig.outputs if (finish := rig.finish(one)) is not None}
    return seen


OPTIONS = st.fixed_dictionaries(
    {
        "num_pages": st.integers(14, 30),
        "max_num_seqs": st.integers(1, 6),
        "max_num_batched_tokens": st.integers(1, 24),
        "prefix_caching": st.booleans(),
        "policy": st.sampled_from(["fifo", "chameleon"]),
        "plan_ahead": st.booleans(),
        "step_composition": st.sampled_from(["mixed", "s-lora-each-step"]),
    }
)


@given(rng=st.randoms(use_true_random=False), num_actions=st.integers(1, 120), options=OPTIONS)
@settings(max_examples=60)
def test_decoded_plans_equal_the_originals(rng, num_actions, options):
    run(rng, num_actions, **options)


def test_long_runs_meet_every_case():
    seen: set[str] = set()
    for seed in range(4):
        rng = random.Random(seed)
        seen |= run(rng, 400, num_pages=14, max_num_seqs=6, max_num_batched_tokens=8, plan_ahead=seed % 2 == 0)
    assert seen == {"awaits", "chunk", "preempted", "cancelled", "length"}


def planned(tokens: list[int], pages: list[int], **options: object) -> PlannedSequence:
    values: dict[str, object] = {
        "seq_id": 7,
        "tokens": tokens,
        "num_prompt_tokens": 2,
        "start": len(tokens) - 1,
        "num_tokens": 1,
        "pages": pages,
        "adapter": AdapterKey("a"),
        "rank": 8,
        "sampling": SamplingParams(),
        "is_sampled": True,
        "seed": 1,
    }
    return PlannedSequence(**{**values, **options})  # type: ignore[arg-type]


def test_a_placement_is_sent_when_it_changes():
    encoder, decoder, tokens, pages = PlanEncoder(), PlanDecoder(), [1, 2], [9]
    for placement in (Placement(Tier.HOST), Placement(Tier.HOST), Placement(Tier.DEVICE, 3), Placement(Tier.DEVICE)):
        plan = StepPlan(step_id=0, sequences=(planned(tokens, pages, placement=placement),))
        assert decoder.decode(encoder.encode(plan)) == plan
        tokens.append(5)


def test_a_decode_takes_few_bytes():
    encoder, decoder, tokens, pages = PlanEncoder(), PlanDecoder(), [100_000] * 500, [5000] * 32
    for step in range(100):
        plan = StepPlan(step_id=step, sequences=(planned(tokens, pages, seq_id=100_000),))
        message = encoder.encode(plan)
        assert decoder.decode(message) == plan
        assert step == 0 or len(message) <= 32
        tokens.append(100_000)
        if len(tokens) > 16 * len(pages):
            pages.append(5000)


def test_a_message_that_was_missed_is_noticed():
    encoder, decoder, tokens, pages = PlanEncoder(), PlanDecoder(), [1, 2], [9]
    encoder.encode(StepPlan(step_id=0, sequences=(planned(tokens, pages),)))
    with pytest.raises(KeyError):
        decoder.decode(encoder.encode(StepPlan(step_id=1, sequences=(planned(tokens, pages),))))
    with pytest.raises(msgspec.DecodeError):
        decoder.decode(b"\x00")
