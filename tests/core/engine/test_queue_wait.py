"""Predicted waits: with known lengths, an accepted request waits no longer than the limit, and no other is refused."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest
from harness import Rig, make_rig, request
from hypothesis import given, settings
from hypothesis import strategies as st

from manylora.core.engine.queue_wait import num_starts, play, quantiles
from manylora.core.errors import CapacityError
from manylora.core.events import RequestAdmitted
from manylora.core.types import Continuation

STEP_S = 1.0
"""A turn of the rig."""

SLACK_S = 2 * STEP_S
"""A step in flight when the request arrives, and the one that collects the end of another."""

arrivals = st.lists(
    st.lists(st.tuples(st.integers(1, 12), st.integers(1, 6), st.booleans()), max_size=6), min_size=1, max_size=25
)
"""For each step, its arrivals: tokens of the answer, tokens of the prompt, and whether it is cancelled a step later."""


def rig_of(num_seats: int, max_wait_s: float | None, step_tokens: int) -> Rig:
    """Return an engine that knows the time of a step."""
    rig = make_rig(
        num_pages=4096,
        max_num_seqs=num_seats,
        max_num_batched_tokens=step_tokens,
        max_wait_s=max_wait_s,
        predictor="oracle",
        prefix_caching=False,
    )
    rig.add(request("warm-up", 1, 2))
    rig.drain()
    return rig


def waits(rig: Rig) -> dict[str, float]:
    return {event.request_id: event.waited_s for event in rig.events if isinstance(event, RequestAdmitted)}


@settings(max_examples=60)
@given(arrivals, st.integers(1, 4), st.sampled_from([3.0, 8.0]))
def test_waits_are_bounded_and_nothing_else_is_refused(
    plan: list[list[tuple[int, int, bool]]], num_seats: int, max_wait_s: float
) -> None:
    """The other half is told by a twin without the limit: it takes the first refused request, which is late there."""
    rig, twin = rig_of(num_seats, max_wait_s, 64), rig_of(num_seats, None, 64)
    refused: str | None = None
    for number, arriving in enumerate(plan):
        for rank, (num_tokens, num_prompt, _) in enumerate(arriving):
            one = request(f"{number}-{rank}", num_prompt, num_tokens)
            try:
                rig.add(one)
            except CapacityError as error:
                assert error.status == 429
                if refused is not None:
                    continue
                refused = one.request_id
            if refused is None or refused == one.request_id:
                twin.add(one)
        rig.step()
        twin.step()
        for rank, (_, _, is_cancelled) in enumerate(arriving):
            if is_cancelled:
                rig.core.cancel(f"{number}-{rank}", rig.now)
                if f"{number}-{rank}" != refused:
                    twin.core.cancel(f"{number}-{rank}", twin.now)
    rig.drain()
    twin.drain()
    assert max(waits(rig).values(), default=0.0) <= max_wait_s + SLACK_S
    if refused is not None and not any(is_cancelled for arriving in plan for _, _, is_cancelled in arriving):
        assert waits(twin)[refused] >= max_wait_s - SLACK_S


def test_prompts_before_it_count_though_seats_are_free() -> None:
    rig = rig_of(64, 4.0, 8)
    rig.add(request("first", 3, 40))
    rig.step()
    rig.step()
    rig.add(request("long", 40, 2))  # six steps of the seven tokens that are left
    with pytest.raises(CapacityError, match="longer than 4 s"):
        rig.add(request("late", 3, 2))
    rig.drain()


def test_a_flood_on_an_idle_engine_is_refused_from_the_first_step_on() -> None:
    """No answer has ended yet; a mean rate would have nothing to go by."""
    rig = rig_of(2, 5.0, 64)
    rig.add(request("a", 3, 50), request("b", 3, 50))
    rig.step()
    rig.step()
    with pytest.raises(CapacityError):
        rig.add(request("c", 3, 2))
    rig.core.cancel("a", rig.now)
    rig.step()
    rig.add(request("c", 3, 2))
    rig.drain()


def test_answers_that_go_on_after_the_loss_of_an_engine_are_never_refused() -> None:
    rig = rig_of(1, 1.0, 64)
    rig.add(request("a", 3, 50))
    rig.step()
    rig.step()
    with pytest.raises(CapacityError):
        rig.add(request("b", 3, 2))
    rig.add(replace(request("c", 3, 4), continuation=Continuation(tokens=(5, 6), adapter=None)))
    rig.drain()


@settings(max_examples=60)
@given(st.integers(1, 12), st.integers(1, 10), st.integers(0, 20), st.integers(1, 4), st.sampled_from([3.0, 8.0]))
def test_the_room_is_the_number_of_requests_that_are_accepted(
    num_tokens: int, num_before: int, num_steps: int, num_seats: int, max_wait_s: float
) -> None:
    """The engine tells it with every turn, and the API process lets no more through."""
    rig = rig_of(num_seats, max_wait_s, 64)
    for index in range(num_before):
        with contextlib.suppress(CapacityError):
            rig.add(request(f"before-{index}", 1, num_tokens))
    for _ in range(num_steps):
        rig.step()
    if not rig.core.has_requests:
        return
    room = rig.core.queue_wait.num_room()
    for index in range(room):
        rig.add(request(f"new-{index}", 1, num_tokens))
    with pytest.raises(CapacityError):
        rig.add(request("beyond", 1, num_tokens))
    assert rig.core.queue_wait.num_room() == 0


@given(st.integers(1, 1000), st.integers(1, 5000))
def test_the_quantiles_of_a_length_rise_around_its_median(p50: int, more: int) -> None:
    low, below, above, high = quantiles(p50, p50 + more)
    assert 1 <= low <= below <= p50 <= above <= high <= max(high, p50 + more)
    assert quantiles(p50, p50) == (p50,)


def test_unknown_lengths_count_as_parts_of_seats() -> None:
    parts = quantiles(10, 33)
    assert parts == (2, 7, 14, 30)
    seats = play([*parts, *parts], [], 0)
    assert num_starts(seats, 14, 1000) == 6  # three parts of each of two seats: one request, and half of another
    assert num_starts(play([*parts, *parts], parts, 0), 14, 1000) == 4  # the first part of the one before has ended
