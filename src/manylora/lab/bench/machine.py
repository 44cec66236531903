"""The machine of a result: kind of processor, cores and versions, but no host name."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path

__all__ = ["machine"]


def machine() -> dict[str, str | int]:
    """Return the processor, its cores, and the versions that matter to speed."""
    versions: dict[str, str | int] = {"python": platform.python_version()}
    for package in ("torch", "numba", "uvicorn", "uvloop", "httptools"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return {"cpu": _cpu_name(), "cores": os.cpu_count() or 1, **versions}


def _cpu_name() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
