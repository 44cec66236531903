"""The door to the compiled CPU kernels: open where numba and torch's OpenMP threads are at hand.

Everything behind it has a torch path beside it with the same results; this is the only place that knows why
the quick one is missing, and says so once in the log.
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
    """Kernels for steps in float32 on the CPU.

    Args:
        team: The threads they run on.
    """

    def __init__(self, team: Team) -> None:
        from manylora.execution.kernels.cpu import attention as compiled_attention
        from manylora.execution.kernels.cpu import lora as compiled_lora
        from manylora.execution.kernels.cpu import products as compiled_products

        self._team = team
        self._attention = compiled_attention
        self._lora = compiled_lora
        self._products = compiled_products
        # Compile (or fetch from numba's cache) now, not inside somebody's first step.
        compiled_attention.attention_kernel()
        compiled_lora.lora_kernel()
        compiled_products.product_kernel()

    def tables(self, parts: list[tuple[int, int, ResidentGroup]]) -> LoraTables:
        """Write down the pieces of ``parts`` for ``lora``."""
        return self._lora.make_tables(parts)

    def lora(self, x: torch.Tensor, out: torch.Tensor, tables: LoraTables) -> None:
        """Add LoRA into ``out``; see ``compiled_lora.apply_compiled``."""
        self._lora.apply_compiled(self._team, x, out, tables)

    def product_tables(self, parts: list[tuple[int, int, ResidentGroup]]) -> ProductTables:
        """Write down the pieces of ``parts`` for ``products``."""
        return self._products.make_product_tables(parts)

    def products(self, x: torch.Tensor, out: torch.Tensor, tables: ProductTables) -> None:
        """Add LoRA into ``out``; see ``compiled_products.apply_products``."""
        self._products.apply_products(self._team, x, out, tables)

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
        """Attend one token per sequence; see ``compiled_attention.attend_compiled``."""
        return self._attention.attend_compiled(
            self._team, query, blocks, layer, tables, bounds, scaling=scaling, softcap=softcap
        )


@cache
def find_compiled() -> CompiledKernels | None:
    """Return the kernels, or ``None`` where they cannot run."""
    root = Path(torch.__file__).parent
    libraries = [*root.glob("lib/libgomp*"), *root.parent.glob("torch.libs/libgomp*")]
    if len(libraries) != 1:
        logger.info("compiled_kernels available=no reason=%s", "torch does not bring GNU OpenMP")
        return None
    try:
        from manylora.execution.kernels.cpu.openmp import open_team

        team = open_team(libraries[0])
        kernels = CompiledKernels(team) if team is not None else None
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        logger.info("compiled_kernels available=no reason=%s", error)
        return None
    if kernels is None:
        logger.info("compiled_kernels available=no reason=%s", "another OpenMP runtime is loaded")
    return kernels
