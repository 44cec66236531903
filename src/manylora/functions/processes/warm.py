"""The state that forks begin with: all modules imported, kernels compiled, and no page of a file in memory.

Most of a library is read once, while it is imported.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import re
import sys
import threading
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from manylora.core.clock import WallClock
from manylora.core.config import EngineConfig, MemoryConfig
from manylora.functions.processes.function_process import StartStages, live_builder
from manylora.functions.processes.messages import ZygoteSetup
from manylora.serving.hosting.engine.service import load_builder
from manylora.serving.hosting.engine.startup import limit_openmp_spin

__all__ = ["clean_mappings", "let_file_pages_go", "warm"]

NUM_PAGES = 16
"""Pages of the engine that is built to warm the zygote."""

UNUSED = ("scipy", "accelerate", "PIL", "triton")
"""Packages that torch and transformers import where they are, and no function uses: tens of MiB."""

CACHED_PRIMITIVES = 16
"""Compiled products that a function keeps. Each new length of a prompt adds some, and each has hundreds of KiB."""

_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) ...p [0-9a-f]+ \S+ [1-9]\d* +/")
"""The line of a private mapping of a file."""


def warm(setup: ZygoteSetup) -> None:
    """Import and compile all that functions need, without an OpenMP region of more than one thread."""
    if setup.builder is not None:
        load_builder(setup.builder)
    else:
        _build_an_engine(setup)
    gc.collect()
    gc.freeze()  # a collection in a child would write to every object, and so copy it
    let_file_pages_go()


def _build_an_engine(setup: ZygoteSetup) -> None:
    """Build and check one engine, for all: its modules are imported and its kernels compiled."""
    limit_openmp_spin()
    for name in UNUSED:
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]  # as if it were not installed
    import torch

    torch.set_num_threads(1)
    from manylora.execution.build import build_parts
    from manylora.execution.kernels.linear import bound_caches
    from manylora.execution.model.base_weights import map_weights
    from manylora.execution.storage.adapter_files import InlineReader

    bound_caches(CACHED_PRIMITIVES)
    backbone = setup.backbone
    live_builder(StartStages(0.0), 1)
    shared = replace(backbone.base, file=os.dup(backbone.base.file))
    config = EngineConfig(model=replace(backbone.model, max_model_len=None), memory=MemoryConfig(num_pages=NUM_PAGES))
    build_parts(config, WallClock(), weights=map_weights(shared), readers=[InlineReader()]).close()
    if threading.active_count() != 1:
        raise RuntimeError("the zygote has threads, whose locks its forks would inherit")


def let_file_pages_go() -> None:
    """Take the clean pages of private file mappings out of this process.

    The kernel keeps them in its cache, as any file's, and gives those back that are touched again. A fork inherits none
    of them either way.
    """
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    with Path("/proc/self/smaps").open() as lines:  # line by line: what is freed after a start is copied by every fork
        found = list(clean_mappings(lines))
    for begin, end in found:
        advise(begin, end - begin, mmap.MADV_DONTNEED)  # a refusal costs memory alone


def clean_mappings(smaps: Iterable[str]) -> Iterator[tuple[int, int]]:
    """Yield the addresses of private mappings of files of which no page was written: the others would lose that."""
    place: tuple[int, int] | None = None
    for line in smaps:
        if line[0] in "0123456789abcdef":
            found = _MAPPING.match(line)
            place = (int(found[1], 16), int(found[2], 16)) if found else None
        elif line.startswith("Anonymous:") and place is not None:
            if line.split()[1] == "0":
                yield place
            place = None
