"""What a LoRA kernel is given: which rows of a step take which weights of one group."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from manylora.execution.storage.resident import GroupWeights

if TYPE_CHECKING:
    from manylora.execution.lora.tables import StepTables
    from manylora.execution.storage.tile_tables import GroupSpan

__all__ = ["FamilyTables", "GroupParts", "Part"]


@dataclass(frozen=True, slots=True)
class Part:
    """Rows ``[start, stop)`` take ``weights``."""

    start: int
    stop: int
    weights: GroupWeights


class FamilyTables(Protocol):
    """The step's tables, by the family of kernels that goes by them."""

    @property
    def ragged(self) -> StepTables:
        """Rows of one adapter together, true ranks."""
        ...

    @property
    def padded(self) -> StepTables:
        """Every row by itself, at the largest rank."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class GroupParts:
    """A group's parts over a step.

    Args:
        parts: In order of rows.
        prepared: What kernels keep with them, by the kernel's own key; as long-lived as the parts.
        tables: The step's tables, for the kernels that go by them; ``None`` where none does.
        span: The group in those tables.
    """

    parts: tuple[Part, ...]
    prepared: dict[str, object] = field(default_factory=dict)
    tables: FamilyTables | None = None
    span: GroupSpan | None = None
