"""In-process benchmarks: every system gets the same requests, and ratios are those of the rounds."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from manylora.cli.app import app
from manylora.cli.views import terminal
from manylora.core.errors import ConfigError
from manylora.demo import demo_adapters, demo_model_path
from manylora.lab.bench.offline import draw_requests, measure_offline
from manylora.lab.bench.rounds import in_turns
from manylora.serving.offline import Engine


def test_systems_take_turns_with_the_same_requests() -> None:
    adapters = dict(list(demo_adapters().items())[:2])
    asked = draw_requests(3, 8, 4, vocab_size=100, seed=1)
    assert asked == draw_requests(3, 8, 4, vocab_size=100, seed=1) != draw_requests(3, 8, 4, vocab_size=100, seed=2)
    turns: list[tuple[str, int]] = []
    with Engine("demo", adapters=adapters, prefix_caching=False) as engine:
        result = measure_offline(
            engine,
            demo_model_path(),
            asked,
            adapters=adapters,
            rounds=2,
            with_peers=True,
            on_round=lambda name, number, took: turns.append((name, number)),
        )
    systems = ["manylora, base", "manylora, adapters", "transformers", "PEFT"]
    assert turns == [(name, number) for number, name in in_turns(systems, 2)]
    assert result.num_tokens == 12
    assert {name: len(times) for name, times in result.seconds.items()} == dict.fromkeys(systems, 2)
    assert set(result.ratios) == {"manylora, base over transformers", "manylora, adapters over PEFT"}


def test_the_core_is_timed_from_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal.out, "width", 200)  # it has that of the first test that imported it
    result = CliRunner().invoke(app, ["bench", "core", "--quick", "--policy", "fifo", "--steps", "10"])
    assert result.exit_code == 0, result.output
    assert "fifo" in result.output and "64 of 64" in result.output
    refused = CliRunner().invoke(app, ["bench", "core", "--policy", "lifo"])
    assert isinstance(refused.exception, ConfigError)
    assert "policy = 'lifo'" in str(refused.exception)
