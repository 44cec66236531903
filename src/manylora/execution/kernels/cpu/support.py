"""Where the compiled CPU kernels can run: with numba and torch's own OpenMP threads.

Every kernel has a torch path with the same results. If the kernels cannot run, the reason is logged once, here.
"""

from __future__ import annotations

import logging
from functools import cache, partial
from typing import TYPE_CHECKING

from manylora.execution.kernels.cpu.runtime import runtime_library

if TYPE_CHECKING:
    from manylora.execution.kernels.cpu.openmp import Team

__all__ = ["CompiledKernels", "find_compiled"]

logger = logging.getLogger(__name__)


class CompiledKernels:
    """Kernels for steps in float32 on the CPU, on the threads of ``team``."""

    def __init__(self, team: Team) -> None:
        from manylora.execution.kernels.cpu import attention, lora, products, tables

        self.attend = partial(attention.attend_compiled, team)
        self.prepare = tables.adapter_tables
        self.tables = lora.make_tables
        self.lora = partial(lora.apply_compiled, team)
        self.product_tables = products.make_product_tables
        self.products = partial(products.apply_products, team)
        # Compile (or read numba's cache) now, not in the first step.
        attention.attention_kernel()
        lora.lora_kernel()
        products.product_kernel()


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
