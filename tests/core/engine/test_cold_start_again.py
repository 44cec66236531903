"""Cold starts that are tried again after a failure, or chosen again after another request's."""

from __future__ import annotations

import math

import pytest
from harness import request
from test_cold_starts import of, placements, rig_of

from manylora.core.events import ColdStartChosen, ColdStartEnded
from manylora.core.plan import ARRIVING, IN_HOST, ON_DEVICE
from manylora.core.types import ColdStart


@pytest.mark.parametrize("mode", ["wait", "assist", "layers"])
def test_a_failed_load_leaves_nothing_on_the_device_and_the_next_request_tries_again(mode):
    rig = rig_of(mode, reads_host=True)
    rig.add(request("a", model="x", max_tokens=9))
    rig.turn()
    assert rig.executor.on_device == {"key-x"}
    rig.executor.complete_load(error="the link is down")
    rig.turn()
    if rig.executor.plan is not None:
        rig.executor.complete_step(lost={"key-x"})
        rig.turn()
    assert rig.core.stats().num_adapter_pages == 0 and not rig.executor.on_device
    is_running = mode == "assist"  # from the image, which it keeps: it asks for no copy
    assert ("a" in rig.outputs and rig.finish("a") == "error") != is_running and not rig.executor.loads
    rig.add(request("b", model="x"))
    rig.step()
    assert len(rig.executor.loads) == 1
    rig.step()
    assert placements(rig) == [ON_DEVICE] * (1 + is_running)
    rig.drain()
    assert rig.finish("b") == "length" and rig.finish("a") == ("length" if is_running else "error")


@pytest.mark.parametrize("cached", [ColdStart.ASSIST, ColdStart.LAYERS])
def test_a_choice_is_made_again_when_another_request_has_begun_another_way(cached, monkeypatch):
    """Both read the adapter from one place, so the mode that is booked must be the one that runs."""
    runs = ColdStart.LAYERS if cached is ColdStart.ASSIST else ColdStart.ASSIST
    script, begins_at = [cached, runs], {"a": math.inf, "b": 0.0}
    rig = rig_of("auto", on_disk=cached is ColdStart.ASSIST, reads_host=True)
    monkeypatch.setattr(
        "manylora.core.engine.adapters.cold_starts.choose",
        lambda expected, allowed, num_sharing: script.pop(0) if script else allowed[-1],
    )
    monkeypatch.setattr(rig.core._cold_starts, "begins_at", lambda one: begins_at[one.request.request_id])
    rig.add(request("a", model="x"), request("b", model="x", max_tokens=9))
    rig.turn()
    placement = ARRIVING if runs is ColdStart.LAYERS else IN_HOST
    assert placements(rig) == [placement]  # of b; a waits for the read, or for its begin
    begins_at["a"] = 0.0
    rig.executor.complete_step()
    rig.turn()
    assert placements(rig) == [placement, placement]
    assert [event.mode for event in of(rig, ColdStartChosen)] == [cached, runs, runs]
    rig.drain()
    assert [(event.request_id, event.mode) for event in of(rig, ColdStartEnded)] == [("b", runs), ("a", runs)]
