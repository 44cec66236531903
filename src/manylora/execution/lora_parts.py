"""What a LoRA kernel is given: which rows of a step take which weights of one group."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from manylora.execution.resident import GroupWeights

if TYPE_CHECKING:
    from manylora.execution.lora_ragged import BatchTables
    from manylora.execution.lora_tables import GroupSpan

__all__ = ["GroupParts", "Part"]


@dataclass(frozen=True, slots=True)
class Part:
    """Rows ``[start, stop)`` take ``weights``."""

    start: int
    stop: int
    weights: GroupWeights


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
    tables: BatchTables | None = None
    span: GroupSpan | None = None
