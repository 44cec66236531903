"""Requests that are hostile by their size or shape, and the largest that are allowed: no neighbour is late.

The longest callback of the server's event loop is measured in processor time, which other work on the machine does not
change, and is the least of a few tries. A neighbour is late by as much, on any machine.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from attack_target import MODEL, NUM_TIMES, Target, Watch, running
from corpus import COMPLETIONS, HOSTILE, Hostile
from maxima import LONG, MAXIMA, Allowed
from timed_serve import Longest

LONGEST_S = 0.020
"""Most processor time of one callback: a decoder's pass over a megabyte, or a message of two thousand requests."""

NUM_TRIES = 3

NUM_AT_ONCE = 120
"""Large bodies at once: half of the room for bodies, which one caller may have."""


def check_callbacks(target: Target, path: str, body: bytes, status: int) -> None:
    """Assert that a request keeps the event loop from others in no callback."""
    target.longest()
    least: Longest | None = None
    for _ in range(NUM_TRIES):
        assert target.ask("POST", path, body).status == status
        found = target.longest()
        least = found if least is None or found.cpu_s < least.cpu_s else least
        if least.cpu_s <= LONGEST_S:
            return
    pytest.fail(str(least))


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
    check_callbacks(target, hostile.path, hostile.body, hostile.status)


@pytest.fixture(scope="module")
def long_target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    with running(tmp_path_factory.mktemp("long"), model=LONG, is_timed=True) as one:
        yield one


@pytest.mark.parametrize("allowed", MAXIMA, ids=lambda one: one.slug)
def test_the_largest_that_is_allowed_stops_nobody(long_target: Target, allowed: Allowed) -> None:
    answer = long_target.ask("POST", allowed.path, allowed.body)
    assert answer.status == 200, answer.body[:300]
    assert len(answer.body) >= allowed.least_bytes
    check_callbacks(long_target, allowed.path, allowed.body, 200)


def test_long_reports_stop_nobody(target: Target) -> None:
    """Reports of prompts within the bounds: megabytes of JSON, made a millisecond at a time."""
    prompt = b",".join([b"%d" % (20 + i % 90) for i in range(1_000)])
    body = b'{"model":"%b","n":8,"max_tokens":1,"prompt_logprobs":20,"prompt":[%b]}' % (MODEL.encode(), prompt)
    with Watch(target) as seen:
        answers = [target.ask("POST", COMPLETIONS, body) for _ in range(NUM_TIMES)]
    print(seen.summary())
    assert {answer.status for answer in answers} == {200}
    assert min(len(answer.body) for answer in answers) > 8 * 1_000 * 21 * 40
    seen.check(step_s=0.3)  # a prompt of a thousand tokens on the simulated device


def test_hostile_requests_at_once_stop_nobody(target: Target) -> None:
    """Texts that must be tokenized to be refused, all together: they take turns, and short requests need none."""
    dense = next(one for one in HOSTILE if one.slug.startswith("dense"))
    with Watch(target) as seen, ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda _: target.ask("POST", dense.path, dense.body), range(32 * NUM_TIMES)))
    print(seen.summary())
    assert {answer.status for answer in answers} == {400}
    seen.check()


def test_large_bodies_that_end_together_stop_nobody(target: Target) -> None:
    """Each is decoded in pieces of some milliseconds, and the pieces of all share every pass of the event loop."""
    large = next(one for one in HOSTILE if one.slug == "fields")
    head = (
        f"POST {large.path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
        f"Content-Length: {len(large.body)}\r\n\r\n"
    ).encode()
    with Watch(target) as seen, contextlib.ExitStack() as stack:
        begun = [stack.enter_context(target.connect()) for _ in range(NUM_AT_ONCE)]
        for one in begun:
            one.sendall(head + large.body[:-1])
        for one in begun:
            one.sendall(large.body[-1:])
        statuses = {one.recv(12) for one in begun}
    print(seen.summary())
    assert statuses == {b"HTTP/1.1 400"}
    seen.check()
