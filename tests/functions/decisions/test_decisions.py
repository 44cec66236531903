"""Choices about functions: always feasible, near the optimum, and bills that add up."""

import random
import statistics

import pytest
from functions_decisions import offload_instance, preload_instance
from functions_exact import solve_offload, solve_preload, value_of, violations
from hypothesis import given, settings
from hypothesis import strategies as st

from manylora.core.errors import ConfigError
from manylora.functions.decisions.artefacts import Artefact, ArtefactKind, MemoryKind, Place, Placed, PreloadProblem
from manylora.functions.decisions.batching import BatchWindow, FirstTokenTime, FixedWindow, deadline_margin_s
from manylora.functions.decisions.billing import PLATFORM, MachineState, PriceList, Usage, charge, split_evenly
from manylora.functions.decisions.offload import choose_offload
from manylora.functions.decisions.placement import Candidate, choose_place
from manylora.functions.decisions.preload import Preloader

GB = 10**9


def test_the_greedy_pre_loading_is_within_three_percent_of_the_optimum_on_average() -> None:
    rng = random.Random(1)
    shares = []
    for _ in range(40):
        problem = preload_instance(
            rng, rng.choice([4, 8, 12]), num_nodes=rng.choice([1, 2]), num_devices=rng.choice([1, 2])
        )
        chosen, best = Preloader(problem).choose(), solve_preload(problem)
        assert violations(problem, best) == []
        assert violations(problem, chosen) == []
        shares.append(value_of(problem, chosen) / value_of(problem, best) if best else 1.0)
    assert max(shares) <= 1.0 + 1e-6
    assert statistics.mean(shares) >= 0.97
    assert min(shares) >= 0.8


@given(st.integers(0, 2**32), st.integers(0, 12), st.integers(1, 3), st.integers(0, 2), st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_a_pre_loading_is_feasible_and_leaves_nothing_that_fits(
    seed: int, num_functions: int, num_nodes: int, num_devices: int, num_backbones: int
) -> None:
    problem = preload_instance(
        random.Random(seed),
        num_functions,
        num_nodes=num_nodes,
        num_devices=num_devices,
        num_backbones=num_backbones,
    )
    chosen = Preloader(problem).choose()
    assert violations(problem, chosen) == []
    value = value_of(problem, chosen)
    for artefact in problem.artefacts:
        for place in problem.places:
            more = chosen | {Placed(artefact.name, place.name)}
            if place.memory in artefact.num_bytes and not violations(problem, more):
                assert value_of(problem, more) <= value + 1e-9, "a thing of value that fits was left out"


def test_a_large_backbone_is_chosen_before_a_denser_one_that_would_keep_it_out() -> None:
    def backbone(name: str, size: int, saves_s: float) -> Artefact:
        memory = {MemoryKind.DEVICE: size}
        return Artefact(
            name=name,
            kind=ArtefactKind.BACKBONE,
            num_bytes=memory,
            saves_s={MemoryKind.DEVICE: saves_s},
            requests_per_s=1.0,
        )

    problem = PreloadProblem(
        (
            backbone("dense", 13 * GB, 10.0),
            backbone("large", 26 * GB, 15.0),
            _child("a", "dense"),
            _child("b", "large"),
        ),
        (Place(name="device", memory=MemoryKind.DEVICE, node="0", free_bytes=28 * GB),),
    )
    assert Preloader(problem).choose() == {Placed("large", "device"), Placed("b", "device")}


def _child(name: str, parent: str) -> Artefact:
    return Artefact(
        name=name,
        kind=ArtefactKind.KERNELS,
        num_bytes={MemoryKind.DEVICE: GB},
        saves_s={MemoryKind.DEVICE: 0.01},
        requests_per_s=1.0,
        parent=parent,
    )


def test_rates_can_change_between_decisions() -> None:
    problem = PreloadProblem(
        (
            Artefact(
                name="base",
                kind=ArtefactKind.BACKBONE,
                num_bytes={MemoryKind.DEVICE: GB},
                saves_s={MemoryKind.DEVICE: 1.0},
                requests_per_s=1.0,
            ),
            _child("a", "base"),
            _child("b", "base"),
        ),
        (Place(name="device", memory=MemoryKind.DEVICE, node="0", free_bytes=2 * GB),),
    )
    preloader = Preloader(problem)
    assert Placed("a", "device") in preloader.choose({"a": 3.0})
    assert Placed("b", "device") in preloader.choose({"a": 1.0, "b": 2.0})


def test_problems_that_make_no_sense_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="parent"):
        PreloadProblem((_child("a", "nowhere"),), ())
    with pytest.raises(ConfigError, match="once"):
        PreloadProblem((_child("a", "b"), _child("a", "b"), _child("b", "a")), ())
    with pytest.raises(ConfigError, match="same memories"):
        Artefact(name="a", kind=ArtefactKind.ADAPTER, num_bytes={MemoryKind.HOST: 1}, saves_s={}, requests_per_s=1.0)


