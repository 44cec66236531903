"""Messages between the gate beside vLLM's scheduler and the slots in each worker, and the loads that wait for them.

::

    scheduler: RequestGate -- SlotOrders, with a step's metadata -> worker: SlotManager reads, copies, drops
                           <- Report, with a step's outputs ------- (one for each tensor-parallel rank)
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from manylora.core.plan import AdapterLoad, LoadResult, StepPlan
from manylora.core.ports import Executor, Work
from manylora.core.types import AdapterKey, Tier
from manylora.vllm.versions import AdapterRef

__all__ = ["Order", "Outbox", "Report", "SlotOrders"]


class Order(NamedTuple):
    """Work for every worker: a load to a tier, or the drop of the copy there. ``slot`` is the target of a copy."""

    number: int
    work: Literal["load", "drop"]
    tier: Tier
    adapter: AdapterRef
    slot: int = -1


@dataclass(slots=True)
class SlotOrders:
    """What one step brings to the workers.

    ``failed`` are requests whose adapter cannot be read, which end. A step that ``is_empty`` runs no request.
    """

    orders: tuple[Order, ...] = ()
    failed: tuple[str, ...] = ()
    is_empty: bool = False


@dataclass(slots=True)
class Report:
    """What one step brings back: of the orders done, by number, each worker's error; and the loads waited for."""

    done: dict[int, tuple[str | None, ...]] = field(default_factory=dict)
    num_blocking: int = 0

    def aggregate(self, other: Report) -> Report:
        """Add the report of other workers."""
        for number, errors in other.done.items():
            self.done[number] = self.done.get(number, ()) + errors
        self.num_blocking = max(self.num_blocking, other.num_blocking)
        return self


@dataclass(slots=True)
class _OrderedLoad:
    num_workers: int
    errors: tuple[str | None, ...] = ()
    ready_at: float = math.inf

    def poll(self, now: float) -> LoadResult | None:
        is_done = len(self.errors) == self.num_workers
        return LoadResult(error=next(filter(None, self.errors), None)) if is_done else None


class Outbox(Executor):
    """Turns loads of the core into orders for ``num_workers`` workers: an executor whose steps are vLLM's own."""

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._orders: list[Order] = []
        self._loads: dict[int, _OrderedLoad] = {}  # by order
        self._num_orders = 0

    def take(self) -> tuple[Order, ...]:
        """Return the orders since the last call."""
        orders, self._orders = tuple(self._orders), []
        return orders

    def learn(self, report: Report) -> None:
        """Take in the reports of workers."""
        for number, errors in report.done.items():
            self._loads[number].errors += errors
            if len(self._loads[number].errors) == self._num_workers:
                del self._loads[number]

    def launch(self, plan: StepPlan, now: float) -> Work:
        """Refuse: vLLM runs the steps."""
        raise TypeError("vLLM runs the steps")

    def load_adapter(self, load: AdapterLoad, now: float) -> Work:
        """Order a read, or a copy to the slot that is the load's only page."""
        one = load.version
        number = self._order("load", load.tier, AdapterRef.of(one.key, one.source, one.file_key), *load.pages)
        made = self._loads[number] = _OrderedLoad(self._num_workers)
        return made

    def drop_adapter(self, key: AdapterKey, tier: Tier) -> None:
        """Order that a copy is dropped; workers keep none on a disk."""
        if tier is not Tier.DISK:
            self._order("drop", tier, AdapterRef.of(key))

    def _order(self, work: Literal["load", "drop"], tier: Tier, adapter: AdapterRef, slot: int = -1) -> int:
        self._num_orders += 1
        self._orders.append(Order(self._num_orders, work, tier, adapter, slot))
        return self._num_orders
