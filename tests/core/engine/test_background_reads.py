"""Adapters registered without their weights: read on demand and in the background, failed ones named."""

from __future__ import annotations

from harness import Rig, make_rig, request, version

from manylora.core.config import AdapterConfig
from manylora.core.types import Tier

HOST_BYTES = version("any").host_bytes


def unread(num: int, **adapters: object) -> Rig:
    rig = make_rig(adapters=AdapterConfig(**adapters))  # type: ignore[arg-type]
    for index in range(num):
        rig.register(f"a{index}", is_unread=True)
    return rig


def reading(rig: Rig) -> list[str]:
    return [load.version.key for load, _ in rig.executor.loads if load.tier is Tier.HOST]


def in_host(rig: Rig) -> list[str]:
    return list(rig.core._cache.host.recent())


def state(rig: Rig, name: str) -> str:
    return rig.core.adapters.status(name, rig.now).state


def test_reads_go_one_at_a_time_in_order_until_host_memory_is_full() -> None:
    rig = unread(5, host_bytes=3 * HOST_BYTES)
    rig.turn()
    for index in range(3):
        assert reading(rig) == [f"key-a{index}"]
        rig.turn()
        assert len(rig.executor.loads) == 1, "one at a time"
        rig.executor.complete_load()
        rig.turn()
    assert not rig.executor.loads
    assert (rig.core.stats().num_host, rig.core.stats().num_only_disk) == (3, 2)
    rig.add(request("r", model="a4"))
    rig.drain()
    assert rig.finish("r") == "length", "a demanded one makes room"


def test_an_adapter_without_room_is_left_to_its_request_and_the_next_is_read() -> None:
    rig = unread(1, host_bytes=3 * HOST_BYTES)
    rig.register("large", 5, is_unread=True)
    rig.register("small", is_unread=True)
    for key in ("key-a0", "key-small"):
        rig.turn()
        assert reading(rig) == [key]
        rig.executor.complete_load()
    rig.turn()
    assert not rig.executor.loads


def test_an_image_that_was_never_used_leaves_before_those_that_were() -> None:
    rig = unread(4, host_bytes=3 * HOST_BYTES)
    rig.add(request("uses a0", model="a0"))
    for _ in range(20):
        rig.step()
    assert in_host(rig) == ["key-a0", "key-a1", "key-a2"]  # the most recently used first
    rig.add(request("uses a1", model="a1"))
    rig.drain()
    assert in_host(rig) == ["key-a1", "key-a0", "key-a2"]
    rig.add(request("uses a3", model="a3"))
    rig.drain()
    assert in_host(rig) == ["key-a3", "key-a1", "key-a0"]


def test_a_background_read_that_a_request_waits_for_is_its_own() -> None:
    rig = unread(2)
    rig.step()
    rig.executor.complete_load()
    rig.turn()
    assert reading(rig) == ["key-a1"]
    rig.add(request("r", model="a1"))
    rig.executor.complete_load()
    rig.turn()
    assert in_host(rig) == ["key-a1", "key-a0"]


def test_a_demanded_read_starts_beside_one_in_the_background() -> None:
    rig = unread(3)
    rig.turn()
    rig.add(request("r", model="a2"))
    rig.turn()
    assert reading(rig) == ["key-a0", "key-a2"]
    rig.executor.complete_load(1)
    rig.turn()
    assert reading(rig) == ["key-a0"], "its copy to the device did not wait"
    rig.step()
    rig.drain()
    assert rig.finish("r") == "length"


def test_reads_take_a_small_share_of_the_time_while_requests_are_in_flight() -> None:
    rig = unread(3)
    rig.turn()
    rig.add(request("r", num_prompt=5, max_tokens=30))
    rig.turn()
    rig.executor.complete_load()  # it took two seconds
    num_turns = 0
    while not rig.executor.loads:
        rig.step()
        num_turns += 1
    assert 20 < num_turns < 60
    rig = unread(3)
    rig.step()
    rig.step()
    assert reading(rig) == ["key-a1"], "an idle engine does not rest"


def test_a_fault_found_later_is_named_and_healed_by_a_read_that_succeeds() -> None:
    rig = unread(2)
    rig.turn()
    rig.executor.complete_load(error="its weights are not finite")
    rig.turn()
    rig.step()
    assert (state(rig, "a0"), state(rig, "a1")) == ("failed", "idle")
    assert rig.core.adapters.status("a0", rig.now).error == "its weights are not finite"
    assert rig.core.stats().num_failed == 1
    assert rig.core.adapters.busiest(1, rig.now)[0].name == "a0", "a view of few shows it"
    assert rig.core.adapters.in_use(rig.now) == (), "no series for an adapter that was never used"
    rig.add(request("r", model="a0"))
    rig.turn()
    rig.executor.complete_load(error="still not finite")
    rig.turn()
    assert rig.finish("r") == "error" and "still not finite" in (rig.outputs["r"][-1].error or "")
    rig.add(request("again", model="a0"))
    rig.drain()
    assert rig.finish("again") == "length"
    assert rig.core.stats().num_failed == 0 and rig.core.adapters.status("a0", rig.now).error is None
    rig.core.adapters.unregister("a0", rig.now)
    rig.core.check_integrity()


def test_background_reads_can_be_off() -> None:
    rig = unread(2, background_reads=False)
    rig.turn()
    assert not rig.executor.loads


def test_an_adapter_that_was_unregistered_is_not_read() -> None:
    rig = unread(3)
    rig.core.adapters.unregister("a0", rig.now)
    rig.register("a1", key="other", replace=True)
    rig.turn()
    assert reading(rig) == ["key-a2"]


def test_no_copy_stays_in_host_memory_if_none_is_kept() -> None:
    rig = unread(2, keep_host_copies=False)
    rig.turn()
    assert not rig.executor.loads, "nothing is read ahead"
    for number in range(2):
        for index in range(2):
            rig.add(request(f"r{number}{index}", model=f"a{index}"))
            rig.drain()
            assert rig.finish(f"r{number}{index}") == "length"
            assert not in_host(rig) and rig.core.stats().num_host == 0
    assert rig.core.stats().num_disk_loads == 2, "they stay on the device"