def test_the_greedy_offloading_is_close_to_the_optimum() -> None:
    rng = random.Random(2)
    ratios = []
    for _ in range(60):
        held = offload_instance(rng, rng.choice([3, 8, 16]))
        need, host = int(rng.uniform(0.1, 20) * GB), int(rng.uniform(0, 4) * GB)
        chosen, best = choose_offload(held, need, host_free_bytes=host), solve_offload(held, need, host_free_bytes=host)
        assert (chosen is None) == (best is None)
        if chosen is not None and best is not None:
            assert chosen.lost >= best[1] - 1e-6
            ratios.append(chosen.lost / best[1] if best[1] > 1e-9 else 1.0)
    assert statistics.mean(ratios) <= 1.1


@given(st.integers(0, 2**32), st.integers(0, 10), st.integers(1, 40 * GB), st.integers(0, 4 * GB))
@settings(max_examples=100, deadline=None)
def test_offloading_spares_what_is_in_use_and_leaves_no_orphan(
    seed: int, num_functions: int, num_bytes: int, host_free_bytes: int
) -> None:
    held = offload_instance(random.Random(seed), num_functions)
    by_name = {one.name: one for one in held}
    chosen = choose_offload(held, num_bytes, host_free_bytes=host_free_bytes)
    busy = {one.name for one in held if one.in_use} | {one.parent for one in held if one.in_use}
    if chosen is None:
        assert sum(one.num_bytes for one in held if one.name not in busy) < num_bytes
        return
    gone = set(chosen.names)
    assert len(gone) == len(chosen.names) and not gone & busy
    assert sum(by_name[name].num_bytes for name in gone) >= num_bytes
    assert all(one.name in gone for one in held if one.parent in gone), "a child stays without its parent"
    assert chosen.kept <= gone
    assert sum(by_name[name].host_bytes for name in chosen.kept) <= host_free_bytes


@given(
    st.floats(0.01, 2.0),
    st.floats(0.0, 0.5),
    st.floats(0.05, 10.0),
    st.integers(1, 64),
    st.integers(1, 64),
    st.integers(1, 8),
    st.floats(0.0, 20.0),
)
def test_a_batch_that_leaves_in_time_is_answered_in_time(
    single_s: float, each_s: float, objective_s: float, cap: int, size: int, num_batches: int, waited_s: float
) -> None:
    window = BatchWindow(FirstTokenTime(single_s, each_s), objective_s, cap)
    size = min(size, window.size_limit(num_batches))
    now = 100.0
    leaves_at = window.leaves_at(now - waited_s, size, now, num_batches)
    assert leaves_at >= now
    took_s = window.time.of(size, num_batches)
    if leaves_at > now:
        assert leaves_at + took_s <= now - waited_s + objective_s + 1e-9
    margin_s = deadline_margin_s(window, now - waited_s, size, now, num_batches)
    assert margin_s == pytest.approx(objective_s - waited_s - took_s)
    if size < window.size_limit(num_batches):
        assert leaves_at == pytest.approx(now + max(0.0, margin_s))
    limit = window.time.largest_batch(objective_s, num_batches)
    assert limit == 1 or window.time.of(limit, num_batches) <= objective_s * (1 + 1e-9)


