"""The simulated link: first in, first out, and left to others by a copy that waits for its read."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manylora.lab.sim.run.executor import SimulatedLink

LAYERS = 4
DURATIONS = st.floats(0.01, 2.0)
LOADS = st.lists(st.tuples(st.floats(0.0, 1.0), DURATIONS, st.none() | DURATIONS), min_size=1, max_size=12)
"""Loads: time after the one before, duration, and that of the read which it follows, if it does."""


@given(LOADS)
def test_pieces_are_copied_in_the_order_in_which_they_are_there(loads: list[tuple[float, float, float | None]]) -> None:
    """Planned load by load, in ignorance of those to come, the link ends as one that knows all pieces."""
    disk, link, now = SimulatedLink(), SimulatedLink(), 0.0
    started, pieces = [], []
    for after_s, load_s, read_s in loads:
        now += after_s
        read = None if read_s is None else disk.load(now, read_s, LAYERS)
        number, load = len(started), link.load(now, load_s, LAYERS, read)
        started.append(load)
        if read is None:
            pieces.append((now, number, range(LAYERS), load_s))
        else:
            pieces += [
                (arrives_at, number, range(layer, layer + 1), load_s / LAYERS)
                for layer, arrives_at in enumerate(read.arrivals)
            ]
        assert load.begins_at >= now and sum(end - begin for begin, end in load.uses) == pytest.approx(load_s)
        busy = list(link.busy())
        assert all(one[1] < next_[0] for one, next_ in pairwise(busy)) and busy[-1][1] == link.free_at
    free_at = 0.0
    for ready_at, number, layers, seconds in sorted(pieces, key=lambda piece: piece[:2]):
        begins_at = max(free_at, ready_at)
        free_at = begins_at + seconds
        expected = [begins_at + seconds * (count / len(layers)) for count in range(1, len(layers) + 1)]
        assert started[number].arrivals[layers.start : layers.stop] == pytest.approx(expected)


def test_a_copy_that_waits_for_a_slow_read_leaves_the_link_to_others() -> None:
    disk, link = SimulatedLink(), SimulatedLink()
    read = disk.load(0.0, 40.0, LAYERS)
    chained = link.load(0.0, 0.4, LAYERS, read)
    assert chained.begins_at == 0.0
    assert chained.arrivals == pytest.approx([10.1, 20.1, 30.1, 40.1])
    assert link.load(1.0, 2.0, LAYERS).ready_at == 3.0
    # A layer that has been read meanwhile is copied next.
    assert link.load(9.0, 2.0, LAYERS).arrivals == pytest.approx([9.5, 10.0, 10.5, 11.0])
    assert chained.arrivals == pytest.approx([11.1, 20.1, 30.1, 40.1])


def test_copies_of_images_that_are_there_come_one_after_another() -> None:
    link = SimulatedLink()
    assert [link.load(now, 1.0, LAYERS).ready_at for now in (0.0, 0.0, 0.5, 4.0)] == [1.0, 2.0, 3.0, 5.0]
    assert list(link.busy()) == [(4.0, 5.0)] and link.free_at == 5.0
