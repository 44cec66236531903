"""What is there when serving begins is left out of garbage collection."""

from __future__ import annotations

import gc

from manylora.serving.hosting.engine.startup import freeze_start_up_heap


def test_everything_there_is_left_out_and_what_comes_later_is_not() -> None:
    num_before = gc.get_freeze_count()  # of the tests' own start-up heap
    fresh = [[number] for number in range(10_000)]
    freeze_start_up_heap()
    assert gc.get_freeze_count() - num_before > len(fresh)
    later: list[object] = []
    later.append(later)
    number = id(later)
    assert any(id(one) == number for one in gc.get_objects())
    del later
    assert gc.collect() >= 1
