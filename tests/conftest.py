"""What holds for every test.

Triton decides when it is imported whether to compile kernels or to run them in Python: without a GPU, the latter.

Torch has one thread, on whatever machine: models this small only lose by a second one. Tests of kernels whose threads
share work ask for two (``two_threads``).

Memory that nobody has written holds NaN, or the largest integer: what reads it is seen at once, not on another day.

Hypothesis draws the same examples every time, and a slow machine is no failure: a red test is the change's doing. To
search further, draw new ones: ``pytest --hypothesis-profile=search tests/property``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

torch.set_num_threads(1)
torch.use_deterministic_algorithms(True, warn_only=True)
assert torch.empty(1).isnan()

settings.register_profile("search", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same", settings.get_profile("search"), derandomize=True)
settings.load_profile("same")


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Let torch have two threads, and all that runs on them."""
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)
