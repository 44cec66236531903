"""The script for a GPU, on a toy model in Triton's interpreter: its figures mean nothing, that it runs does."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]


def test_the_script_runs_without_a_gpu(tmp_path: Path) -> None:
    result = subprocess.run(
        [ROOT / "bench" / "gpu.sh", tmp_path, "LOADS", "--cpu-smoke", "--sections", "machine,loads,assist"],
        env={**os.environ, "PYTHON": sys.executable, "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    assert result.stdout.splitlines()[-1] == "VERDICT LOADS: good; 3 of 3 sections whole"
    content = json.loads((tmp_path / "gpu_LOADS.json").read_text())
    assert list(content) == ["machine", "loads", "assist", "verdict"]
    assert "## loads" in (tmp_path / "gpu_LOADS.md").read_text()


def test_a_call_walks_its_sections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One quick file of tests stands for those of the kernels, which run by themselves."""
    monkeypatch.syspath_prepend(ROOT / "bench")
    gpu = importlib.import_module("gpu")
    monkeypatch.setattr(gpu, "KERNEL_TESTS", {"kernels/test_widening_ptx.py": 1})
    monkeypatch.setattr(gpu, "DEVICE_TESTS", {"of_no_such_name.py": 1})
    arguments = ["gpu.py", "--call", "RIGHT", "--cpu-smoke", "--out", str(tmp_path)]
    monkeypatch.setattr("sys.argv", [*arguments, "--sections", "kernel_tests,sanitizer"])
    with pytest.raises(SystemExit) as ended:
        gpu.main()
    assert ended.value.code == 0, (tmp_path / "gpu_RIGHT.md").read_text()
    content = json.loads((tmp_path / "gpu_RIGHT.json").read_text())
    assert list(content) == ["kernel_tests", "sanitizer", "verdict"]
    assert content["kernel_tests"][0]["passed"] > 0


def test_the_verdict_names_what_failed_and_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "bench")
    verdict = importlib.import_module("gpu").verdict
    content = {"one": [{"ms": 1.0}, {"error": "it broke"}], "two": [{"left out": "no time"}]}
    assert verdict("SPEED", ("one", "two"), content) == (
        "VERDICT SPEED: NOT GOOD; 0 of 2 sections whole; failed: one; left out in part: two",
        False,
    )
    assert verdict("SPEED", ("one",), {"one": [{"left out": "there is no compute-sanitizer"}]})[1]
    assert not verdict("SPEED", ("one",), {})[1]


def test_a_figure_of_rounds_is_shown_with_its_range(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "bench")
    cell = importlib.import_module("gpu_rig")._cell
    assert cell([3.0, 1.0, 20.0]) == "3 (1 to 20)"
