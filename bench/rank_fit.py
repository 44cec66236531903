"""Step-time models of CaraServe's router (CS-5) on live kernels and on simulated devices: how much they explain.

Live: an engine with the demo model serves bursts of requests of random sizes and ranks, once with each kernel of the
device, and the fit that every engine has learns from its steps. Kernels that pad need a GPU: on a CPU ``grouped`` and
``naive`` multiply each adapter's rows by its own rank, and are *unpadded*. *In sample* are the steps
that a line was fitted to; *out of sample* is the error of predictions made before a step was learnt from. Simulated: an
A10 with noise on every step, under each family of kernels.

    python bench/rank_fit.py                    # a quiet machine, four minutes
    python bench/rank_fit.py --device cuda
"""

from __future__ import annotations

import random
from collections.abc import Callable

from publishing import Others, arguments, publish, reason_if_busy, table

from manylora.core.config import EngineConfig, MemoryConfig, ModelConfig, SchedulerConfig
from manylora.core.costs.features import StepFeatures, step_features
from manylora.core.costs.rank_fit import RankFit, RankLoad, StepFit
from manylora.core.costs.step_log import LogLine, StepRecord
from manylora.core.types import AdapterKey
from manylora.demo import demo_model_path
from manylora.execution.build import build_parts
from manylora.lab.bench.sweep import sweep_live
from manylora.lab.costs.roofline import RooflineCost
from manylora.lab.costs.synthetic_plan import SyntheticSequence, synthetic_plan

GOAL = 0.96
RANKS = (8, 16, 32, 64)
TARGETS = ("q_proj", "k_proj", "v_proj")
NOISE = 0.02
"""Standard deviation of a simulated step, relative to its length."""


def load_of(step: StepFeatures) -> RankLoad:
    """Return the content of a step that an engine fits to, from its log."""
    return RankLoad(
        step.num_tokens,
        step.num_sequences,
        step.context_tokens + step.prompt_context_tokens,
        step.num_adapted_tokens,
        step.row_rank,
        step.max_rank,
    )


def live(kernel: str, device: str, seconds: float) -> tuple[StepFit, ...]:
    """Return the fits of a live engine under a kernel, every step of a calibration sweep observed."""
    config = EngineConfig(
        model=ModelConfig(model=str(demo_model_path()), device=device, lora_kernel=kernel),
        memory=MemoryConfig(memory_bytes=64 << 20, prefix_caching=False),
        scheduler=SchedulerConfig(max_num_seqs=32, max_num_batched_tokens=512),
    )
    log: list[LogLine] = []
    sweep_live(build_parts, config, num_adapters=32, ranks=RANKS, targets=TARGETS, seconds=seconds, write=log.append)
    fit = RankFit()
    for line in log:
        if isinstance(line, StepRecord):
            fit.observe(load_of(line.features), line.took_s)
    phases = {one.phase for one in fit.fits()}
    if phases != {"decode", "prefill"}:
        raise SystemExit(f"{kernel}: too few steps in {seconds:.0f} s, fitted {sorted(phases)}; set --seconds")
    return fit.fits()


def simulated(kernel: str, num_steps: int) -> tuple[StepFit, ...]:
    """Return the fits on an A10 with noise."""
    cost, rng, fit = RooflineCost("llama-2-7b", "a10", lora_kernel=kernel, targets=TARGETS), random.Random(0), RankFit()
    for _ in range(num_steps):
        parts = [part(rng, rng.randint(50, 700), 1) for _ in range(rng.randint(1, 32))]
        if rng.random() < 0.4:
            parts.append(part(rng, 0, rng.randint(16, 480)))
        features = step_features(synthetic_plan(parts))
        fit.observe(load_of(features), sum(cost.price(features)) * rng.gauss(1.0, NOISE))
    return fit.fits()


def part(rng: random.Random, start: int, num_tokens: int) -> SyntheticSequence:
    """Return a sequence with an adapter of a random rank."""
    rank = rng.choice(RANKS)
    return SyntheticSequence(start, num_tokens, AdapterKey(f"{rank}/{rng.randrange(32)}"), rank)


def main() -> None:
    """Fit and report."""
    parser = arguments(__doc__, quick="seconds instead of minutes")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="of the live engine")
    parser.add_argument("--seconds", type=float, help="of each live sweep (90, or 20 with --quick)")
    options = parser.parse_args()
    seconds, num_steps = (20.0, 400) if options.quick else (90.0, 4000)
    seconds = options.seconds or seconds
    runs: dict[str, Callable[[], tuple[StepFit, ...]]] = {
        f"A10, {kernel}": lambda kernel=kernel: simulated(kernel, num_steps)  # type: ignore[misc]
        for kernel in ("padded", "s-lora-mbgmm", "ragged")
    }
    runs |= {
        f"{options.device}, {kernel}": lambda kernel=kernel: live(kernel, options.device, seconds)  # type: ignore[misc]
        for kernel in (("grouped", "naive") if options.device == "cpu" else ("padded", "ragged"))
    }
    figures, rows, others = {}, [], Others()
    for name, run in runs.items():
        fits = run()
        figures[name] = [
            {"phase": one.phase, "family": one.family, "steps": one.num_steps, "r2": one.r2, "r2_out": one.r2_out}
            | {"error_s": one.error_s, "error_out_s": one.error_out_s}
            for one in fits
        ]
        best = {one.phase: min(fits, key=lambda fit: (fit.phase != one.phase, fit.error_out_s)) for one in fits}
        rows += [
            [name, one.phase, one.family + (" *" if one is best[one.phase] else ""), one.num_steps]
            + [f"{value:.3f}" if value is not None else "-" for value in (one.r2, one.r2_out)]
            + [f"{value * 1e3:.3f}" for value in (one.error_s, one.error_out_s)]
            for one in fits
        ]
    heads = ["machine, kernel", "phase", "family", "steps", "R², in sample", "out of sample"]
    heads += ["error, ms, in sample", "out of sample"]
    lines = ["# Step-time models of the router", "", *table(heads, rows, left=3), ""]
    lines.append(f"* the family that a router uses: the smaller error out of sample. Goal: R² of {GOAL}.")
    refused = reason_if_busy(others.share())
    publish("rank_fit", figures, "\n".join(lines), is_kept=not options.quick, refused=refused)


if __name__ == "__main__":
    main()
