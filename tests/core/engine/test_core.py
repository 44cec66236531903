"""The guarantees of the core, one per test."""

from __future__ import annotations

from dataclasses import replace

import pytest
from harness import make_rig, policy_context, request

from manylora.core.clock import VirtualClock
from manylora.core.config import AdapterConfig
from manylora.core.engine.loop import EngineLoop
from manylora.core.errors import (
    AdapterError,
    AdapterExists,
    AdapterNotFound,
    CapacityError,
    ConfigError,
    ModelNotFound,
    RequestError,
    Stalled,
)
from manylora.core.events import AdapterAwaited, RequestAdmitted, RequestPreempted
from manylora.core.plan import IN_HOST, ON_DEVICE
from manylora.core.scheduling import make_policy
from manylora.core.types import Tier


def admitted(rig) -> list[str]:
    return [event.request_id for event in rig.events if isinstance(event, RequestAdmitted)]


def test_a_request_runs_to_its_length():
    rig = make_rig()
    rig.add(request("r", num_prompt=6, max_tokens=5))
    rig.drain()
    assert len(rig.tokens("r")) == 5
    assert rig.finish("r") == "length"


def test_long_prompts_run_in_chunks_and_decoding_goes_on_beside_them():
    rig = make_rig(max_num_batched_tokens=10, prefix_caching=False)
    rig.add(request("short", num_prompt=3, max_tokens=20))
    rig.turn()
    rig.step()
    rig.add(request("long", num_prompt=40, max_tokens=2))
    chunks = []
    for _ in range(6):
        rig.step()
        chunks.append({part.seq_id: part.num_tokens for part in rig.executor.plan.sequences})
    # The decoding sequence gets its token in every step; the prompt shares what is left of the budget.
    assert chunks[:5] == [{0: 1, 1: 9}] * 4 + [{0: 1, 1: 4}]
    assert not any(part.is_sampled for part in rig.executor.plan.sequences if part.num_tokens > 1)


def test_stop_tokens_end_a_sequence_and_eos_can_be_ignored():
    probe = make_rig()
    probe.add(request("r", max_tokens=6))
    probe.drain()
    third = probe.tokens("r")[2]

    rig = make_rig(eos=(third,))
    rig.add(request("eos", max_tokens=6), request("ignored", max_tokens=6, ignore_eos=True))
    rig.drain()
    assert rig.finish("eos") == "stop"
    assert rig.tokens("eos")[-1] == third == rig.outputs["eos"][-1].stop_token
    assert rig.finish("ignored") == "length"

    rig = make_rig()
    rig.add(request("stop", max_tokens=6, stop_token_ids=(third,)))
    rig.add(request("late", max_tokens=6, stop_token_ids=(third,), min_tokens=5))
    rig.drain()
    assert len(rig.tokens("stop")) == 3
    assert len(rig.tokens("late")) == 6


def test_prefix_blocks_are_shared_within_an_adapter_and_salt_and_never_across():
    rig = make_rig(num_pages=200)
    rig.register("a")
    rig.register("b")
    base = request("first", num_prompt=17, max_tokens=1)

    def cached(name: str, **changes: str) -> int:
        rig.add(replace(base, request_id=name, **changes))
        rig.drain()
        return rig.outputs[name][-1].num_cached_tokens

    assert cached("first") == 0
    assert cached("again") == 16
    assert cached("on a, salted", model="a", cache_salt="s") == 0
    assert cached("on a 1", model="a") == 0
    assert cached("on a 2", model="a") == 16
    assert cached("on b", model="b") == 0
    assert cached("salted again", model="a", cache_salt="s") == 16


