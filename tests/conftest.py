"""Triton decides when it is imported whether to compile kernels or to run them in Python: without a GPU, the latter."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
