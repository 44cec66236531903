"""Fewer launches for a step: all fusions of a model, in order."""

from __future__ import annotations

import logging

from torch import nn

from manylora.execution.fusion.gate import fuse_gates
from manylora.execution.fusion.norm import fuse_norms
from manylora.execution.fusion.replace import watch_calls
from manylora.execution.fusion.residual import fuse_residuals
from manylora.execution.fusion.rotation import defer_rotations

__all__ = ["fuse_launches"]

logger = logging.getLogger(__name__)


def fuse_launches(model: nn.Module) -> None:
    """Change ``model`` in place to take fewer launches, on Triton and with attention that rotates.

    A module whose results differ from the replacement's keeps its own forward.
    """
    norms = fuse_norms(model)
    calls = watch_calls(model)
    rotations, gates, residuals = defer_rotations(calls), fuse_gates(calls), fuse_residuals(calls)
    logger.info("launches_fused norms=%d rotations=%d gates=%d residuals=%d", norms, rotations, gates, residuals)