def test_a_replaced_adapter_meets_no_stale_prefix_and_old_requests_stay_on_the_old_version():
    rig = make_rig(max_num_seqs=1)
    rig.register("a", key="v1")
    rig.add(request("one", num_prompt=9, model="a"), request("one-more", num_prompt=9, model="a"))
    rig.turn()
    rig.register("a", key="v2", replace=True)
    rig.add(request("two", num_prompt=9, model="a"))
    assert rig.core.adapters.status("a", rig.now).generation == 2
    rig.drain()
    versions = {name: rig.outputs[name][-1].adapter for name in ("one", "one-more", "two")}
    assert versions == {"one": "v1", "one-more": "v1", "two": "v2"}
    assert rig.outputs["two"][-1].num_cached_tokens == 0
    # The old version went with its last request: off the device and off the host.
    assert rig.executor.host == {"v2"}
    assert rig.core.stats().num_adapter_pages == 2


def test_two_names_of_the_same_content_share_one_version():
    rig = make_rig()
    rig.register("a", key="same")
    rig.register("b", key="same")
    rig.add(request("1", model="a"), request("2", model="b"))
    rig.drain()
    stats = rig.core.stats()
    assert (stats.num_registered, stats.num_resident, stats.num_loads) == (2, 1, 1)
    rig.core.adapters.unregister("a", rig.now)
    assert rig.core.stats().num_resident == 1
    rig.core.adapters.unregister("b", rig.now)
    assert rig.core.stats().num_resident == rig.core.stats().num_host == 0


def test_preemption_keeps_tokens_and_the_oldest_goes_on():
    rig = make_rig(num_pages=10, prefix_caching=False)
    rig.add(request("old", num_prompt=8, max_tokens=20), request("young", num_prompt=8, max_tokens=20))
    rig.drain()
    preempted = [event.request_id for event in rig.events if isinstance(event, RequestPreempted)]
    assert preempted
    assert set(preempted) == {"young"}
    alone = make_rig(prefix_caching=False)
    alone.add(request("young", num_prompt=8, max_tokens=20))
    alone.drain()
    assert rig.tokens("young") == alone.tokens("young")


def test_a_preempted_sequence_goes_before_those_that_came_later():
    rig = make_rig(num_pages=10, prefix_caching=False)
    rig.add(request("old", num_prompt=8, max_tokens=20), request("young", num_prompt=8, max_tokens=20))
    rig.turn()
    rig.add(request("last", num_prompt=30, max_tokens=1))
    rig.drain()
    order = [event.request_id for event in rig.events if isinstance(event, (RequestAdmitted, RequestPreempted))]
    assert order[:3] == ["old", "young", "young"]
    finished = [name for name in rig.outputs if rig.finish(name)]
    assert sorted(finished) == ["last", "old", "young"]
    assert admitted(rig) == ["old", "young", "last"]


def test_a_cold_adapter_does_not_hold_up_those_behind_it():
    rig = make_rig()
    rig.register("cold")
    rig.add(request("cold one", model="cold"), request("warm one"))
    rig.turn()
    assert admitted(rig) == ["warm one"]
    assert len(rig.executor.loads) == 1
    rig.executor.complete_step()
    rig.turn()  # decoding goes on while the load is in flight
    assert rig.executor.plan is not None
    rig.executor.complete_load()
    rig.drain()
    assert rig.finish("cold one") == "length"


def test_no_request_starves_at_the_adapter_cap():
    """The first is kept out by the cap while a stream of requests on the running adapter goes by; bounded."""
    rig = make_rig(max_loras=1, max_num_seqs=4, num_pages=200)
    rig.register("busy")
    rig.register("rare")
    rig.add(request("b0", model="busy", max_tokens=8))
    rig.drain()
    rig.add(request("b1", model="busy", max_tokens=8), request("rare one", model="rare"))
    for count in range(300):
        rig.add(request(f"more{count}", num_prompt=2, max_tokens=8, model="busy"))
        rig.step()
        if "rare one" in rig.outputs:
            break
    assert "rare one" in rig.outputs
    assert len(admitted(rig)) < 100


