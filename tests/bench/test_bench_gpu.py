"""The GPU benchmark's script, on a toy model in Triton's interpreter: its figures mean nothing, that it runs does."""

from __future__ import annotations

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
        [ROOT / "bench" / "gpu.sh", tmp_path, "--cpu-smoke", "--sections", "machine,loads,assist"],
        env={**os.environ, "PYTHON": sys.executable, "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    content = json.loads((tmp_path / "gpu.json").read_text())
    assert list(content) == ["machine", "loads", "assist"]
    assert all("error" not in row for rows in content.values() for row in rows)
    assert "## loads" in (tmp_path / "gpu.md").read_text()
