"""The right adapter answers: held-out accuracy of every demo adapter, all of them in one mixed batch."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest
from demo_tasks import held_out_prompts

from manylora import Engine, SamplingParams
from manylora.demo import TASKS, check

NUM_PROMPTS = 100
SEED = 1
GREEDY = SamplingParams(temperature=0.0, max_tokens=96)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine("demo") as engine:
        yield engine


@pytest.mark.slow
def test_every_adapter_does_its_task_and_the_base_does_none(engine: Engine) -> None:
    prompts = held_out_prompts(Random(SEED), NUM_PROMPTS)
    jobs = [(name, prompt) for prompt in prompts for name in (*TASKS, None)]
    answers = engine.chat(
        [[{"role": "user", "content": prompt}] for _, prompt in jobs],
        adapter=[name for name, _ in jobs],
        sampling=GREEDY,
    )
    right = dict.fromkeys(TASKS, 0)
    right_of_base = dict.fromkeys(TASKS, 0)
    for (name, prompt), answer in zip(jobs, answers, strict=True):
        assert answer.error is None
        if name is not None:
            right[name] += check(name, prompt, answer.text)
        else:
            for task in TASKS:
                right_of_base[task] += check(task, prompt, answer.text)
    assert {name: count for name, count in right.items() if count < 0.95 * NUM_PROMPTS} == {}
    assert {name: count for name, count in right_of_base.items() if count > 0.05 * NUM_PROMPTS} == {}
