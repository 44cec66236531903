"""Step-time models, fitted to the steps of an engine."""

from __future__ import annotations

from random import Random

import pytest
from harness import make_rig, request

from manylora.core.costs import rank_fit
from manylora.core.costs.features import StepFeatures
from manylora.core.costs.online import StepLoad
from manylora.core.costs.rank_fit import LEAST_STEPS, RankFit, StepFit, model_of
from manylora.core.costs.step_model import PRIOR, TOKEN_KNOTS, StepModel
from manylora.lab.costs.roofline import RooflineCost

DECODE = (0.03, 2e-4, 1e-6, 3e-6)


def decode_load(rng: Random) -> tuple[StepLoad, list[int]]:
    """Return a decode step of random requests, and their ranks."""
    ranks = [rng.choice((0, 8, 16, 32, 64)) for _ in range(rng.randint(1, 32))]
    num, adapted = len(ranks), sum(rank > 0 for rank in ranks)
    return StepLoad(num, num, sum(rng.randint(50, 900) for _ in ranks), adapted, sum(ranks), max(ranks)), ranks


def decode_s(load: StepLoad, *, is_padded: bool) -> float:
    step_s, request_s, context_s, rank_s = DECODE
    rank = load.num_adapted * load.max_rank if is_padded else load.sum_rank
    return step_s + request_s * load.num_tokens + context_s * load.context + rank_s * rank


def fits_of(fit: RankFit) -> dict[tuple[str, str], StepFit]:
    return {(one.phase, one.family): one for one in fit.fits()}


@pytest.mark.parametrize("is_padded", [True, False])
def test_the_family_of_the_kernels_and_its_line_are_found_in_noise(is_padded: bool):
    rng, fit = Random(1), RankFit()
    for _ in range(800):
        load, _ = decode_load(rng)
        fit.observe(load, decode_s(load, is_padded=is_padded) * rng.uniform(0.99, 1.01))
    found = fits_of(fit)
    right, wrong = ("padded", "unpadded") if is_padded else ("unpadded", "padded")
    assert found["decode", right].r2_out > 0.96
    assert found["decode", right].error_out_s < found["decode", wrong].error_out_s
    model = model_of(fit.fits())
    assert model is not None and model.is_padded is is_padded
    assert (model.step_s, model.rank_s) == pytest.approx((DECODE[0], DECODE[3]), rel=0.1)
    assert model.token_s == PRIOR.token_s  # no prompt has run


def test_delayed_steps_hardly_move_the_line():
    rng, fit = Random(2), RankFit()
    for index in range(800):
        load, _ = decode_load(rng)
        seconds = decode_s(load, is_padded=False) * rng.uniform(0.995, 1.005)
        fit.observe(load, seconds + (0.5 if index % 50 == 49 else 0.0))
    model = model_of(fit.fits())
    assert model is not None
    assert model.step_s == pytest.approx(DECODE[0], rel=0.05)


def test_a_line_follows_an_engine_that_becomes_slower():
    rng, fit = Random(3), RankFit()
    for index in range(2400):
        load, _ = decode_load(rng)
        fit.observe(load, decode_s(load, is_padded=False) * (1.0 if index < 1200 else 2.0))
    model = model_of(fit.fits())
    assert model is not None
    assert model.step_s == pytest.approx(2 * DECODE[0], rel=0.05)


def test_nothing_is_claimed_of_few_steps_or_of_steps_that_never_vary():
    rng, fit = Random(4), RankFit()
    for _ in range(LEAST_STEPS - 1):
        fit.observe(decode_load(rng)[0], 0.03)
    assert fit.fits() == () and model_of(()) is None
    for _ in range(200):
        fit.observe(StepLoad(4, 4, 400, 4, 32, 8), 0.03)
    assert all(one.coefficients and min(one.coefficients) >= 0 for one in fit.fits())


@pytest.mark.parametrize(("kernel", "family"), [("padded", "padded"), ("s-lora-mbgmm", "unpadded")])
def test_both_phases_of_a_simulated_device_are_explained(kernel: str, family: str):
    """The simulated device bends where arithmetic overtakes reads; its adapters cost by their own formulas."""
    cost, rng, fit = RooflineCost("llama-2-7b", "a10", lora_kernel=kernel), Random(5), RankFit()
    for _ in range(1500):
        num_decodes, prompts = rng.randint(1, 24), [rng.randint(20, 400)] if rng.random() < 0.4 else []
        ranks = [rng.choice((8, 16, 32, 64)) for _ in range(num_decodes)]
        own = [rng.choice((8, 16, 32, 64)) for _ in prompts]
        context = sum(rng.randint(100, 500) for _ in ranks)
        tokens, row_rank = sum(prompts), sum(n * rank for n, rank in zip(prompts, own, strict=True))
        step = StepFeatures(
            num_decodes=num_decodes,
            num_prompts=len(prompts),
            num_prompt_tokens=tokens,
            num_sampled=num_decodes + len(prompts),
            context_tokens=context,
            prompt_pairs=sum(n * (n + 1) // 2 for n in prompts),
            num_adapters=num_decodes + len(prompts),
            sum_rank=sum(ranks) + sum(own),
            max_rank=max(*ranks, *own, 0),
            num_adapted_decodes=num_decodes,
            decode_row_rank=sum(ranks),
            prompt_row_rank=row_rank,
            prompt_context_tokens=tokens,
            num_adapted_prompts=len(prompts),
            num_adapted_prompt_tokens=tokens,
            prompt_rank=sum(own),
            num_ranks=4,
        )
        rows = num_decodes + tokens
        load = StepLoad(rows, num_decodes + len(prompts), context + tokens, rows, sum(ranks) + row_rank, step.max_rank)
        fit.observe(load, sum(cost.price(step)) * rng.uniform(0.99, 1.01))
    found = fits_of(fit)
    assert found["decode", family].r2_out > 0.96
    assert found["prefill", family].r2_out > 0.96
    model = model_of(fit.fits())
    assert model is not None and model.is_padded is (family == "padded")


def test_a_prompt_costs_by_the_tokens_beyond_each_knot():
    model = StepModel(
        step_s=0.0,
        request_s=0.0,
        context_s=0.0,
        rank_s=0.0,
        is_padded=False,
        prompt_step_s=1.0,
        token_s=(1.0, 10.0, 100.0, 1000.0),
        prompt_context_s=0.0,
        token_rank_s=2.0,
        is_prompt_padded=True,
    )
    assert TOKEN_KNOTS == (0, 64, 128, 256)
    assert model.prefill_s(50, 0, 0, 0, 0) == 51
    assert model.prefill_s(130, 0, 0, 0, 0) == 1 + 130 + 660 + 200
    assert model.prefill_s(10, 0, 5, 7, 3) == 1 + 10 + 2 * 15


def test_an_engine_fits_to_the_kv_that_a_step_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tokens count once, though they count as computed from the launch on."""
    monkeypatch.setattr(rank_fit, "EVERY", 1)
    rig = make_rig()
    seen: list[StepLoad] = []
    monkeypatch.setattr(RankFit, "observe", lambda fit, load, seconds: seen.append(load))
    rig.add(request("a", num_prompt=9, max_tokens=3), request("b", num_prompt=4, max_tokens=2))
    rig.drain()
    assert [(load.num_tokens, load.context) for load in seen] == [(13, 13), (2, 10 + 5), (1, 11)]
