"""The break-even model of cold starts, against its definition and in closed form."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manylora.core.costs.arriving import count_on_cpu, remaining_s
from manylora.core.costs.cold_start import (
    BESIDE_HANDOFF_S,
    BESIDE_ROW_RANK_S,
    FORGET,
    LEARN,
    LEAST_CHUNK,
    MOST_CORRECTION,
    MOST_STALL,
    AssistCosts,
    ColdRequest,
    Corrections,
    Expected,
    Route,
    _assist_chunks,
    choose,
    expect,
)
from manylora.core.types import ColdStart

WAIT, ASSIST, LAYERS = ColdStart
LAYERS_OF_7B = 32


def route(**changes: object) -> Route:
    values: dict[str, object] = {"read_begins_s": 0.0, "read_s": 0.0, "copy_begins_s": 0.0, "copy_s": 0.010}
    return Route(**{**values, **changes})  # type: ignore[arg-type]


def question(**changes: object) -> ColdRequest:
    values: dict[str, object] = {
        "route": route(),
        "num_layers": LAYERS_OF_7B,
        "step_s": 0.032,
        "prompt_s": 0.032,
        "beat_s": 0.025,
        "num_others": 0,
        "num_sharing": 1,
        "row_rank": 64 * 64,
        "rank": 64,
        "num_tokens": 64,
        "chunk_tokens": 64,
        "token_s": 1e-4,
    }
    return ColdRequest(**{**values, **changes})  # type: ignore[arg-type]


def predict(asked: ColdRequest, *, is_beside: bool = True, is_forced: bool = False) -> dict[ColdStart, Expected]:
    return expect(asked, AssistCosts(is_beside=is_beside), Corrections(), is_forced=is_forced)


def test_a_copy_waits_for_the_read_and_follows_it_by_layers_when_chained():
    both = route(read_s=0.100, copy_s=0.020)
    assert both.host_s == pytest.approx(0.100)
    assert both.device_s(10) == pytest.approx(0.120)
    assert both.first_layer_s(10) == pytest.approx(0.010 + 0.002)
    assert both.last_layer_s(10) == pytest.approx(0.100 + 0.002)  # the disk is slower: one layer of the copy is left
    slow_link = route(read_s=0.020, copy_s=0.100)
    assert slow_link.last_layer_s(10) == pytest.approx(0.002 + 0.100)
    begun = route(copy_begins_s=-0.004)
    assert begun.device_s(10) == pytest.approx(0.006)
    assert route(copy_begins_s=-1.0).device_s(10) == 0.0
    assert route(copy_begins_s=0.030).device_s(10) == pytest.approx(0.040)  # behind other loads
    assert route(read_s=0.1, copy_s=0.02, is_chained=True).device_s(10) == pytest.approx(0.102)
    whole = route(read_s=0.100, copy_s=0.020, is_whole=True)  # no layer before the read's end
    assert (whole.first_layer_s(10), whole.last_layer_s(10)) == pytest.approx((0.102, 0.120))
    assert whole.stall_s(0.010, 10) == pytest.approx(0.120 - 0.009)


@given(
    read_begins_s=st.floats(-0.1, 0.1),
    read_s=st.just(0.0) | st.floats(0.001, 0.2),
    copy_begins_s=st.floats(-0.1, 0.1),
    copy_s=st.floats(0.0, 0.2),
    step_s=st.floats(0.001, 0.2),
    num_layers=st.integers(1, 40),
)
def test_the_stall_is_the_longest_that_any_layer_is_waited_for(
    read_begins_s, read_s, copy_begins_s, copy_s, step_s, num_layers
):
    """Layer by layer: each is read, then copied behind the one before it."""
    asked = route(read_begins_s=read_begins_s, read_s=read_s, copy_begins_s=copy_begins_s, copy_s=copy_s)
    arrives_at, stall_s = copy_begins_s, 0.0
    for layer in range(num_layers):
        is_read_at = read_begins_s + read_s * (layer + 1) / num_layers if read_s else -math.inf
        arrives_at = max(arrives_at, is_read_at) + copy_s / num_layers
        stall_s = max(stall_s, arrives_at - step_s * layer / num_layers)
    assert asked.stall_s(step_s, num_layers) == pytest.approx(stall_s, abs=1e-9)


def layers_on_cpu(begins_s: float, layer_s: float, delay_s: float, copied_s: float, copy_s: float) -> int:
    """Return the layers that have not arrived when a step of 32 comes to them, one by one."""
    at, count = begins_s, 0
    for layer in range(LAYERS_OF_7B):
        is_there = copied_s - (LAYERS_OF_7B - 1 - layer) * (copy_s / LAYERS_OF_7B) <= at
        count += not is_there
        at += layer_s if is_there else layer_s + delay_s
    return count


@given(
    begins_s=st.floats(0.0, 0.3),
    layer_s=st.floats(0.0001, 0.01),
    delay_s=st.floats(0.0, 0.01),
    copied_s=st.floats(0.0, 0.5),
    copy_s=st.floats(0.0, 0.3),
)
def test_the_device_takes_over_the_layers_that_have_arrived_when_the_step_comes_to_them(
    begins_s, layer_s, delay_s, copied_s, copy_s
):
    counted = count_on_cpu(begins_s, layer_s, delay_s, copied_s, copy_s / LAYERS_OF_7B, LAYERS_OF_7B)
    # A layer that arrives in the very moment may be counted on either side.
    nearby = [layers_on_cpu(begins_s + shift, layer_s, delay_s, copied_s, copy_s) for shift in (-1e-9, 0.0, 1e-9)]
    assert min(nearby) <= counted <= max(nearby)


def test_a_rate_is_extrapolated_from_those_that_are_done():
    assert remaining_s(4, 4, 1.0) == 0.0
    assert remaining_s(2, 5, 1.0) == pytest.approx(1.5)
    assert remaining_s(0, 1, 1.0) == math.inf


@given(
    copy_s=st.floats(0.0, 0.3),
    num_tokens=st.integers(1, 2000),
    rank=st.integers(1, 256),
    step_s=st.floats(0.005, 0.3),
)
def test_the_gain_of_assisting_is_that_of_the_formula(copy_s, num_tokens, rank, step_s):
    row_rank = num_tokens * rank
    found = predict(question(route=route(copy_s=copy_s), step_s=step_s, prompt_s=step_s, row_rank=row_rank))
    layer_s = step_s / LAYERS_OF_7B
    layer_delay_s = max(0.0, BESIDE_ROW_RANK_S * row_rank - layer_s) + 2 * BESIDE_HANDOFF_S
    num_layers = count_on_cpu(0.0, layer_s, layer_delay_s, copy_s, copy_s / LAYERS_OF_7B, LAYERS_OF_7B)
    gain_s = copy_s - num_layers * layer_delay_s
    assert found[WAIT].first_token_s - found[ASSIST].first_token_s == pytest.approx(gain_s, abs=1e-9)
    best = choose(found, (WAIT, ASSIST), 1)
    assert best is (ASSIST if gain_s > 0 else WAIT) or gain_s == pytest.approx(0, abs=1e-9)


def test_beside_others_a_request_begins_between_two_steps():
    found = predict(question(num_others=3, route=route(copy_s=0.030)))
    assert found[WAIT].begins_s == pytest.approx(0.050)
    assert found[WAIT].first_token_s == pytest.approx(0.050 + 0.032)


def test_on_a_cpu_the_image_is_as_good_as_pages_and_the_disk_is_hidden_by_layers():
    assert choose(predict(question(), is_beside=False), tuple(ColdStart), 1) is ASSIST
    resident_s = predict(question(), is_beside=False)[ASSIST].first_token_s
    assert resident_s == pytest.approx(0.032)
    from_disk = question(route=route(read_s=0.100))
    assert choose(predict(from_disk, is_beside=False), tuple(ColdStart), 1) is LAYERS
    assert choose(predict(from_disk, is_beside=False), (WAIT,), 1) is WAIT
    slow_reads = Corrections()  # found while assisting; waiting needs the same read
    for _ in range(100):
        slow_reads.observe(ASSIST, resident_s=0.032, delay_s=0.100, actual_s=1.0)
    found = expect(from_disk, AssistCosts(is_beside=False), slow_reads)
    assert slow_reads.factor(ASSIST) > 4
    assert choose(found, (WAIT, ASSIST), 1) is ASSIST


@given(
    copy_s=st.floats(0.001, 0.5),
    beat_s=st.floats(0.001, 0.1),
    num_others=st.integers(1, 40),
    num_sharing=st.integers(1, 8),
)
def test_others_never_pay_more_than_a_request_gains(copy_s, beat_s, num_others, num_sharing):
    asked = question(
        route=route(copy_s=copy_s),
        beat_s=beat_s,
        step_s=1.2 * beat_s,
        prompt_s=1.2 * beat_s,
        num_others=num_others,
        num_sharing=num_sharing,
    )
    found = predict(asked)
    layers, stall_s = found[LAYERS], asked.route.stall_s(asked.step_s, asked.num_layers)
    stalled_s = layers.others_s / num_others
    assert stalled_s <= MOST_STALL * beat_s + 1e-9
    assert stalled_s * num_others <= (beat_s - stalled_s) * num_sharing + 1e-9  # against the next step
    assert layers.first_token_s <= found[WAIT].first_token_s + 1e-9
    assert layers.begins_s >= stall_s - beat_s  # a step earlier would have paid as well, else
    mode = choose(found, tuple(ColdStart), num_sharing)
    gain_s = found[WAIT].first_token_s - found[mode].first_token_s
    assert gain_s * num_sharing >= found[mode].others_s
    assert choose(found, (WAIT,), num_sharing) is WAIT


def test_alone_a_request_begins_when_no_layer_is_waited_for_and_at_once_if_it_must():
    asked = question(route=route(copy_s=0.200))
    stall_s = asked.route.stall_s(asked.step_s, asked.num_layers)
    timed, forced = predict(asked)[LAYERS], predict(asked, is_forced=True)[LAYERS]
    assert (timed.begins_s, timed.others_s) == (pytest.approx(stall_s), 0.0)
    assert forced.begins_s == 0.0
    assert timed.first_token_s == pytest.approx(forced.first_token_s) == pytest.approx(stall_s + 0.032)


def test_an_assisted_prompt_is_cut_or_refused_where_the_batch_would_pay_for_it():
    """The CPU takes 64 x 34 us a layer, beside a millisecond of the device: 38 ms for each of the others.

    In chunks of 25 tokens the device hides it, and a handoff is all that the others pay.
    """
    alone, beside, crowd = (
        predict(question(route=route(copy_s=0.060), num_others=others))[ASSIST] for others in (0, 8, 60)
    )
    assert alone.chunk_tokens is None and beside.chunk_tokens == crowd.chunk_tokens == 25
    for num_tokens, is_hidden in ((25, True), (26, False)):
        layer_s = (0.032 - (64 - num_tokens) * 1e-4) / LAYERS_OF_7B
        assert (BESIDE_ROW_RANK_S * 64 * num_tokens <= layer_s) == is_hidden
    handoffs_s = 2 * LAYERS_OF_7B * BESIDE_HANDOFF_S
    assert beside.others_s <= 8 * 3 * handoffs_s and beside.first_token_s > alone.first_token_s
    for others, mode in ((0, ASSIST), (8, ASSIST), (60, WAIT)):
        found = predict(question(route=route(copy_s=0.060), num_others=others))
        assert choose(found, (WAIT, ASSIST), 1) is mode


@given(
    copy_s=st.floats(0.001, 0.5),
    num_tokens=st.integers(1, 512),
    num_others=st.integers(0, 40),
    num_sharing=st.integers(1, 8),
    rank=st.sampled_from([8, 64, 128]),
)
def test_a_prompt_is_cut_only_if_the_others_save_more_than_the_request_loses(
    copy_s, num_tokens, num_others, num_sharing, rank
):
    chunk = min(num_tokens, 256)
    step_s = 0.025 + 1e-4 * chunk
    asked = question(
        route=route(copy_s=copy_s),
        step_s=step_s,
        prompt_s=step_s * math.ceil(num_tokens / chunk),
        num_others=num_others,
        num_sharing=num_sharing,
        row_rank=chunk * rank,
        rank=rank,
        num_tokens=num_tokens,
        chunk_tokens=chunk,
    )
    assist = AssistCosts(is_beside=True)
    found = expect(asked, assist, Corrections())[ASSIST]
    whole = _assist_chunks(asked, assist, 0.0, chunk)
    later_s = found.first_token_s - whole.first_token_s
    assert later_s * num_sharing <= whole.others_s - found.others_s + 1e-9
    assert (found.chunk_tokens is None) == (found == whole)
    assert found.chunk_tokens is None or LEAST_CHUNK <= found.chunk_tokens < chunk


def test_chunks_of_a_prompt_are_assisted_until_the_copy_has_arrived():
    """A chunk takes 32 ms and 38 ms of the CPU's, of four; in the second, the copy has a lead of 17 layers."""
    asked = question(route=route(copy_s=0.130), prompt_s=4 * 0.032, num_tokens=4 * 64)
    delay_s = AssistCosts(is_beside=True).delay_s(asked.row_rank, asked.step_s, asked.num_layers)
    assert delay_s == pytest.approx(32 * (BESIDE_ROW_RANK_S * 64 * 64 - 0.001 + 2 * BESIDE_HANDOFF_S))
    num_in_second = layers_on_cpu(0.032 + delay_s, 0.001, delay_s / 32, 0.130, 0.130)
    assert 0 < num_in_second < 32 - 17
    assert predict(asked)[ASSIST].first_token_s == pytest.approx(4 * 0.032 + (1 + num_in_second / 32) * delay_s)


