"""The input of a LoRA kernel: which rows of a step use which weights of one group.

Rows whose adapter is not on the device may be *assisted*: their inputs go out, and their LoRA comes back.
``execution/assist`` implements this on CPU workers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from manylora.execution.storage.resident import AdapterRows, ResidentExpert, ResidentGroup

if TYPE_CHECKING:
    from manylora.execution.lora.tables import StepTables
    from manylora.execution.storage.tile_tables import GroupSpan

__all__ = ["Assist", "AssistedReply", "GroupParts", "Part", "StepRows"]


class Part(NamedTuple):
    """Rows ``[start, stop)`` use ``weights``."""

    start: int
    stop: int
    weights: ResidentGroup


@dataclass(frozen=True, slots=True, eq=False)
class StepRows:
    """The rows of a step with adapters: all groups of one batch share them."""

    rows: tuple[AdapterRows, ...]  # in order
    groups: tuple[str, ...]  # the groups that any of the adapters changes
    experts: tuple[int, ...] = ()  # the expert of each of the rows, in the one group of the experts' linears
    # A kernel's data for all groups, by the kernel's key; lives as long as the batch.
    prepared: dict[str, object] = field(default_factory=dict)

    @classmethod
    def of(cls, parts: Sequence[Part]) -> StepRows:
        """Return the rows of one group's parts."""
        rows = tuple([(part.start, part.stop, part.weights.memory) for part in parts])
        experts = tuple([part.weights.expert for part in parts if isinstance(part.weights, ResidentExpert)])
        return cls(rows, (parts[0].weights.layout.group,), experts)


@dataclass(frozen=True, slots=True, eq=False)
class GroupParts:
    """A group's parts over a step."""

    parts: tuple[Part, ...]  # in order of rows
    step: StepRows | None = None  # the same rows for all groups; ``None`` if the group is by itself
    # Returns the step's tables, for table-driven kernels; the first call makes them.
    tables: Callable[[], StepTables] | None = None
    span: GroupSpan | None = None  # the group in those tables
    # Whether any adapter of the step has a factor or a shift here, so that the group needs an epilogue.
    has_vectors: bool = False
    # Waits for weights that are on their way; to be called before a kernel reads them.
    wait: Callable[[], None] | None = None


class AssistedReply(Protocol):
    """The LoRA of one group's assisted rows, on its way."""

    parts: Sequence[Part]  # these rows and their weights, on the host
    has_vectors: bool  # whether any of the weights has a factor or a shift

    def add_to(self, out: torch.Tensor, scale: torch.Tensor | float | None = None) -> None:
        """Add the LoRA, times ``scale``, to its rows in ``out`` ``[rows, out]``, behind the device's queued work."""


class Assist(Protocol):
    """A step's assisted rows."""

    def send(self, group: str, x: torch.Tensor, *, is_sampled: bool = False) -> AssistedReply | None:
        """Send their inputs for a group; return the reply, or ``None`` if none of their adapters changes the group.

        The reply is to be added before the next inputs are sent. ``x`` ``[..., in]`` are the inputs of all rows of the
        step (with ``is_sampled``, of the sampled rows), or the token ids if the group is an embedding.
        """