def test_the_first_in_line_keeps_its_adapter_from_younger_ones():
    """Younger running sequences need pages all the time; they may not take what the oldest waits for."""
    rig = make_rig(num_pages=14, prefix_caching=False, max_num_seqs=4)
    rig.register("a", num_pages=6)
    rig.register("b", num_pages=6)
    rig.add(request("filler", num_prompt=4, max_tokens=12, model="b"))
    rig.turn()
    rig.step()
    rig.add(request("oldest", num_prompt=16, max_tokens=4, model="a"))
    for count in range(60):
        rig.add(request(f"more{count}", num_prompt=6, max_tokens=14))
        rig.step()
        if "oldest" in admitted(rig):
            break
    assert "oldest" in admitted(rig)


def test_unload_frees_pages_and_host_at_once_when_idle_and_after_the_last_request_otherwise():
    rig = make_rig()
    rig.register("a", num_pages=3)
    rig.add(request("r", model="a", max_tokens=5))
    rig.turn()
    rig.step()
    rig.core.adapters.unregister("a", rig.now)
    assert rig.core.stats().num_adapter_pages == 3
    with pytest.raises(ModelNotFound):
        rig.add(request("late", model="a"))
    rig.drain()
    assert rig.finish("r") == "length"
    assert rig.core.stats().num_adapter_pages == rig.core.stats().host_bytes == 0
    assert not rig.executor.host
    with pytest.raises(AdapterNotFound):
        rig.core.adapters.unregister("a", rig.now)


def test_pinned_adapters_stay_and_cannot_take_the_room_of_requests_in_flight():
    rig = make_rig(num_pages=12, prefix_caching=False)
    rig.register("a", num_pages=4)
    rig.register("b", num_pages=4)
    status = rig.core.adapters.pin("a", True, rig.now)
    assert status.is_pinned
    rig.drain()
    assert rig.core.adapters.status("a", rig.now).tier is Tier.DEVICE
    rig.add(request("r", num_prompt=9, max_tokens=8, model="b"))  # 4 pages of KV, just so
    rig.drain()
    with pytest.raises(RequestError, match="memory left"):
        rig.add(request("r2", num_prompt=10, max_tokens=8, model="b"))
    rig.add(request("r3", num_prompt=20, max_tokens=8))
    with pytest.raises(CapacityError, match="too little memory"):
        rig.core.adapters.pin("b", True, rig.now)
    rig.register("@c@2", num_pages=4)
    with pytest.raises(CapacityError, match=r"pinning 'c@2' \(4 pages\)"):
        rig.core.adapters.pin("@c@2", True, rig.now)
    rig.drain()
    assert rig.core.adapters.status("a", rig.now).tier is Tier.DEVICE
    rig.core.adapters.pin("a", False, rig.now)
    rig.add(request("r4", num_prompt=30, max_tokens=8))
    rig.drain()
    assert rig.core.adapters.status("a", rig.now).tier is Tier.HOST


def test_an_idle_adapter_has_a_price_and_one_in_use_has_none():
    rig = make_rig(adapters=AdapterConfig(eviction="price"))
    rig.register("a")
    assert rig.core.adapters.status("a", rig.now).price is None  # not on the device
    rig.add(request("r", model="a", max_tokens=3))
    rig.turn()
    rig.step()
    assert rig.core.adapters.status("a", rig.now).state == "active"
    assert rig.core.adapters.status("a", rig.now).price is None
    rig.drain()
    price = rig.core.adapters.status("a", rig.now).price
    assert price is not None
    assert price > 0
    rig = make_rig(adapters=AdapterConfig(eviction="lru"))
    rig.register("a")
    rig.add(request("r", model="a", max_tokens=3))
    rig.drain()
    assert rig.core.adapters.status("a", rig.now).price is None  # recency is no price


def test_warming_goes_all_the_way_from_disk():
    rig = make_rig(adapters=AdapterConfig(max_cpu_loras=1))
    rig.register("a")
    rig.register("b")
    assert rig.core.adapters.status("a", rig.now).tier is Tier.DISK
    rig.core.adapters.warm("a", rig.now)
    for _ in range(3):
        rig.step()
    assert rig.core.adapters.status("a", rig.now).tier is Tier.DEVICE


