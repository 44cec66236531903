"""The paging benchmark, shortened: pages never fail and hold the most; and its opponent is a fair one."""

from __future__ import annotations

import random

from paging import LLAMA_3_8B, Contiguous, Size, compare


def test_pages_never_fail_and_hold_the_most() -> None:
    outcomes = compare(LLAMA_3_8B, num_adapters=300, num_loads=400, seed=1)
    pages, contiguous, slots = outcomes["pages"], outcomes["contiguous"], outcomes["slots"]
    assert pages.failures == pages.extra_evictions == 0
    assert pages.external == 0.0
    assert pages.internal < 0.01
    assert contiguous.failures > 0
    assert pages.resident > contiguous.resident > slots.resident
    assert pages.hit_rate > contiguous.hit_rate > slots.hit_rate


def test_the_contiguous_allocator_is_first_fit() -> None:
    """Against the same idea on a string of cells."""
    rng = random.Random(0)
    cell = Contiguous.ALIGN
    region, cells = Contiguous(64 * cell), "." * 64
    held: list[tuple[object, int]] = []
    refused = 0
    for _ in range(2000):
        if held and rng.random() < 0.5:
            place, length = held.pop(rng.randrange(len(held)))
            region.free(place)
            assert isinstance(place, int)
            first = place // cell
            cells = cells[:first] + "." * length + cells[first + length :]
        else:
            length = rng.randint(1, 16)
            place = region.allocate(Size(length * cell - rng.randrange(cell), 0))
            first = cells.find("." * length)
            assert place == (None if first < 0 else first * cell)
            if place is None:
                refused += 1
            else:
                held.append((place, length))
                cells = cells[:first] + "#" * length + cells[first + length :]
        region.check()
        assert region.free_bytes() == cells.count(".") * cell
        assert region.largest_hole() == max(map(len, cells.split("#"))) * cell
    assert refused > 100
