"""oneDNN keeps few compiled products, so that steps of all sizes do not fill the memory."""

import os
import subprocess
import sys

import pytest

from manylora.execution.kernels import linear

SCRIPT = """
import torch
from manylora.execution.kernels import linear
linear.bound_caches(8)
torch.set_num_threads(1)
weight = torch.zeros(512, 512)

def resident_mib():
    return int(open("/proc/self/statm").read().split()[1]) >> 8

for rows in range(200, 210):
    linear.linear(torch.zeros(rows, 512), weight)
before = resident_mib()
for rows in range(210, 410):
    linear.linear(torch.zeros(rows, 512), weight)
print(linear.has_onednn(), resident_mib() - before)
"""


def test_the_caches_are_bounded_unless_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", raising=False)
    monkeypatch.setenv("LRU_CACHE_CAPACITY", "7")
    linear.bound_caches()
    assert os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == "128" and os.environ["LRU_CACHE_CAPACITY"] == "7"
    monkeypatch.delenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_products_of_many_sizes_take_little_memory() -> None:
    names = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, check=True, env=environment)
    has_onednn, grown_mib = done.stdout.decode().split()
    if has_onednn == "False":
        pytest.skip("this build of torch has no oneDNN")
    assert int(grown_mib) < 40, "about 150 with the caches' own sizes"