@given(st.integers(0, 10**18), st.lists(st.text("abc", min_size=1, max_size=3), unique=True, max_size=9))
def test_parts_add_up_and_differ_by_at_most_one(amount: int, accounts: list[str]) -> None:
    parts = split_evenly(amount, accounts)
    assert sum(parts.values()) == amount
    assert max(parts.values()) - min(parts.values()) <= 1
    assert set(parts) == set(accounts or [PLATFORM])


@given(
    st.integers(1, 10**12),
    st.integers(1, 4),
    st.lists(st.sampled_from("abcdef"), unique=True),
    st.dictionaries(st.integers(0, 3), st.lists(st.sampled_from("abcdef"), unique=True)),
    st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 10**11)),
    st.integers(0, 10**11),
)
def test_a_bill_adds_up_to_the_machine(
    duration_ns: int,
    num_devices: int,
    awake: list[str],
    running: dict[int, list[str]],
    own: dict[str, int],
    shared: int,
) -> None:
    state = MachineState(
        num_devices=num_devices,
        running=running,
        awake=awake,
        device_bytes=own,
        shared_device_bytes=[(shared, awake)],
    )
    total = Usage()
    for usage in charge(state, duration_ns).values():
        total = total.plus(usage)
    assert total.active_device_ns + total.idle_device_ns == num_devices * duration_ns
    assert total.device_byte_ns == (sum(own.values()) + shared) * duration_ns


def test_a_price_is_the_sum_of_its_parts() -> None:
    prices = PriceList(device_gb=48.0)
    hour = 3600 * 10**9
    assert prices.cost(Usage(active_device_ns=hour)) == pytest.approx(3600 * 48 * 0.000018)
    assert prices.cost(Usage(idle_device_ns=hour)) == pytest.approx(3600 * 48 * 0.000007)
    assert prices.cost(Usage(host_byte_ns=2 * GB * hour)) == pytest.approx(2 * 3600 * 0.000002)


def test_a_batch_is_as_patient_as_its_window():
    time = FirstTokenTime(0.2, 0.01)
    at_once, half = (BatchWindow(time, 1.0, 8, share) for share in (0.0, 0.5))
    assert at_once.leaves_at(0.0, 2, 0.0) == 0.0
    assert half.leaves_at(0.0, 2, 0.0) == pytest.approx(0.5 * (1.0 - 0.21))
    busy = 2  # on a busy device all of them wait alike
    assert at_once.leaves_at(0.0, 2, 0.0, busy) == half.leaves_at(0.0, 2, 0.0, busy) == pytest.approx(1.0 - 0.42)
    with pytest.raises(ConfigError, match="wait_share"):
        BatchWindow(time, 1.0, 8, 1.5)


def test_a_fixed_batch_leaves_when_it_is_full_or_has_waited():
    window = FixedWindow(FirstTokenTime(0.2, 0.01), 1.0, 4, 0.5)
    assert window.leaves_at(1.0, 4, 1.1) == 1.1
    assert window.leaves_at(1.0, 3, 1.1) == 1.5
    assert window.leaves_at(1.0, 3, 9.0, 5) == 9.0


def test_the_process_that_answers_first_is_chosen():
    warm, busy, cold = Candidate("a", 0.0), Candidate("b", 0.0, wait_s=4.0), Candidate("c", 3.0)
    assert choose_place([cold, busy, warm], 1.0) == warm
    assert choose_place([cold, busy], 1.0) == cold
    assert choose_place([Candidate("a", 0.0, num_batches=4), cold], 1.0) == cold  # five turns against one and a load
    assert choose_place([Candidate("a", 0.0, num_batches=1), cold], 1.0).place == "a"
    assert choose_place([Candidate("a", 3.0, evicts_bytes=1), cold], 1.0) == cold
    assert choose_place([], 1.0) is None


def test_what_is_held_stays_unless_another_choice_is_worth_more():
    """Of two devices alike either can hold all; the rates decide which artefact is placed first, and nothing moves."""
    problem = preload_instance(random.Random(1), 6, num_devices=2)
    preloader = Preloader(problem)
    held = preloader.choose()
    assert preloader.value(held) == pytest.approx(value_of(problem, held))
    small = {one.name: 1.001 * one.requests_per_s for one in problem.artefacts}
    assert preloader.revise(held, small) == held
    assert preloader.revise(frozenset(), small) == preloader.choose(small)
