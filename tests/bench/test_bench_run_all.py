"""All benchmarks in one go: what is skipped is named, what fails stops nobody."""

from __future__ import annotations

from pathlib import Path

import pytest
import run_all
import typer
from cli_runs import app as cli

PROGRAM = "# from publishing import\nimport sys\nif __name__ == '__main__':\n    "
WRITES = f"{PROGRAM}open(sys.argv[0] + '.args', 'w').write(' '.join(sys.argv[1:]))\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Four benchmarks, one broken and one that reads traces, a module, and a program that a benchmark starts."""
    (tmp_path / "a.py").write_text(WRITES)
    (tmp_path / "b.py").write_text(f"{PROGRAM}raise SystemExit(3)\n")
    (tmp_path / "c.py").write_text(f"# has quick=\n{WRITES}")
    (tmp_path / "traces.py").write_text(WRITES)
    (tmp_path / "module.py").write_text("raise RuntimeError('no program')\n")
    (tmp_path / "client.py").write_text("if __name__ == '__main__':\n    raise RuntimeError('no benchmark')\n")
    return tmp_path


def written(folder: Path) -> dict[str, str]:
    return {path.name.partition(".")[0]: path.read_text() for path in sorted(folder.glob("*.args"))}


def test_one_that_fails_stops_nobody_and_what_is_skipped_is_named(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_all.main([], folder=folder) == 1
    assert written(folder) == {"a": "", "c": ""}
    lines = capfd.readouterr().out.splitlines()
    assert [line.split() for line in lines[-5:]] == [
        ["a.py", "ok", "0", "s"],
        ["b.py", "failed", "exit", "code", "3"],
        ["c.py", "ok", "0", "s"],
        ["traces.py", "skipped", "reads", "traces:", "--traces", "DIR"],
        ["2", "ok,", "1", "failed,", "1", "skipped"],
    ]


def test_traces_go_to_those_that_read_them(folder: Path, tmp_path: Path) -> None:
    assert run_all.main(["--traces", str(tmp_path), "--only", "a,traces"], folder=folder) == 0
    assert written(folder) == {"a": "", "traces": f"--traces={tmp_path.resolve()}"}


def test_a_smoke_test_is_of_those_that_have_one(folder: Path) -> None:
    assert run_all.main(["--quick"], folder=folder) == 0
    assert written(folder) == {"c": "--quick"}


@pytest.mark.parametrize(
    ("argv", "message"), [(["--traces", "nowhere"], "no such folder"), (["--only", "a,x"], "--only 'x'")]
)
def test_what_was_asked_for_wrongly_is_said(
    argv: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        run_all.main(argv, folder=folder)
    assert message in capsys.readouterr().err
    assert not written(folder)


def test_every_script_that_can_read_traces_is_given_them() -> None:
    texts = {path.name: path.read_text() for path in run_all.find_scripts(run_all.HERE)}
    readers = {name for name, text in texts.items() if '"--traces"' in text}
    assert readers == set(run_all.TRACES) - set(run_all.COMMANDS)
    assert set(run_all.ALWAYS) <= set(texts)
    assert {"gpu.py", "run_all.py", "publishing.py", "open_loop.py", "paced.py"}.isdisjoint(texts)


def test_commands_of_manylora_are_those_that_it_has() -> None:
    app = typer.main.get_command(cli)
    for argv in run_all.COMMANDS.values():
        group = app.commands[argv[0]]  # type: ignore[attr-defined]
        known = {name for option in group.commands[argv[1]].params for name in option.opts}
        assert {one.partition("=")[0] for one in argv if one.startswith("--")} <= known
