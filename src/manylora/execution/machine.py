"""Name the machine that a model runs on; a measurement without its machine says nothing."""

from __future__ import annotations

import platform
from pathlib import Path

import torch

__all__ = ["describe_machine"]


def describe_machine(device: torch.device) -> str:
    """Return processor or GPU, threads, and the version of torch."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}"
    return f"{_processor()}, {torch.get_num_threads()} threads, torch {torch.__version__}"


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
