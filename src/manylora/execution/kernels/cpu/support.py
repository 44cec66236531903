"""Where the compiled CPU kernels can run: with numba and torch's own OpenMP threads.

Every kernel has a torch path with the same results. If the kernels cannot run, the reason is logged once, here.
"""

from __future__ import annotations

import logging
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from manylora.execution.kernels.cpu.lora import LoraTables
    from manylora.execution.kernels.cpu.openmp import Team
    from manylora.execution.kernels.cpu.products import ProductTables
    from manylora.execution.storage.resident import ResidentGroup

__all__ = ["CompiledKernels", "find_compiled"]

logger = logging.getLogger(__name__)


class CompiledKernels:
    """Kernels for steps in float32 on the CPU, on the threads of ``team``."""

    def __init__(self, team: Team) -> None:
        from manylora.execution.kernels.cpu import attention, lora, products

        self._team = team
        self._attention, self._lora, self._products = attention, lora, products
        # Compile (or read numba's cache) now, not in the first step.
        attention.attention_kernel()
        lora.lora_kernel()
        products.product_kernel()

    def tables(self, parts: list[tuple[int, int, ResidentGroup]]) -> LoraTables:
        """Return the tables of ``parts`` for ``lora``."""
        return self._lora.make_tables(parts)

    def lora(self, x: torch.Tensor, out: torch.Tensor, pages: torch.Tensor, tables: LoraTables) -> None:
        """Add LoRA into ``out``; see ``lora.apply_compiled``."""
        self._lora.apply_compiled(self._team, x, out, pages, tables)

    def product_tables(self, parts: list[tuple[int, int, ResidentGroup]]) -> ProductTables:
        """Return the tables of ``parts`` for ``products``."""
        return self._products.make_product_tables(parts)

    def products(self, x: torch.Tensor, out: torch.Tensor, pages: torch.Tensor, tables: ProductTables) -> None:
        """Add LoRA into ``out``; see ``products.apply_products``."""
        self._products.apply_products(self._team, x, out, pages, tables)

    def attend(
        self,
        query: torch.Tensor,
        blocks: torch.Tensor,
        layer: int,
        tables: np.ndarray,
        bounds: np.ndarray,
        *,
        scaling: float,
        softcap: float | None,
    ) -> torch.Tensor:
        """Attend one token per sequence; see ``attention.attend_compiled``."""
        return self._attention.attend_compiled(
            self._team, query, blocks, layer, tables, bounds, scaling=scaling, softcap=softcap
        )


@cache
def find_compiled() -> CompiledKernels | None:
    """Return the kernels, or ``None`` where they cannot run."""
    root = Path(torch.__file__).parent
    libraries = [*root.glob("lib/libgomp*"), *root.parent.glob("torch.libs/libgomp*")]
    reason: object = "torch does not include GNU OpenMP"
    if len(libraries) == 1:
        try:
            from manylora.execution.kernels.cpu.openmp import open_team

            if (team := open_team(libraries[0])) is not None:
                return CompiledKernels(team)
            reason = "another OpenMP runtime is loaded"
        except (ImportError, OSError, RuntimeError, AttributeError) as error:
            reason = error
    logger.info("compiled_kernels available=no reason=%s", reason)
    return None
