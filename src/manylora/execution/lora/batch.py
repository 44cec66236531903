"""The adapters of a step: which rows belong to which adapter, and the kernels that use it.

The executor orders the rows of a step by adapter. So an adapter's rows are one *segment*, and its weights are read once
per step however many sequences share it. A step without adapters has no ``LoraBatch``: the base alone pays one
comparison per module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import NamedTuple, Protocol

import torch

from manylora.execution.lora.kernels import LoraKernel
from manylora.execution.lora.parts import Assist, GroupParts, Part, StepRows
from manylora.execution.lora.tables import BatchTables, LoraSpace, TableRows
from manylora.execution.storage.arrival import ArrivingAdapter
from manylora.execution.storage.resident import ResidentAdapter, ResidentGroup

__all__ = ["ArrivingBatch", "LoraBatch", "LoraSegment", "StepContext", "StepLora"]


class LoraSegment(NamedTuple):
    """Rows ``[start, stop)`` of the step, of which ``[sampled_start, sampled_stop)`` among the sampled rows."""

    adapter: ResidentAdapter
    start: int
    stop: int
    sampled_start: int
    sampled_stop: int

    def rows(self, is_sampled: bool) -> tuple[int, int]:
        """Return its first row and one past its last, of the step or among the sampled rows."""
        return (self.sampled_start, self.sampled_stop) if is_sampled else (self.start, self.stop)


@dataclass(eq=False)
class LoraBatch:
    """A step's segments, and the kernels' input for each group.

    Decoding sequences make the same segments step after step, so the batch, with the data that kernels prepared for it,
    is kept while they do.
    """

    segments: tuple[LoraSegment, ...]  # segments with an adapter, in order of rows
    _space: LoraSpace | None = None  # makes tables, for table-driven kernels; every adapter then has a table
    _tables: dict[bool, BatchTables] = field(default_factory=dict)
    _parts: dict[tuple[str, bool], GroupParts | None] = field(default_factory=dict)
    # First row, one past the last, and the groups of each segment that has any row; by ``is_sampled``, as are tables.
    _rows: dict[bool, list[tuple[int, int, dict[str, ResidentGroup]]]] = field(default_factory=dict)
    _step: StepRows | None = None
    _groups: frozenset[str] = frozenset()  # of ``_step``

    def parts(self, group: str, *, is_sampled: bool = False) -> GroupParts | None:
        """Return the parts of ``group``, ``None`` if no adapter of the step has it.

        ``is_sampled`` counts in sampled rows, the input of the output head, instead of all rows.
        """
        if (group, is_sampled) not in self._parts:
            self._parts[group, is_sampled] = self._find(group, is_sampled)
        return self._parts[group, is_sampled]

    def _find(self, group: str, is_sampled: bool) -> GroupParts | None:
        span = self._space.directory.groups.get(group) if self._space is not None else None
        if span is None:
            self._step_rows()
            if group not in self._groups:
                return None  # as most: norms and embeddings are groups too
        # With tables the parts are not needed, except for a batch of one adapter, which may be one product.
        parts = self._parts_of(group, is_sampled) if span is None or len(self.segments) == 1 else []
        if span is None or self._space is None:
            if not parts:
                return None
            step = StepRows.of(parts) if is_sampled else self._step_rows()
            return GroupParts(tuple(parts), step, has_vectors=any(part.weights.has_vectors for part in parts))
        if is_sampled not in self._tables:
            self._tables[is_sampled] = BatchTables(self._space, self._table_rows(is_sampled))
        tables = self._tables[is_sampled]
        if not tables.has_group(span):
            return None
        return GroupParts(tuple(parts), tables=lambda: tables.step, span=span, has_vectors=tables.has_vectors(span))

    def _parts_of(self, group: str, is_sampled: bool) -> list[Part]:
        if is_sampled not in self._rows:
            rows = [(*segment.rows(is_sampled), segment.adapter.groups) for segment in self.segments]
            self._rows[is_sampled] = [one for one in rows if one[1] > one[0]]
        rows = self._rows[is_sampled]
        return [Part(start, stop, groups[group]) for start, stop, groups in rows if group in groups]

    def _step_rows(self) -> StepRows:
        if self._step is None:
            rows = tuple([(segment.start, segment.stop, segment.adapter.memory) for segment in self.segments])
            layouts = {id(one[2].layout): one[2].layout.groups for one in rows}  # adapters of one layout share it
            groups = dict.fromkeys(chain.from_iterable(layouts.values()))
            self._step, self._groups = StepRows(rows, tuple(groups)), frozenset(groups)
        return self._step

    def _table_rows(self, is_sampled: bool) -> list[TableRows]:
        rows: list[TableRows] = []
        for segment in self.segments:
            start, stop = segment.rows(is_sampled)
            if stop > start:
                assert segment.adapter.table is not None, "the adapter was made resident without a table"
                rows.append((start, stop, segment.adapter.table))
        return rows


class ArrivingBatch:
    """A batch with adapters on their way to the device: each group waits for its weights, behind the base product.

    One step's; the batch inside may be kept for the steps after it, which need not wait. It may wait for adapters of
    its own: those that a ``TakeOver`` reads from their pages.
    """

    def __init__(self, batch: StepLora, arriving: Sequence[ArrivingAdapter]) -> None:
        self._batch = batch
        self._arriving = arriving

    def parts(self, group: str, *, is_sampled: bool = False) -> GroupParts | None:
        """Return the parts of ``group``, ``None`` if no adapter of the step has it."""
        parts = self._batch.parts(group, is_sampled=is_sampled)
        return None if parts is None else replace(parts, wait=partial(self._wait, group, parts.wait))

    def _wait(self, group: str, before: Callable[[], None] | None) -> None:
        if before is not None:
            before()
        for adapter in self._arriving:
            adapter.wait(group)


class StepLora(Protocol):
    """A step's adapters, as modules use them: a ``LoraBatch``, a batch that waits for layers, or a graph's tables."""

    def parts(self, group: str, *, is_sampled: bool = False) -> GroupParts | None:
        """Return the parts of ``group``, ``None`` if no adapter of the step has it."""


@dataclass(slots=True)
class StepContext:
    """The running step as adapted modules see it; set before the model is called, cleared after."""

    kernel: LoraKernel  # the LoRA kernel, of every step
    space: LoraSpace | None = None  # makes its tables, if it is table-driven
    lora: StepLora | None = None  # the adapters that the kernel reads
    token_ids: torch.Tensor | None = None  # of all rows ``[rows]``, for adapters of the embedding
    assist: Assist | None = None  # the adapters that workers on the CPU read instead of the kernel
