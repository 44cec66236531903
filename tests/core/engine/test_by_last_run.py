"""Adapters kept by their last run, as vLLM keeps them: every request is answered, however little memory there is."""

from __future__ import annotations

import pytest
from harness import make_rig, request

from manylora.core.config import AdapterConfig
from manylora.core.errors import CapacityError
from manylora.core.types import Tier


@pytest.mark.parametrize("policy", ["fifo", "strict-fifo"])
def test_a_copy_that_no_other_makes_room_for_is_used_and_not_read_for_ever(policy):
    adapters = AdapterConfig(by_last_run=True, max_cpu_loras=1)
    rig = make_rig(adapters=adapters, policy=policy, max_num_seqs=1)
    rig.register("old")
    rig.register("new", is_unread=True)
    rig.add(request("runs"), request("first", model="new"), request("second", model="old"))
    rig.turn()
    rig.core.adapters.unregister("old", rig.now)  # its files may be gone: it stays until the second has its answer
    rig.drain(max_steps=100)
    assert rig.core.stats().num_disk_loads == 1
    rig.core.check_integrity()


def test_pages_of_an_adapter_that_is_awaited_and_has_not_run_are_not_claimed_for_another():
    rig = make_rig(adapters=AdapterConfig(by_last_run=True, eviction="lru"), num_pages=6, max_num_seqs=1)
    rig.register("a", 3)
    rig.register("b", 3)
    rig.add(request("runs", max_tokens=6), request("waits", max_tokens=2, model="a"))
    rig.turn()
    rig.step()
    rig.step()
    assert rig.core.adapters.status("a", rig.now).tier is Tier.DEVICE
    with pytest.raises(CapacityError):
        rig.core.adapters.warm("b", rig.now)
    rig.drain()
    rig.core.adapters.warm("b", rig.now)
    rig.drain()
    assert rig.core.adapters.status("b", rig.now).tier is Tier.DEVICE
    rig.core.check_integrity()
