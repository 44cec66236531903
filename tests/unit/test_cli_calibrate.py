"""`manylora calibrate`: from logs to a profile on disk and tables on the terminal; and the sweep over a live model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from sim_profiles import make_profile, sweep
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from manylora.bench.calibration import sweep_live
from manylora.cli.app import app
from manylora.config import EngineConfig, MemoryConfig, ModelConfig, SchedulerConfig
from manylora.costs.calibrate import step_shares
from manylora.costs.profile import TERMS, read_profile
from manylora.costs.step_log import LoadRecord, LogHeader, LogLine, StepRecord, write_step_log
from manylora.errors import ConfigError
from manylora.types import Tier


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
    num_steps = sweep_live(
        config, num_adapters=4, ranks=(4, 8), seconds=0.3, write=lines.append, on_progress=progress.append
    )
    header, *records = lines
    assert isinstance(header, LogHeader)
    assert (header.num_pages, header.base.vocab_size, header.lora_kernel) == (64, 64, config.model.lora_kernel)
    assert "torch" in header.machine
    steps = [record for record in records if isinstance(record, StepRecord)]
    assert len(steps) == num_steps > 0
    # The executor's own measure is part of the loop's.
    assert all(step.device_s is not None and 0 < step.device_s <= step.took_s for step in steps)
    loads = [record for record in records if isinstance(record, LoadRecord)]
    assert all(load.error is None and load.tier in (Tier.HOST, Tier.DEVICE) for load in loads)
    assert progress[-1] >= 0.3