def test_a_failed_load_ends_its_requests_with_the_reason_and_no_others():
    rig = make_rig(adapters=AdapterConfig(max_cpu_loras=1))
    rig.register("a")
    rig.register("b")
    rig.add(request("on a", model="a"), request("on b", model="b"))
    rig.turn()
    for index, (load, _) in enumerate(list(rig.executor.loads)):
        if load.version.key == "key-a":
            rig.executor.complete_load(index, error="its files changed on disk")
    rig.drain()
    assert rig.finish("on a") == "error"
    assert "its files changed" in rig.outputs["on a"][-1].error
    assert rig.finish("on b") == "length"


def test_cancelling_works_while_waiting_running_and_in_flight():
    rig = make_rig(max_num_seqs=1)
    rig.add(request("running", max_tokens=50), request("waiting"))
    rig.turn()
    assert rig.core.cancel("waiting", rig.now)
    assert rig.core.cancel("running", rig.now)
    assert rig.core.stats().num_kv_pages > 0  # the step in flight still writes there
    rig.step()
    assert rig.finish("waiting") == rig.finish("running") == "cancelled"
    assert rig.core.stats().num_kv_pages == 0
    assert not rig.core.cancel("running", rig.now)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_prompt": 0}, "no tokens"),
        ({"num_prompt": 256}, "context length is 256"),
        ({"num_prompt": 200, "max_tokens": 57}, "you requested 57 output tokens"),
        ({"stop_token_ids": (1000,)}, "stop_token_ids has token ids outside"),
        ({"logit_bias": ((5, 1.0), (1000, 1.0))}, "logit_bias has token ids outside"),
    ],
)
def test_requests_that_can_never_be_served_are_refused(change, message):
    rig = make_rig(num_pages=128)
    with pytest.raises(RequestError, match=message):
        rig.add(request("r", **change))
    rig.add(request("ok", num_prompt=200, max_tokens=56))
    with pytest.raises(RequestError, match="in flight"):
        rig.add(request("ok"))
    rig.drain()


def test_a_request_larger_than_the_pool_is_refused_and_an_open_length_is_clamped():
    rig = make_rig(num_pages=10)
    with pytest.raises(RequestError, match="memory left"):
        rig.add(request("r", num_prompt=30, max_tokens=12))
    rig.add(request("fits", num_prompt=30, max_tokens=11), request("open", num_prompt=30, max_tokens=None))
    rig.drain()
    assert len(rig.tokens("open")) == 11


def test_a_full_queue_is_refused_with_a_time_to_retry():
    rig = make_rig(max_waiting=2)
    rig.add(request("1"), request("2"))
    with pytest.raises(CapacityError) as refused:
        rig.add(request("3"))
    assert refused.value.status == 429
    assert refused.value.retry_after_s >= 1
    rig.drain()


def test_names():
    rig = make_rig(adapters=AdapterConfig(max_registered=2))
    rig.register("a")
    with pytest.raises(AdapterExists, match="already loaded"):
        rig.register("a")
    with pytest.raises(AdapterExists, match="base model"):
        rig.register("base")
    with pytest.raises(AdapterError, match="pages"):
        rig.register("huge", num_pages=49)  # more than three quarters of the pool
    rig.register("b:c")
    with pytest.raises(CapacityError):
        rig.register("third")
    assert rig.executor.host == {"key-a", "key-b:c"}  # what was refused is not kept
    rig.add(request("1", model="base:a"), request("2", model="b:c"), request("3", model="base"))
    for name in ("base:x", "A", "a ", "c"):
        with pytest.raises(ModelNotFound, match="does not exist"):
            rig.add(request("4", model=name))
    rig.drain()
    assert rig.outputs["1"][-1].adapter == "key-a"
    assert rig.outputs["2"][-1].adapter == "key-b:c"
    assert rig.outputs["3"][-1].adapter is None


def test_unknown_policies_are_configuration_errors():
    with pytest.raises(ConfigError, match="policy = 'lifo'"):
        make_policy("lifo", policy_context())
    with pytest.raises(ConfigError, match="eviction = 'x'"):
        make_rig(adapters=AdapterConfig(eviction="x"))


