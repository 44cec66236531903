"""Prefetching: what is brought before its turn, and what never is."""

from __future__ import annotations

import pytest
from harness import Rig, make_rig, request

from manylora.core.config import AdapterConfig
from manylora.core.engine.adapters.forecast import MIN_GAPS, Forecast
from manylora.core.errors import ConfigError
from manylora.core.types import AdapterKey, Tier

KEY = AdapterKey("a")


def rig_of(*names: str, num_pages: int = 64, adapter_pages: int = 4, look_ahead: int = 10, **options: object) -> Rig:
    """One seat, taken by a long request on the base; adapters in the host tier."""
    adapters = {key: options.pop(key) for key in ("eviction", "forecast", "max_cpu_loras") if key in options}
    rig = make_rig(
        num_pages=num_pages,
        max_num_seqs=1,
        adapters=AdapterConfig(look_ahead=look_ahead, **adapters),  # type: ignore[arg-type]
        **options,
    )
    for name in names:
        rig.register(name, adapter_pages)
    rig.add(request("busy", max_tokens=40))
    rig.turn()
    return rig


def loading(rig: Rig) -> list[str]:
    return [f"{load.version.key.removeprefix('key-')} to {load.tier.value}" for load, _ in rig.executor.loads]


def test_negative_look_ahead_is_refused():
    with pytest.raises(ConfigError, match=r"look_ahead = -1, expected 0 or more requests"):
        AdapterConfig(look_ahead=-1)


def test_adapters_of_waiting_requests_come_while_others_run():
    rig = rig_of("x")
    rig.add(request("one", model="x"))
    rig.turn()
    assert loading(rig) == ["x to device"] and rig.core.stats().num_prefetches == 1
    rig.drain()
    assert rig.core.stats().num_adapter_hits == 1, "there by the time its request was looked at"


def test_no_look_ahead_no_prefetch():
    rig = rig_of("x", look_ahead=0)
    rig.add(request("one", model="x"))
    rig.turn()
    assert loading(rig) == []
    rig.drain()
    assert rig.core.stats().num_adapter_hits == 0


def test_one_at_a_time_in_the_order_of_the_queue():
    rig = rig_of("x", "y", "z")
    for name in ("y", "x", "y", "z"):
        rig.add(request(f"{name}{len(rig.core._policy)}", model=name))
    for expected in (["y to device"], ["x to device"], ["z to device"], []):
        rig.turn()
        assert loading(rig) == expected
        rig.turn()
        assert loading(rig) == expected, "the link is busy"
        while rig.executor.loads:
            rig.executor.complete_load()


def test_only_the_next_few_are_looked_at():
    rig = rig_of("x", "y", look_ahead=2)
    rig.add(request("base1"), request("x1", model="x"), request("y1", model="y"))
    rig.turn()
    rig.executor.complete_load()
    rig.turn()
    assert loading(rig) == [], "y is third in line"


def test_nothing_is_prefetched_onto_a_busy_link():
    rig = rig_of("x", "y")
    rig.core.adapters.warm("y", rig.now)  # this copy was demanded
    rig.add(request("one", model="x"))
    rig.turn()
    assert loading(rig) == ["y to device"]
    rig.executor.complete_load()
    rig.turn()
    assert loading(rig) == ["x to device"]


def test_reads_and_copies_do_not_wait_for_each_other():
    rig = rig_of("x", "y", "z", max_cpu_loras=2)  # x was dropped from the host for z
    assert rig.executor.host == {"key-y", "key-z"}
    rig.add(request("one", model="x"), request("two", model="y"))
    rig.turn()
    assert loading(rig) == ["x to host", "y to device"]
    rig.executor.complete_load()
    rig.turn()
    assert loading(rig) == ["y to device"], "x is copied when its turn on that link has come"
    rig.executor.complete_load()
    rig.turn()
    assert loading(rig) == ["x to device"]


def test_pages_that_those_ahead_need_are_left_to_them():
    # Pool of 16: the running request holds 2 and may grow; the next in line needs 10 of the 14 left.
    for num_prompt, expected in ((40, ["x to device"]), (41, [])):
        rig = rig_of("x", num_pages=16, max_model_len=64)
        assert rig.core.page_cache.allocator.num_free == 14
        rig.add(request("ahead", num_prompt=num_prompt), request("one", model="x"))
        rig.turn()
        assert loading(rig) == expected


def test_wanted_adapters_and_those_in_use_are_not_displaced():
    # Pool of 13: 2 pages run, x and y are wanted and take 8; the 3 left are too few for z.
    rig = rig_of("x", "y", "z", num_pages=13, max_model_len=48)
    rig.add(*(request(f"{name}1", num_prompt=1, max_tokens=1, model=name) for name in ("x", "y", "z")))
    for _ in ("x", "y"):
        rig.turn()
        rig.executor.complete_load()
    rig.turn()
    assert loading(rig) == []
    assert {rig.core.adapters.status(name, rig.now).tier for name in ("x", "y")} == {Tier.DEVICE}
    rig.drain()
    assert rig.finish("z1") == "length"


