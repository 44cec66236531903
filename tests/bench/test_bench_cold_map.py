"""The map of cold starts: points agree with closed forms."""

from __future__ import annotations

import pytest
from cold_map_points import MODEL, Rig

from manylora.lab.catalog.models import base_shape

LAYERS = 32


def test_points_agree_with_closed_forms() -> None:
    rig = Rig("h100", "q, k, v", 64, 52e9, base_shape(MODEL, block_size=16))
    for queued in (0, 4, 16):
        one = rig.point(64, 32, queued)
        arrives_s = (queued + 1) * one.copy_s
        steps = 1 + arrives_s // one.decode_s
        assert one.wait_s == pytest.approx(steps * one.decode_s + one.step_s)
        pipeline_s = max(one.step_s + one.copy_s / LAYERS, one.copy_s + one.step_s / LAYERS)
        assert one.layers_s == pytest.approx(queued * one.copy_s + pipeline_s)
        assert one.both_s <= one.assist_s, "the device is never slower than the workers here"
    assert rig.point(64, 32, 0).gain < 0 < rig.point(64, 32, 16).gain
    assert rig.point(64, 64, 4).assist_s == rig.point(64, 8, 4).assist_s, "64 rows are three workers'"
    assert rig.point(1024, 16, 4).assist_s < rig.point(1024, 8, 4).assist_s
    assert rig.point(1024, 64, 4).assist_s == rig.point(1024, 16, 4).assist_s, "more workers than 16 never share a step"


def test_a_request_that_a_step_gives_up_waits_for_all_of_its_adapter() -> None:
    """Seventeen copies of 107 ms are more than a step waits for."""
    rig = Rig("h100", "all", 128, 6e9, base_shape(MODEL, block_size=16))
    one = rig.point(64, 32, 16)
    assert (one.queued + 1) * one.copy_s > 1.0
    assert abs(one.layers_s - one.wait_s) < one.decode_s  # steps end at other times