def test_a_correction_approaches_the_error_in_closed_form_and_fades():
    corrections, resident_s, delay_s, ratio = Corrections(), 0.010, 0.030, 4.0
    share = delay_s / (resident_s + delay_s)
    for count in range(1, 20):
        corrections.observe(WAIT, resident_s=resident_s, delay_s=delay_s, actual_s=resident_s + ratio * delay_s)
        expected = ratio ** (1 - (1 - LEARN * share) ** count)
        assert corrections.factor(WAIT) == pytest.approx(expected)
    assert corrections.factor(ASSIST) == 1.0
    before = math.log(corrections.factor(WAIT))
    for _ in range(10):
        corrections.observe(LAYERS, resident_s=1.0, delay_s=0.0, actual_s=9.0)
    assert math.log(corrections.factor(WAIT)) == pytest.approx(before * (1 - FORGET) ** 10)
    for _ in range(200):
        corrections.observe(LAYERS, resident_s=0.0, delay_s=1.0, actual_s=1e9)
    assert corrections.factor(LAYERS) == pytest.approx(MOST_CORRECTION)


def test_a_model_that_believes_in_a_link_four_times_too_fast_finds_the_right_choice():
    """Waiting is believed to take ``W`` and takes ``4 W``; assisting takes a time between the two, as predicted.

    The prompt is so long that one layer on the CPU, until the next ones have arrived, takes longer than ``W``.
    """
    assist, corrections = AssistCosts(is_beside=True), Corrections()
    asked = question(route=route(copy_s=0.020), row_rank=64 * 1500)
    at_first = expect(asked, assist, corrections)
    resident_s, wait_s = asked.prompt_s, 0.020
    assist_s = at_first[ASSIST].first_token_s - resident_s
    assert wait_s < assist_s < 4 * wait_s
    # log factor = log 4 * (1 - (1 - LEARN * share) ** n) > log(assist / wait)
    share = wait_s / (wait_s + resident_s)
    left = 1 - math.log(assist_s / wait_s) / math.log(4)
    num_requests = math.ceil(math.log(left) / math.log(1 - LEARN * share))
    assert num_requests < 20
    for number in range(num_requests):
        assert choose(expect(asked, assist, corrections), tuple(ColdStart)[:2], 1) is WAIT, number
        corrections.observe(WAIT, resident_s=resident_s, delay_s=wait_s, actual_s=resident_s + 4 * wait_s)
    assert choose(expect(asked, assist, corrections), tuple(ColdStart)[:2], 1) is ASSIST


