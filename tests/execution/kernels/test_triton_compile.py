"""The kernels compile for the GPUs they are meant for, without spilling, and read memory in wide pieces."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

SITES = (
    *("attention, Llama 3 8B", "adapters, Llama 3 8B", "adapters, Mixtral 8x7B"),
    *("norms and gates", "sampler", "base in int4, groups of 32"),
)

READERS = {"store", "attend", "shrink", "expand", "rms_norm", "activate", "multiply", "dequantise", "choose"}
READERS |= {"shrink_experts", "expand_experts"}
"""Kernels whose time is that of their reads."""

COMPILE = """
import json, sys
from dataclasses import asdict
from kernels_offline import compile_sites
for target, sites in json.loads(sys.argv[1]).items():
    for kernel in compile_sites([target], sites):
        print(json.dumps(asdict(kernel)))
"""

MULTIPLIERS = {"attend", "shrink", "expand", "shrink_experts", "expand_experts", "multiply"}


def test_kernels_compile_for_gpus(tmp_path: Path) -> None:
    """One of NVIDIA and one of AMD, with the constants of the call sites; all GPUs: ``bench/kernels_offline.py``."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    result = subprocess.run(
        [sys.executable, "-c", COMPILE, json.dumps({"sm_90": SITES, "gfx942": SITES[:1]})],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        cwd=Path(__file__).parents[3] / "bench",
    )
    assert result.returncode == 0, result.stderr[-3000:]
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert {line["kernel"] for line in lines} >= READERS | {"plan", "combine", "vectors", "add_splits"}
    for line in lines:
        assert line["spilled"] == 0, f"spills: {line}"
        is_prompt = line["kernel"] == "attend" and "IS_CUT=False" in line["constants"] and line["target"] == "sm_90"
        assert line["shared_bytes"] <= (128 if is_prompt else 96) * 1024, f"too much shared memory: {line}"
        assert line["products"] > 0 or line["kernel"] not in MULTIPLIERS, f"no matrix instruction: {line}"
        is_lora = line["kernel"] in ("shrink", "expand") and line["target"] == "sm_90"
        assert "IS_CHAINED=True" in line["constants"] or not is_lora, f"waits for the launch before to end: {line}"
        is_reader = line["kernel"] in READERS and line["target"].startswith("sm_") and "DIM=96" not in line["constants"]
        assert line["wide_loads"] > 0 or not is_reader, f"narrow loads: {line}"
