"""What is there when serving begins is left out of garbage collection."""

from __future__ import annotations

import gc

from manylora.serving.hosting.engine.startup import freeze_start_up_heap


def test_everything_there_is_left_out_and_what_comes_later_is_not() -> None:
    try:
        freeze_start_up_heap()
        assert gc.get_freeze_count() > 10_000
        later: list[object] = []
        later.append(later)
        number = id(later)
        assert any(id(one) == number for one in gc.get_objects())
        del later
        assert gc.collect() >= 1
    finally:
        gc.unfreeze()