@pytest.mark.parametrize(("rate", "handoff_s"), [(4.0, 10e-6), (0.25, 30e-6), (1.0, 50e-6)])
def test_the_costs_of_assisting_are_learnt_from_steps(rate, handoff_s):
    costs, layer_s, layers = AssistCosts(is_beside=True), 0.001, LAYERS_OF_7B

    def took_s(row_rank: int) -> float:
        exposed_s = max(0.0, rate * BESIDE_ROW_RANK_S * row_rank - layer_s)
        return layers * (layer_s + exposed_s + 2 * handoff_s)

    for _ in range(60):
        for row_rank in (64, 64 * 512):  # a decode, which is hidden, and a prompt, which is not
            costs.observe(row_rank, layers * layer_s, layers, took_s(row_rank))
    for row_rank in (64, 64 * 64, 64 * 512):
        step_s = layers * layer_s
        assert step_s + costs.delay_s(row_rank, step_s, layers) == pytest.approx(took_s(row_rank), rel=0.02)
    for _ in range(400):
        costs.forget()
    retried = costs.delay_s(64 * 512, layers * layer_s, layers)
    assert retried == pytest.approx(layers * (BESIDE_ROW_RANK_S * 64 * 512 - layer_s + 2 * handoff_s), rel=0.02)


