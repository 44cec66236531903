"""The input of a LoRA kernel: which rows of a step use which weights of one group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from manylora.execution.storage.resident import AdapterRows, ResidentGroup

if TYPE_CHECKING:
    from manylora.execution.lora.tables import StepTables
    from manylora.execution.storage.tile_tables import GroupSpan

__all__ = ["GroupParts", "Part", "StepRows"]


class Part(NamedTuple):
    """Rows ``[start, stop)`` use ``weights``."""

    start: int
    stop: int
    weights: ResidentGroup


@dataclass(frozen=True, slots=True, eq=False)
class StepRows:
    """The rows of a step with adapters: all groups of one batch share them.

    Args:
        rows: In order.
        groups: The groups that any of the adapters changes.
        prepared: A kernel's data for all groups, by the kernel's key; lives as long as the batch.
    """

    rows: tuple[AdapterRows, ...]
    groups: tuple[str, ...]
    prepared: dict[str, object] = field(default_factory=dict)

    @classmethod
    def of(cls, parts: Sequence[Part]) -> StepRows:
        """Return the rows of one group's parts."""
        rows = tuple([(part.start, part.stop, part.weights.memory) for part in parts])
        return cls(rows, (parts[0].weights.layout.group,))


@dataclass(frozen=True, slots=True, eq=False)
class GroupParts:
    """A group's parts over a step.

    Args:
        parts: In order of rows.
        step: The same rows for all groups; ``None`` if the group is by itself.
        tables: Returns the step's tables, for table-driven kernels; the first call makes them.
        span: The group in those tables.
        is_scaled: Whether any adapter of the step has a column scale here, so that the group needs an epilogue.
        wait: Waits for weights that are on their way; to be called before a kernel reads them.
    """

    parts: tuple[Part, ...]
    step: StepRows | None = None
    tables: Callable[[], StepTables] | None = None
    span: GroupSpan | None = None
    is_scaled: bool = False
    wait: Callable[[], None] | None = None
