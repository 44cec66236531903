"""`manylora compare`: one workload by several scheduling policies, one's own among them, side by side."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from cli_runs import app
from typer.testing import CliRunner

from manylora.cli.app import main
from manylora.cli.views.terminal import out
from manylora.core.errors import ConfigError
from manylora.core.scheduling import POLICIES

pytestmark = pytest.mark.usefixtures("wide_terminal")

BUSY = ["--rate", "8", "--requests", "40", "--set", "warm_up_s=0", "--set", "setup.scheduler.max_num_seqs=4"]

MINE = """
from manylora.core.scheduling import KeyedPolicy

def Shortest(context):
    return KeyedPolicy(lambda sequence, now: sequence.num_to_run)
"""


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give tables room: the width is found as the console is made, in whichever test came first."""
    monkeypatch.setattr(out, "width", 160)


def run(*words: str) -> str:
    command, *options = words
    result = CliRunner().invoke(app, [command, *BUSY, *options], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def rows_of(text: str) -> dict[str, list[str]]:
    return {cells[0]: cells[1:] for cells in map(str.split, text.splitlines()) if len(cells) == 10}


def test_a_policy_of_ones_own_stands_beside_others_on_one_workload(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    mine = f"{tmp_path / 'mine.py'}:Shortest"
    rows = rows_of(run("compare", "--policy", "fifo", "--policy", mine))
    assert list(rows) == ["fifo", "mine.py:Shortest"]
    assert rows["fifo"] != rows["mine.py:Shortest"]
    for label, name in (("fifo", "fifo"), ("mine.py:Shortest", mine)):  # each as if it were simulated by itself
        run("simulate", "--policy", name, "--output", str(tmp_path / "out"))
        summary = json.loads((tmp_path / "out" / "results.json").read_text())["summary"]
        assert rows[label][0] == f"{summary['requests_per_s']:.3g}"
        assert rows[label][3] == f"{1e3 * summary['ttft']['p99']:,.0f}"


def test_by_default_all_policies_are_compared() -> None:
    assert list(rows_of(run("compare", "--requests", "10"))) == sorted(POLICIES)


def test_a_wrong_policy_is_named_before_the_first_run(monkeypatch: pytest.MonkeyPatch) -> None:
    simulated: list[object] = []
    monkeypatch.setattr("manylora.cli.commands.simulate.simulate", lambda *args, **kwargs: simulated.append(args))
    for words, message in (
        (["--policy", "fifo", "--policy", "lifo"], "policy = 'lifo', expected one of"),
        (["--policy", "fifo", "--policy-option", "speed=1"], "policy option 'speed'"),
    ):
        with pytest.raises(ConfigError, match=message):
            CliRunner().invoke(app, ["compare", *words, *BUSY], catch_exceptions=False)
    assert not simulated


def test_an_error_of_a_plug_in_names_its_file_and_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(MINE.replace("sequence.num_to_run", "1 / 0"))
    monkeypatch.setattr(sys, "argv", ["manylora", "compare", "--policy", f"{mine}:Shortest", *BUSY])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 1
    line = MINE.splitlines().index("    return KeyedPolicy(lambda sequence, now: sequence.num_to_run)") + 1
    error = " ".join(capsys.readouterr().err.split())
    assert "ZeroDivisionError: division by zero, raised in the plug-in policy = " in error
    assert error.replace(" ", "").partition(f"mine.py:{line}")[1]