def test_noise_of_steps_that_the_device_mostly_took_over_teaches_little():
    """Else a millisecond of a step, at a hundredth of its layers, counted as three for each layer."""
    costs, step_s, layers = AssistCosts(is_beside=True), 0.032, LAYERS_OF_7B
    for cpu_share in (0.01, 0.1, 0.5):
        for noise_s in 50 * (0.001, -0.001):
            costs.observe(64, step_s, layers, step_s + 2 * layers * cpu_share * 10e-6 + noise_s, cpu_share)
    assert costs._row_rank_s == pytest.approx(BESIDE_ROW_RANK_S)
    assert costs.delay_s(64, step_s, layers) == pytest.approx(2 * layers * 10e-6, rel=0.5)


@pytest.mark.parametrize("left_s", [-0.010, 0.0002])
def test_launches_one_by_one_have_their_price_even_if_every_layer_arrives_in_time(left_s):
    """The CPU computes no layer of such a step, but it cannot be replayed: its adapter is not there when it begins."""
    corrections = Corrections()
    asked = question(route=route(copy_begins_s=left_s - 0.004, copy_s=0.004), num_others=75)
    assert count_on_cpu(0.0, 0.001, 0.0, asked.route.device_s(LAYERS_OF_7B), 0.004 / LAYERS_OF_7B, LAYERS_OF_7B) == 0
    corrections.observe_launches(ASSIST, 0.054, 0.014)
    found = expect(asked, AssistCosts(is_beside=True), corrections)
    assert found[ASSIST].others_s == pytest.approx(75 * corrections.launch_s(ASSIST))
    assert choose(found, (WAIT, ASSIST), 1) is WAIT


