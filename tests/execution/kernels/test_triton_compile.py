"""The kernels compile for the GPUs they are meant for, without spilling, and read memory in wide pieces."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


def test_kernels_compile_for_gpus(tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    result = subprocess.run(
        [sys.executable, str(Path(__file__).parents[2] / "support" / "triton_compile.py")],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert len({line["kernel"] for line in lines}) >= 3
    for line in lines:
        assert line["local"] == 0 and line["stack"] == 0, f"spills: {line}"
        assert line["shared_bytes"] <= 96 * 1024, f"too much shared memory: {line}"
        assert line["wide_loads"] > 0 or not line["is_reading"], f"narrow loads: {line}"
