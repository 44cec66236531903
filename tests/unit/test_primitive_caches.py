"""Products of many sizes: the compiled ones that are kept are bounded."""

from __future__ import annotations

import subprocess
import sys

import pytest

from manylora.execution.kernels.linear import has_onednn

MOST_GROWTH_MIB = 250
"""Bound for 1200 sizes of products: they take 100 MiB in caches of 128, and 600 MiB in those of 1024."""

PRODUCTS = """
import psutil
from manylora.hosting.engine_process import bound_primitive_caches
bound_primitive_caches()
import torch
from manylora.execution.kernels.linear import linear, reorder
torch.set_num_threads(1)
weights = [reorder(torch.zeros(o, i)) for i, o in ((256, 256), (256, 384), (384, 256), (256, 128))]
before = psutil.Process().memory_info().rss
for num_rows in range(2, 302):
    for weight in weights:
        linear(torch.zeros(num_rows, weight.shape[1]), weight)
print((psutil.Process().memory_info().rss - before) >> 20)
"""


@pytest.mark.skipif(not has_onednn(), reason="this build of torch has no oneDNN")
def test_the_memory_of_compiled_products_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        monkeypatch.delenv(variable, raising=False)
    grown = int(subprocess.run([sys.executable, "-c", PRODUCTS], check=True, capture_output=True, text=True).stdout)
    assert grown < MOST_GROWTH_MIB
