"""Where the compiled CPU kernels can run: with numba and torch's own OpenMP threads.

Every kernel has a torch path with the same results. If the kernels cannot run, the reason is logged once, here.

Torch brings GNU's OpenMP runtime along, whose threads wait for the next parallel region by spinning. A process has a
pool of threads for every thread that has run a parallel region. Once all pools together have more threads than there
are processors, libgomp hardly spins any more, and each region of a step waits for its threads to be woken.
"""

from __future__ import annotations

import ctypes
import logging
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from manylora.execution.kernels.cpu.openmp import Team
    from manylora.execution.kernels.cpu.products import GroupTables

__all__ = ["CompiledKernels", "find_compiled", "release_threads", "runtime_library"]

logger = logging.getLogger(__name__)

_SOFT = 1  # omp_pause_soft: what threads keep for themselves may stay


class CompiledKernels:
    """Kernels for steps in float32 on the CPU, on the threads of ``team``."""

    def __init__(self, team: Team) -> None:
        from manylora.execution.kernels.cpu import attention, coded, decoded, integer_dots, lora, products, tables

        self.attend = partial(attention.attend_compiled, team)
        self.prepare = tables.prepare_tables  # else the first step of an adapter makes its tables
        self.lora_tables = products.make_group_tables
        self.coded = partial(coded.multiply_coded, team)
        self.decoded = partial(decoded.multiply_decoded, team)
        self.has_integer_dots = integer_dots.HAS_INTEGER_DOTS
        self._team = team
        self._vectors = lora.vector_kernel, lora.vector_arguments
        # Compile (or read numba's cache) now, not in the first step.
        attention.attention_kernel()
        tables.lines_kernel()
        lora.lora_kernel()
        lora.vector_kernel()
        products.product_kernel()

    def compile_narrow(self, *, is_rounded: bool) -> None:
        """Compile the kernel of narrow weights: a confined process can read no cache of kernels later."""
        from manylora.execution.kernels.cpu.coded import coded_loop
        from manylora.execution.kernels.cpu.decoded import decoded_loop
        from manylora.execution.kernels.cpu.openmp import compile_kernel

        compile_kernel(coded_loop if is_rounded else decoded_loop)

    def add_lora(self, x: torch.Tensor, out: torch.Tensor, tables: GroupTables) -> None:
        """Add a group's LoRA of ``x`` ``[rows, in]`` into ``out`` ``[rows, out]``, both float32 and contiguous."""
        for kernel, arguments in tables.calls(x, out, torch.get_num_threads()):
            self._team.run(kernel, *arguments)

    def apply_vectors(self, out: torch.Tensor, tables: GroupTables) -> None:
        """Multiply rows of ``out`` ``[rows, out]`` by their factors and add their shifts; float32 and contiguous."""
        if tables.vectors is not None:
            kernel, arguments = self._vectors
            self._team.run(kernel(), *arguments(out, tables.vectors))


@cache
def find_compiled() -> CompiledKernels | None:
    """Return the kernels, or ``None`` where they cannot run."""
    reason: object = "torch does not include GNU OpenMP"
    if (library := runtime_library()) is not None:
        try:
            from manylora.execution.kernels.cpu.openmp import open_team

            if (team := open_team(library)) is not None:
                return CompiledKernels(team)
            reason = "another OpenMP runtime is loaded"
        except (ImportError, OSError, RuntimeError, AttributeError) as error:
            reason = error
    logger.info("compiled_kernels available=no reason=%s", reason)
    return None


def runtime_library() -> Path | None:
    """Return torch's own GNU OpenMP, ``None`` if it brings none or several."""
    root = Path(torch.__file__).parent
    libraries = [*root.glob("lib/libgomp*"), *root.parent.glob("torch.libs/libgomp*")]
    return libraries[0] if len(libraries) == 1 else None


def release_threads() -> None:
    """End the OpenMP threads of the calling thread, outside a parallel region; its next region starts new ones.

    The thread that loads and checks a model is not the one that runs steps. Without the pools of both, offline tokens
    per second are 1.07 to 1.09 times as many on two processors (``bench/results/openmp_threads.md``).
    """
    library = runtime_library()
    if library is None:
        return
    pause = getattr(ctypes.CDLL(str(library)), "omp_pause_resource_all", None)  # since GCC 9
    if pause is not None:
        pause(_SOFT)
