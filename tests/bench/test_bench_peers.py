"""In-process comparisons: every system gets the same requests, in turns."""

from __future__ import annotations

import re

from cli_runs import app
from peers import draw_requests, make_systems
from typer.testing import CliRunner

from manylora.demo import demo_adapters, demo_model_path
from manylora.lab.bench.rounds import in_turns, time_in_turns
from manylora.serving.offline import Engine


def test_systems_take_turns_with_the_same_requests() -> None:
    adapters = dict(list(demo_adapters().items())[:2])
    asked = draw_requests(3, 8, 4, vocab_size=100, seed=1)
    assert asked == draw_requests(3, 8, 4, vocab_size=100, seed=1) != draw_requests(3, 8, 4, vocab_size=100, seed=2)
    turns: list[tuple[str, int]] = []
    with Engine("demo", adapters=adapters, prefix_caching=False) as engine:
        seconds = time_in_turns(
            make_systems(engine, demo_model_path(), asked, adapters, "cpu"),
            2,
            on_round=lambda name, number, took: turns.append((name, number)),
        )
    systems = ["manylora, base", "manylora, adapters", "transformers", "PEFT"]
    assert turns == [(name, number) for number, name in in_turns(systems, 2)]
    assert {name: len(times) for name, times in seconds.items()} == dict.fromkeys(systems, 2)


def test_an_engine_is_timed_from_the_command_line() -> None:
    sizes = ["--num-prompts", "2", "--random-input-len", "4", "--random-output-len", "2", "--rounds", "1"]
    result = CliRunner().invoke(app, ["bench", "offline", "demo", *sizes])
    assert result.exit_code == 0, result.output
    assert re.search(r" base +[\d,.]+ *\n", result.output) and re.search(r" adapters +[\d,.]+ *\n", result.output)
