"""Requests that are hostile by their size or shape: each is refused, and no neighbour is late."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from attack_target import MODEL, NUM_TIMES, Target, Watch
from corpus import COMPLETIONS, HOSTILE, Hostile


@pytest.mark.parametrize("hostile", HOSTILE, ids=lambda one: one.slug)
def test_a_hostile_request_is_refused_and_stops_nobody(target: Target, hostile: Hostile) -> None:
    with Watch(target) as seen:
        answers = [target.ask("POST", hostile.path, hostile.body) for _ in range(NUM_TIMES)]
    print(seen.summary())
    for answer in answers:
        assert answer.status == hostile.status, answer.body[:300]
        assert len(answer.body) < 2_000, "the refusal repeats the request"
        if hostile.param is not None:
            assert answer.error["param"] == hostile.param
        if hostile.kind is not None:
            assert answer.error["type"] == hostile.kind
    seen.check()


def test_long_reports_stop_nobody(target: Target) -> None:
    """Reports of prompts within the bounds: megabytes of JSON, made a millisecond at a time."""
    prompt = b",".join([b"%d" % (20 + i % 90) for i in range(1_000)])
    body = b'{"model":"%b","n":8,"max_tokens":1,"prompt_logprobs":20,"prompt":[%b]}' % (MODEL.encode(), prompt)
    with Watch(target) as seen:
        answers = [target.ask("POST", COMPLETIONS, body) for _ in range(NUM_TIMES)]
    print(seen.summary())
    assert {answer.status for answer in answers} == {200}
    assert min(len(answer.body) for answer in answers) > 8 * 1_000 * 21 * 40
    seen.check()


def test_hostile_requests_at_once_stop_nobody(target: Target) -> None:
    """Texts that must be tokenized to be refused, all together: they take turns, and short requests need none."""
    dense = next(one for one in HOSTILE if one.slug.startswith("dense"))
    with Watch(target) as seen, ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda _: target.ask("POST", dense.path, dense.body), range(32 * NUM_TIMES)))
    print(seen.summary())
    assert {answer.status for answer in answers} == {400}
    seen.check()