def test_a_loop_with_requests_and_nothing_pending_says_so():
    rig = make_rig()

    class Deaf:
        first_in_line = None

        def squash(self, now):
            return []

        def begin(self, now): ...
        def offer(self): ...
        def add(self, sequence, now): ...
        def queues(self):
            return ()

        def __len__(self):
            return 1

    rig.core._policy = Deaf()
    rig.add(request("r"))
    with pytest.raises(Stalled, match="nothing is pending"):
        EngineLoop(rig.core, VirtualClock(), on_outputs=lambda outputs, now: None).run()


def test_a_step_reads_an_adapter_from_the_host_while_it_is_copied():
    rig = make_rig(reads_host=True)
    rig.register("x")
    rig.add(request("a", model="x", max_tokens=4))
    tiers = []

    def step() -> None:
        rig.core.check_integrity()
        tiers.append(rig.executor.plan.sequences[0].placement.tier)
        rig.executor.complete_step()
        rig.turn()

    rig.turn()
    step()
    step()
    rig.executor.complete_load()
    step()
    step()
    assert tiers == [Tier.HOST, Tier.HOST, Tier.HOST, Tier.DEVICE]
    assert rig.finish("a") == "length"
    rig.core.check_integrity()


def test_no_request_waits_for_a_copy_where_steps_read_the_host():
    rig = make_rig(reads_host=True, max_num_seqs=3)
    for index in range(6):
        rig.register(f"a{index}")
        rig.add(request(f"r{index}", model=f"a{index % 3}", max_tokens=3))
    rig.turn()
    while rig.core.has_requests:  # and no copy ever arrives
        rig.core.check_integrity()
        rig.executor.complete_step()
        rig.turn()
    assert [rig.finish(f"r{index}") for index in range(6)] == ["length"] * 6
    assert not any(isinstance(event, AdapterAwaited) for event in rig.events)
    # None of them counts as a hit for that.
    assert not any(event.adapter_was_resident for event in rig.events if isinstance(event, RequestAdmitted))


def test_a_request_waits_for_the_disk_and_for_pages_even_so():
    rig = make_rig(reads_host=True, num_pages=8, adapters=AdapterConfig(max_cpu_loras=1, look_ahead=0))
    rig.register("x", 3)
    rig.register("y", 3)  # which sends x to disk
    rig.add(request("a", model="x"))
    rig.turn()
    assert rig.executor.plan is None
    rig.executor.complete_load()
    rig.turn()
    assert rig.executor.plan.sequences[0].placement is IN_HOST
    rig.register("z", 4)
    rig.add(request("b", model="z"))
    rig.turn()
    assert [load.version.key for load, _ in rig.executor.loads] == ["key-x"]
    rig.drain()
    assert rig.finish("a") == rig.finish("b") == "length"


def test_a_sequence_runs_on_where_its_copy_fails():
    rig = make_rig(reads_host=True)
    rig.register("x")
    rig.add(request("a", model="x", max_tokens=4))
    rig.turn()
    rig.executor.complete_load(error="gone")
    rig.executor.complete_step()
    rig.turn()
    assert rig.executor.plan.sequences[0].placement is IN_HOST
    assert not rig.executor.loads
    # The next request tries again, and both move.
    rig.add(request("b", model="x", max_tokens=4))
    rig.step()
    rig.step()
    assert [part.placement for part in rig.executor.plan.sequences] == [ON_DEVICE] * 2
    rig.drain()
    assert rig.finish("a") == rig.finish("b") == "length"


def test_a_host_copy_may_go_while_a_step_in_flight_reads_it():
    rig = make_rig(reads_host=True, adapters=AdapterConfig(max_cpu_loras=1))
    rig.register("x")
    rig.add(request("a", model="x"))
    rig.turn()
    rig.executor.complete_load()
    rig.turn()
    assert rig.executor.plan.sequences[0].placement is IN_HOST
    rig.register("y")
    assert rig.executor.host == {"key-y"}
    rig.drain()
    assert rig.finish("a") == "length"
