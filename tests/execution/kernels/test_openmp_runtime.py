"""The threads of torch's OpenMP runtime: a pool that is not needed ends, and spinning is bounded."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from manylora.execution.kernels.cpu.support import runtime_library
from manylora.serving.hosting.engine.startup import SPIN_COUNT, limit_openmp_spin

POOLS = """
import os, torch
from manylora.execution.kernels.cpu.support import release_threads

torch.set_num_threads(3)
def product():
    x = torch.ones(512, 512)
    return float((x @ x).sum())
before = len(os.listdir("/proc/self/task"))
first = product()
pool = len(os.listdir("/proc/self/task"))
release_threads()
print(pool - before, len(os.listdir("/proc/self/task")) - before, product() == first)
"""


@pytest.mark.skipif(runtime_library() is None or sys.platform != "linux", reason="torch brings no GNU OpenMP")
def test_released_threads_end_and_others_take_their_place() -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "3"}
    done = subprocess.run(
        [sys.executable, "-c", POOLS], env=environment, capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.split() == ["2", "0", "True"]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"GOMP_SPINCOUNT": str(SPIN_COUNT)}),
        ({"GOMP_SPINCOUNT": "7"}, {"GOMP_SPINCOUNT": "7"}),
        ({"OMP_WAIT_POLICY": "active"}, {"OMP_WAIT_POLICY": "active"}),
    ],
)
def test_spinning_is_bounded_unless_the_environment_says_how(
    given: dict[str, str], expected: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    limit_openmp_spin()
    names = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    assert {name: os.environ[name] for name in names if name in os.environ} == expected
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
