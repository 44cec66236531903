"""What holds for every test.

Triton decides when it is imported whether to compile kernels or to run them in Python: without a GPU, the latter.

Hypothesis draws the same examples every time, and a slow machine is no failure: a red test is the change's doing. To
search further, draw new ones: ``pytest --hypothesis-profile=search tests/property``.
"""

from __future__ import annotations

import os

import torch
from hypothesis import HealthCheck, settings

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

settings.register_profile("search", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same", settings.get_profile("search"), derandomize=True)
settings.load_profile("same")