def test_idle_things_make_room():
    rig = rig_of("x", "y", "z", num_pages=13, max_model_len=48)
    for name in ("x", "y"):
        rig.core.adapters.warm(name, rig.now)
        rig.executor.complete_load()
        rig.turn()
    rig.add(request("one", num_prompt=1, model="z"))
    rig.turn()
    assert loading(rig) == ["z to device"]
    assert rig.core.adapters.status("x", rig.now).tier is Tier.HOST


class TestForecast:
    def taught(self, gap_s: float, num_uses: int = MIN_GAPS + 1) -> Forecast:
        forecast = Forecast()
        for index in range(num_uses):
            forecast.used(KEY, index * gap_s)
        return forecast

    def test_a_steady_gap_is_foreseen(self):
        # 10 s lie between 0.001 * 2**(26/2) = 8.192 s and 0.001 * 2**(27/2) = 11.585 s.
        forecast = self.taught(10.0)
        last = 10.0 * MIN_GAPS
        assert forecast.due(last + 0.9 * 8.192 - 0.01) == []
        closes_at = pytest.approx(last + 1.1 * 11.585, abs=0.01)
        assert forecast.due(last + 0.9 * 8.192 + 0.01) == [(KEY, closes_at)]
        assert forecast.due(last + 12.0) == [(KEY, closes_at)], "until it is over"
        assert forecast.due(last + 13.0) == []

    def test_a_request_ends_it(self):
        forecast = self.taught(10.0)
        now = 10.0 * MIN_GAPS + 9.0
        assert forecast.due(now)
        forecast.used(KEY, now)
        assert forecast.due(now) == []
        assert forecast.due(now + 9.0), "and the next is foreseen"

    def test_few_gaps_foresee_nothing(self):
        assert self.taught(10.0, MIN_GAPS).due(10.0 * MIN_GAPS) == []

    def test_gaps_of_all_lengths_foresee_nothing(self):
        forecast = Forecast()
        now = 0.0
        for index in range(40):
            now += 0.01 * 2.0 ** (index % 20 / 2)
            forecast.used(KEY, now)
        assert all(forecast.due(now + 0.01 * 2.0 ** (age / 2)) == [] for age in range(24))

    def test_a_forgotten_adapter_is_not_due(self):
        forecast = self.taught(10.0)
        forecast.forget(KEY)
        assert forecast.due(10.0 * MIN_GAPS + 9.0) == []


def periodic(rig: Rig, name: str) -> float:
    """Let requests for an adapter arrive every 100 s; return when the last one did."""
    for index in range(MIN_GAPS + 1):
        rig.now = 100.0 * (index + 1)
        rig.add(request(f"{name}{index}", num_prompt=1, max_tokens=1, model=name))
        rig.drain()
    return 100.0 * (MIN_GAPS + 1)


def foreseeing(eviction: str = "price", **options: object) -> Rig:
    rig = make_rig(num_pages=16, adapters=AdapterConfig(forecast=True, eviction=eviction), **options)
    rig.register("tick", 6)
    rig.register("other", 12)
    return rig


def test_nothing_is_kept_of_an_adapter_without_a_name():
    rig = foreseeing()
    rig.add(request("one", num_prompt=1, max_tokens=1, model="tick"))
    rig.drain()
    rig.core.adapters.unregister("tick", rig.now)
    assert not rig.core._prefetcher._forecast._gaps


def test_an_adapter_that_is_due_comes_back_unasked():
    rig = foreseeing()
    last = periodic(rig, "tick")
    rig.add(request("one", model="other"))  # pushes it out
    rig.drain()
    assert rig.core.adapters.status("tick", rig.now).tier is Tier.HOST
    rig.now = last + 50.0
    rig.turn()
    assert loading(rig) == [], "not due yet"
    rig.now = last + 95.0
    rig.turn()
    assert loading(rig) == ["tick to device"]


def test_a_due_adapter_waits_while_anybody_waits():
    rig = foreseeing(max_num_seqs=1)
    last = periodic(rig, "tick")
    rig.add(request("one", model="other"))
    rig.drain()
    rig.now = last + 95.0
    rig.add(request("runs", num_prompt=1, max_tokens=8), request("waits", num_prompt=1))
    rig.turn()
    assert rig.core.stats().num_waiting == 1 and loading(rig) == []
    rig.core.cancel("waits", rig.now)
    rig.turn()
    assert loading(rig) == ["tick to device"]


@pytest.mark.parametrize("eviction", ["lru", "chameleon"])
def test_a_due_adapter_displaces_nothing_where_there_are_no_prices(eviction):
    rig = foreseeing(eviction)
    last = periodic(rig, "tick")
    rig.add(request("one", model="other"))
    rig.drain()
    rig.now = last + 95.0
    rig.turn()
    assert rig.core.adapters.status("tick", rig.now).tier is Tier.HOST and loading(rig) == []
    rig.core.adapters.unregister("other", rig.now)  # its pages are free now
    rig.turn()
    assert loading(rig) == ["tick to device"]


def test_nothing_is_foreseen_by_default():
    rig = make_rig(num_pages=16)
    rig.register("tick", 6)
    rig.register("other", 12)
    last = periodic(rig, "tick")
    rig.add(request("one", model="other"))
    rig.drain()
    rig.now = last + 95.0
    rig.turn()
    assert loading(rig) == []
