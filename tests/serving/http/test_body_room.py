"""The room of bodies that arrive: a caller has as much as would still be free, so there is room for one more."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manylora.serving.http.errors import HttpError
from manylora.serving.http.room import SHORT_BODY_BYTES, ArrivingBody, BodyRoom

LONG = SHORT_BODY_BYTES + 1
ROOM = 12 * LONG


def send(room: BodyRoom, caller: str, num_bytes: int = LONG) -> ArrivingBody | None:
    """Return a body that has arrived; ``None`` if it was refused."""
    body = room.enter(lambda: caller)
    try:
        body.grow(num_bytes)
    except HttpError as error:
        assert error.status == 429
        body.close()
        return None
    return body


def test_one_caller_leaves_room_for_others() -> None:
    room = BodyRoom(ROOM)
    flood = [send(room, "flood") for _ in range(12)]
    assert len([one for one in flood if one is not None]) == 6
    assert [send(room, "b") is not None for _ in range(4)] == [True] * 3 + [False]
    assert send(room, "c") is not None
    for one in flood:
        if one is not None:
            one.close()
    assert room.num_bytes == 4 * LONG


def test_a_body_alone_may_be_longer_than_the_room() -> None:
    room = BodyRoom(ROOM)
    body = room.enter(lambda: "a")
    body.grow(LONG)
    body.grow(2 * ROOM)
    assert send(room, "b") is None
    body.close()
    assert room.num_bytes == 0


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 5), st.booleans()), max_size=60))
def test_all_that_is_taken_is_given_back(steps: list[tuple[str, int, bool]]) -> None:
    room, held = BodyRoom(ROOM), list[ArrivingBody]()
    for caller, size, ends in steps:
        if ends and held:
            held.pop(0).close()
        elif (body := send(room, caller, size * LONG)) is not None:
            held.append(body)
        assert room.num_bytes <= ROOM
    for body in held:
        body.close()
        body.close()
    assert room.num_bytes == 0
    assert send(room, "a", 6 * LONG) is not None
    with pytest.raises(HttpError, match="long bodies"):
        room.enter(lambda: "a").grow(LONG)
