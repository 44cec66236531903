"""`manylora calibrate`: from logs to a profile on disk and tables on the terminal; and the sweep over a live model."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import pytest
import torch
from cli_runs import app
from sim_profiles import make_profile, sweep
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from manylora.cli.commands.calibrate import _advice
from manylora.core.config import EngineConfig, MemoryConfig, ModelConfig, SchedulerConfig
from manylora.core.costs.step_log import LoadRecord, LogHeader, LogLine, StepRecord, write_step_log
from manylora.core.errors import ConfigError
from manylora.core.types import Tier
from manylora.execution.build import build_parts
from manylora.lab.bench.sweep import sweep_live
from manylora.lab.costs.calibrate import fit_profile, step_shares
from manylora.lab.costs.profile import TERMS, FitError, Noise, read_profile


def test_logs_become_a_profile(tmp_path: Path) -> None:
    lines = sweep(make_profile(reads_host=True), seconds=1.5)
    half = len(lines) // 2
    # Two runs of one engine, each with its own header.
    write_step_log(tmp_path / "one.jsonl", lines[:half])
    write_step_log(tmp_path / "two.jsonl", [lines[0], *lines[half:]])
    output = tmp_path / "profile.json"
    command = ["calibrate", str(tmp_path / "one.jsonl"), str(tmp_path / "two.jsonl"), "-o", str(output)]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    profile = read_profile(output)
    assert profile.num_steps == sum(isinstance(line, StepRecord) for line in lines)
    assert (profile.machine, profile.reads_host) == ("a machine", True)
    for text in ("a step", "a rank of a distinct adapter", "decode", "prefill", "R²", "loads"):
        assert text in result.output


def test_shares_add_up_to_the_whole() -> None:
    profile = make_profile()
    features = [line.features for line in sweep(profile, seconds=0.2) if isinstance(line, StepRecord)]
    shares = step_shares(profile, features)
    assert set(shares) == {*TERMS, "rows", "turn"}
    assert sum(shares.values()) == pytest.approx(1.0)
    assert shares["step"] > 0.1 > shares["sampled"] == 0.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "expected step logs, or --run MODEL"),
        (["steps.jsonl", "--run", "demo"], "expected step logs, or --run MODEL"),
        (["steps.jsonl"], "Cannot read the step log steps.jsonl"),
        (["good.jsonl", "empty.jsonl"], "The step log empty.jsonl is empty"),
        (["good.jsonl"], "Got 2 steps in the logs"),
        (["--run", "demo", "--ranks", "8,x"], "expected positive numbers with commas"),
        (["--run", "demo", "--output", "nowhere/profile.json"], "there is no folder nowhere"),  # not after two minutes
        (["--run", "demo", "--step-log", "."], "--step-log '.', which is a folder"),
    ],
)
def test_what_was_asked_for_wrongly_is_said(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    header, *records = sweep(make_profile(), seconds=0.2)
    write_step_log("good.jsonl", [header, *[record for record in records if isinstance(record, StepRecord)][:2]])
    write_step_log("empty.jsonl", [])
    result = CliRunner().invoke(app, ["calibrate", *arguments])
    assert isinstance(result.exception, ConfigError)
    assert message in str(result.exception)


@pytest.mark.slow
def test_a_live_engine_is_swept(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=256,
        )
    )
    model.save_pretrained(tmp_path)
    config = EngineConfig(
        model=ModelConfig(model=str(tmp_path), device="cpu"),
        memory=MemoryConfig(num_pages=64),
        scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64),
    )
    lines: list[LogLine] = []
    progress: list[float] = []
    began_at = time.perf_counter()
    num_steps = sweep_live(
        build_parts, config, num_adapters=4, ranks=(4, 8), seconds=0.3, write=lines.append, on_progress=progress.append
    )
    took_s = time.perf_counter() - began_at
    header, *records = lines
    assert isinstance(header, LogHeader)
    assert (header.num_pages, header.base.vocab_size, header.lora_kernel) == (64, 64, config.model.lora_kernel)
    assert "torch" in header.machine
    steps = [record for record in records if isinstance(record, StepRecord)]
    assert len(steps) == num_steps > 0
    # Steps run one after another. One alone may outlast its turns: it can end between a turn's time and its look.
    assert all(step.device_s is not None and step.device_s > 0 for step in steps)
    assert sum(step.device_s or 0.0 for step in steps) <= took_s
    loads = [record for record in records if isinstance(record, LoadRecord)]
    assert all(load.error is None and load.tier in (Tier.HOST, Tier.DEVICE) for load in loads)
    assert progress[-1] >= 0.3
    with pytest.raises(ConfigError, match="Got a rank of 100000, expected at most 90, which"):  # before it is written
        sweep_live(build_parts, config, num_adapters=4, ranks=(8, 100_000), seconds=0.3, write=lines.append)


def disturbed(lines: list[LogLine], every: int, factor: float) -> list[LogLine]:
    """Let one step in so many take longer, as beside another process."""
    out: list[LogLine] = []
    for index, line in enumerate(lines):
        if isinstance(line, StepRecord) and index % every == 0:
            late = line.launched_at + factor * (line.ended_at - line.launched_at)
            line = msgspec.structs.replace(line, ended_at=late, device_s=None)
        out.append(line)
    return out


def test_a_few_late_steps_spoil_neither_the_fit_nor_its_error() -> None:
    lines = sweep(make_profile(), seconds=2.0)
    (before,) = [one for one in fit_profile(lines).errors if one.regime == "decode"]
    (after,) = [one for one in fit_profile(disturbed(lines, 19, 12.0)).errors if one.regime == "decode"]
    assert after.mean_s > 1.3 * before.mean_s
    assert after.median_error < before.median_error + 0.05


def test_a_bad_fit_says_what_to_do() -> None:
    profile = make_profile()

    def told(error: float, num_steps: int, quantiles: tuple[float, ...]) -> list[str]:
        one = FitError(regime="decode", num_steps=num_steps, mean_s=1.0, r2=0.0, median_error=error, p90_error=1.0)
        noise = {"decode": Noise(mean=1.0, quantiles=quantiles)}
        return list(_advice(msgspec.structs.replace(profile, errors=(one,), noise=noise)))

    steady, busy = (1.0,) * 101, tuple(0.5 + index / 50 for index in range(101))
    assert told(0.1, 1000, busy) == []
    assert "idle" in told(0.37, 1000, busy)[0]
    assert "--seconds" in told(0.37, 10, steady)[0]
    assert "do not rely" in told(0.37, 1000, steady)[0]
