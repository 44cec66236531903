"""A step with assisted rows, whose adapters' pages fill meanwhile: the device takes over, group by group.

::

    copy              | layer 0 | layer 1 | layer 2 | ...
    workers           layer 0   layer 1
    kernels here                          layer 2   layer 3   ...     also layer 1, had it been there in time

For each group the step asks how far the pages are. An adapter whose weights of the group have arrived is a segment of
the kernels here; the workers compute the others. ``costs.arriving`` decides, as in simulation. The decision is made
when the group is launched, and no thread waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from manylora.core.costs.arriving import left_to_workers
from manylora.execution.lora.batch import LoraBatch, LoraSegment
from manylora.execution.lora.parts import AssistedReply, GroupParts
from manylora.execution.storage.arrival import ArrivingAdapter
from manylora.execution.storage.device_load import DeviceLoad

if TYPE_CHECKING:
    from manylora.execution.assist.exchange import AssistedStep

__all__ = ["TakeOver"]


@dataclass(eq=False)
class TakeOver:
    """A step's ``StepLora`` and ``Assist``; for one step."""

    _warm: tuple[LoraSegment, ...]  # the segments of the kernels here
    _assist: AssistedStep  # the exchanges of the assisted segments
    _coming: Sequence[DeviceLoad | None]  # the load of each assisted segment's adapter, ``None`` where no load is known
    # Makes a batch of segments, in order of rows; ``None`` for none.
    _make_batch: Callable[[tuple[LoraSegment, ...]], LoraBatch | None]
    _begun: dict[int, ArrivingAdapter] = field(default_factory=dict)  # by number of the segment
    _batches: dict[tuple[int, ...], LoraBatch | None] = field(default_factory=dict)  # by the segments taken over
    _taken: dict[str, tuple[int, ...]] = field(default_factory=dict)  # by group
    _num_asked: int = 0
    _num_taken: int = 0

    @property
    def cpu_share(self) -> float:
        """Share of the assisted adapters' groups that the workers computed."""
        return 1.0 - self._num_taken / self._num_asked if self._num_asked else 1.0

    def parts(self, group: str, *, is_sampled: bool = False) -> GroupParts | None:
        """Return the parts of the kernels here; see ``lora.batch.StepLora``."""
        taken = self._decide(group)
        if taken not in self._batches:
            self._batches[taken] = self._make_batch(self._segments(taken))
        batch = self._batches[taken]
        parts = batch.parts(group, is_sampled=is_sampled) if batch is not None else None
        if parts is None or not taken:
            return parts

        def wait() -> None:
            for number in taken:
                self._begun[number].wait(group)

        return replace(parts, wait=wait)

    def send(self, group: str, x: torch.Tensor, *, is_sampled: bool = False) -> AssistedReply | None:
        """Send the inputs of the rows that are left to the workers; see ``lora.parts.Assist``."""
        return self._assist.send(group, x, is_sampled=is_sampled, without=self._decide(group))

    def _decide(self, group: str) -> tuple[int, ...]:
        """Return the numbers of the assisted segments that the device computes in a group; decided once."""
        if group not in self._taken:
            numbers = [n for n, segment in enumerate(self._assist.segments) if group in segment.adapter.groups]
            arriving = [number for number in numbers if self._has_begun(number)]
            lag_s = self._assist.lag_s() if arriving else 0.0
            left = left_to_workers(arriving, lambda number: self._begun[number].arrives_in_s(group), lag_s)
            self._taken[group] = tuple([number for number in arriving if number not in left])
            self._num_asked += len(numbers)
            self._num_taken += len(arriving) - len(left)
        return self._taken[group]

    def _has_begun(self, number: int) -> bool:
        if number not in self._begun:
            coming = self._coming[number]
            if coming is None or (adapter := coming.if_begun()) is None:
                return False
            self._begun[number] = adapter
        return True

    def _segments(self, taken: tuple[int, ...]) -> tuple[LoraSegment, ...]:
        if not taken:
            return self._warm
        moved = [self._assist.segments[number]._replace(adapter=self._begun[number].weights) for number in taken]
        return tuple(sorted([*self._warm, *moved], key=lambda segment: segment.start))
