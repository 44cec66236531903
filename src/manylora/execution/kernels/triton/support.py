"""Where the Triton kernels can run: on a GPU or, for tests, interpreted on the CPU."""

from __future__ import annotations

import logging
from functools import cache

import torch

__all__ = [
    "BLOCK_FIELDS",
    "MIN_TRITON_PROGRAMS",
    "SAMPLING_NUMBERS",
    "find_triton",
    "is_chained",
    "is_interpreted",
    "num_programs",
    "power_of_two",
]

logger = logging.getLogger(__name__)

MIN_TRITON_PROGRAMS = 3  # programs of an interpreted grid: more than one, so that tests cover the strides

BLOCK_FIELDS = 6
"""A query block: first row of the batch, its tokens, position of the first, line of the page table, and the first
position of the context that it attends to and one past the last."""

SAMPLING_NUMBERS = 5  # what a row draws with, float64: temperature (0 is greedy), min_p, top_k, top_p, a uniform number

PROGRAMS_PER_PROCESSOR = 4


@cache
def is_interpreted() -> bool:
    """Return whether Triton runs its kernels in Python (``TRITON_INTERPRET=1`` before it was imported)."""
    try:
        from triton import knobs
    except ImportError:
        return False
    return bool(knobs.runtime.interpret)


def find_triton(device: torch.device) -> str | None:
    """Return the reason why the Triton kernels cannot run on ``device``, ``None`` if they can."""
    try:
        import triton  # noqa: F401
    except ImportError as error:
        return f"Triton is not installed ({error})"
    if device.type == "cuda" or (device.type == "cpu" and is_interpreted()):
        return None
    return f"Triton needs a GPU, not {device.type}"


@cache
def is_chained(device: torch.device) -> bool:
    """Return whether a launch may begin before the one before it has ended, and wait for it itself.

    Source: CUDA C++ Programming Guide, "Programmatic Dependent Launch": compute capability 9.0 and later.
    """
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


@cache
def num_programs(device: torch.device) -> int:
    """Return the programs that fill the device when each walks its work with a stride."""
    if device.type != "cuda":
        return MIN_TRITON_PROGRAMS
    return PROGRAMS_PER_PROCESSOR * int(torch.cuda.get_device_properties(device).multi_processor_count)


def power_of_two(value: int) -> int:
    """Return the smallest power of two that is at least ``value`` and at least 1."""
    return 1 << max(0, value - 1).bit_length()
