"""`manylora bench serve` against a server of ours, from the command line to the files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_runs import app
from reciter import engine_config
from typer.testing import CliRunner

from manylora.core.config import ServerConfig
from manylora.serving.server import BackgroundServer, LoraModule


@pytest.mark.slow
def test_a_run_over_adapters_and_one_over_the_base(tokenizer: Path, lora_dir: Path, tmp_path: Path) -> None:
    server = BackgroundServer(
        engine_config(tokenizer),
        ServerConfig(port=0, in_process=True),
        [LoraModule(name, str(lora_dir / name)) for name in ("m", "p")],
        builder="reciter:reciter_parts",
    )
    with server:
        line = ["bench", "serve", "--url", server.url, "--num-prompts", "30", "--request-rate", "200", "--base-run"]
        line += ["--random-input-len", "20", "--random-output-len", "6", "--random-range-ratio", "0.5", "--seed", "3"]
        line += ["--base-share", "0.3", "--popularity", "round-robin", "--goodput", "ttft:5000", "tpot:5000"]
        result = CliRunner().invoke(app, [*line, "--save", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    assert "Cost of adapters" in result.output
    report = json.loads((tmp_path / "out" / "results.json").read_text())
    mixed, base = report["runs"]["adapters"], report["runs"]["base alone"]
    for run in (mixed, base):
        assert (run["summary"]["num_requests"], run["summary"]["num_errors"], run["num_unsent"]) == (30, 0, 0)
        assert run["summary"]["slo_attainment"] == 1.0
        assert not run["is_counted_by_chunks"]
    assert set(mixed["summary"]["groups"]) == {"adapters", "base"}
    assert base["summary"]["groups"] == {}
    records = [json.loads(line) for line in (tmp_path / "out" / "requests.jsonl").read_text().splitlines()]
    sent = [record for record in records if record["run"] == "adapters"]
    assert {record["adapter"] for record in sent} == {"", "m", "p"}
    assert all(10 <= record["num_prompt_tokens"] <= 30 and 3 <= record["num_output_tokens"] <= 9 for record in sent)
    again = [record for record in records if record["run"] == "base alone"]
    seen_before = [record for record in again if record["num_cached_tokens"]]
    assert len(seen_before) <= 1, "the second run has prompts of its own; the first of them warms up"
    assert {path.name for path in (tmp_path / "out").iterdir()} >= {"table.md", "latency.png", "throughput.png"}


def test_what_is_wrong_is_one_line(tokenizer: Path) -> None:
    for line, message in (
        (["--url", "http://127.0.0.1:9"], "no answer"),
        (["--goodput", "speed:5"], "speed:5"),
        (["--extra-body", "[1]"], "JSON object"),
        (["--timeout", "0"], "timeout_s = 0"),
        (["--base-model", "b", "--num-prompts", "3", "--warm-up", "1e6"], "all requests are sent within"),
        (["--save", __file__], "which cannot be made: File exists"),
    ):
        result = CliRunner().invoke(app, ["bench", "serve", "--models", "a", *line])
        assert result.exit_code != 0
        assert message in str(result.exception)
