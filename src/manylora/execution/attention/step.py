"""The implementations of attention for a step: torch (with a compiled kernel for CPU decoding) or Triton."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from manylora.core.errors import ConfigError
from manylora.core.plan import PlannedSequence
from manylora.execution.attention.page_tables import PageTables
from manylora.execution.attention.paged import AttentionSink, PagedBatch
from manylora.execution.attention.triton import TritonBatch
from manylora.execution.device import DeviceOps
from manylora.execution.kernels.triton.support import find_triton
from manylora.execution.storage.page_tensor import PageTensor

__all__ = ["AttentionKernel", "StepAttention", "TorchAttentionKernel", "TritonAttentionKernel", "choose_attention"]


class StepAttention(AttentionSink, Protocol):
    """A step's attention, for every layer."""

    @property
    def positions(self) -> torch.Tensor:
        """Position of each row in its sequence ``[rows]``, int64."""
        ...


class AttentionKernel(Protocol):
    """Prepares a step's attention."""

    def prepare(self, sequences: Sequence[PlannedSequence]) -> StepAttention:
        """Return the attention of a step whose rows are those of ``sequences``, in their order."""
        ...

    def release(self, seq_ids: Sequence[int]) -> None:
        """Drop the state of sequences that have left the engine."""
        ...


class TorchAttentionKernel:
    """Torch and, for decoding on the CPU, the compiled kernel; keeps nothing between steps."""

    def __init__(self, pages: PageTensor) -> None:
        self._pages = pages

    def prepare(self, sequences: Sequence[PlannedSequence]) -> PagedBatch:
        """Return the step's attention."""
        return PagedBatch(self._pages, sequences)

    def release(self, seq_ids: Sequence[int]) -> None:
        """Do nothing."""


class TritonAttentionKernel:
    """The Triton kernels, with block tables kept on the device.

    A step has at most ``max_num_seqs`` sequences, each of at most ``max_model_len`` tokens.
    """

    def __init__(self, ops: DeviceOps, pages: PageTensor, *, max_num_seqs: int, max_model_len: int) -> None:
        self._ops = ops
        self._pages = pages
        width = -(-max_model_len // pages.shape.block_size)
        # Two more for the check at start; the others for sequences that are pre-empted meanwhile.
        self.tables = PageTables(ops, num_lines=max_num_seqs + max(2, max_num_seqs // 4), width=width)

    def prepare(self, sequences: Sequence[PlannedSequence]) -> TritonBatch:
        """Return the step's attention."""
        return TritonBatch(self._ops, self._pages, self.tables, sequences)

    def release(self, seq_ids: Sequence[int]) -> None:
        """Free the table lines of sequences that have left the engine."""
        self.tables.release(seq_ids)


def choose_attention(name: str, device: torch.device) -> str:
    """Return the implementation, ``torch`` or ``triton``, of ``name`` on ``device``; refuse one that cannot run."""
    reason = find_triton(device)
    if name == "auto":
        return "triton" if device.type == "cuda" and reason is None else "torch"
    if name == "triton" and reason is not None:
        raise ConfigError(f"Got attention_kernel = {name!r}, which cannot run here: {reason}")
    return name
