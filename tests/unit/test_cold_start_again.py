"""Cold starts that are tried again after a failure."""

from __future__ import annotations

import pytest
from harness import request
from test_cold_starts import placements, rig_of

from manylora.plan import ON_DEVICE


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
