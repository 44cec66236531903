"""Conversations: turns that go on where the one before ended."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from manylora.core.errors import ConfigError
from manylora.lab.sim.run.contents import PromptMaker
from manylora.lab.workloads import AdapterSet, RequestSpec, WorkloadSpec, make_workload
from manylora.lab.workloads.arrivals import PoissonArrivals
from manylora.lab.workloads.lengths import ExponentialTokens, FixedTokens, ParametricLengths, TokenBounds
from manylora.lab.workloads.spec import Conversations

SPEC = WorkloadSpec(
    arrivals=PoissonArrivals(rate=1.0),
    lengths=ParametricLengths(
        prompt=ExponentialTokens(mean=60.0), output=ExponentialTokens(mean=40.0), bounds=TokenBounds(max_prompt=300)
    ),
    duration_s=200.0,
    adapters=AdapterSet(count=12),
    conversations=Conversations(
        turns=ExponentialTokens(mean=3.0), pause_s=ExponentialTokens(mean=20.0), max_tokens=600, block_tokens=16
    ),
)


def conversations() -> dict[int, list[RequestSpec]]:
    """Return the turns of each conversation, by the name of its first block."""
    found: dict[int, list[RequestSpec]] = {}
    for one in make_workload(SPEC, 3).requests:
        found.setdefault(one.prefix[0], []).append(one)
    return found


def test_a_prompt_begins_with_that_of_the_turn_before():
    maker = PromptMaker(32_000, 1000)
    several = [turns for turns in conversations().values() if len(turns) > 1]
    assert len(several) > 50
    for turns in several:
        for number, (before, after) in enumerate(pairwise(turns)):
            assert after.num_prompt_tokens > before.num_prompt_tokens + before.num_output_tokens
            assert after.arrival_s > before.arrival_s and after.adapter == before.adapter
            prompt = maker.prompt(number, after)
            assert len(prompt) == after.num_prompt_tokens
            assert prompt[: before.num_prompt_tokens] == maker.prompt(number + 1, before)


def test_turns_keep_to_the_context_and_to_the_duration():
    requests = make_workload(SPEC, 3).requests
    assert all(one.num_prompt_tokens + one.num_output_tokens <= 600 and one.arrival_s < 200.0 for one in requests)
    assert {one.adapter for one in requests} == {f"adapter-{index:02d}" for index in range(12)}


def test_two_conversations_share_no_block():
    assert len(conversations()) > 150, "Poisson arrivals at one a second open about two hundred"
    names = [{name for one in turns for name in one.prefix} for turns in conversations().values()]
    assert sum(map(len, names)) == len(set().union(*names))


def test_one_turn_each_is_the_workload_without_them():
    plain = make_workload(replace(SPEC, conversations=None), 3).requests
    single = Conversations(turns=FixedTokens(tokens=1), pause_s=FixedTokens(tokens=1))
    for one, other in zip(plain, make_workload(replace(SPEC, conversations=single), 3).requests, strict=True):
        assert replace(other, prefix=(), prefix_block_tokens=512) == one


def test_a_block_has_room_for_its_name():
    with pytest.raises(ConfigError, match="block_tokens"):
        Conversations(turns=FixedTokens(tokens=1), pause_s=FixedTokens(tokens=1), block_tokens=4)