@pytest.mark.parametrize("num_others", [0, 3, 127])
@pytest.mark.parametrize("copy_s", [0.0003, 0.004, 0.030])
def test_modes_whose_steps_are_launched_one_by_one_are_found_dear(num_others, copy_s):
    """A replayed step takes 10 ms. On layers that arrive its launches take 28 ms, and assisted ones up to 300.

    Measured on an H100 beside a host whose cores take 47 ms at least to launch an assisted step of an 8B model.
    """
    assist, corrections = AssistCosts(is_beside=True), Corrections()
    asked = question(
        route=route(copy_s=copy_s),
        step_s=0.010,
        prompt_s=0.010,
        beat_s=0.010,
        num_others=num_others,
        row_rank=64 * 16,
        rank=16,
        token_s=5e-6,
    )
    launches = {WAIT: 0.0, ASSIST: 0.067, LAYERS: 0.028}
    wait_s = expect(asked, assist, corrections)[WAIT].begins_s
    first_token_s = {mode: wait_s * (mode is WAIT) + max(asked.step_s, launches[mode]) for mode in ColdStart}
    lost_s = {mode: first_token_s[mode] + num_others * max(0.0, launches[mode] - asked.step_s) for mode in ColdStart}
    chosen = []
    for _ in range(400):
        expected = expect(asked, assist, corrections)
        mode = choose(expected, tuple(ColdStart), 1)
        chosen.append(mode)
        delay_s = (expected[mode].first_token_s - asked.prompt_s) / corrections.factor(mode)
        corrections.observe(mode, resident_s=asked.prompt_s, delay_s=delay_s, actual_s=first_token_s[mode])
        if mode is not WAIT:
            corrections.observe_launches(mode, launches[mode], asked.step_s)
    best = min(lost_s, key=lambda mode: lost_s[mode])
    assert best is (LAYERS if (num_others, copy_s) == (0, 0.030) else WAIT)
    assert chosen.count(best) >= 390 and sum([lost_s[mode] for mode in chosen]) < 1.5 * 400 * lost_s[best]
