"""Messages between the gate beside vLLM's scheduler and the slots in each worker, and the loads that wait for them.

::

    scheduler process                                        worker process (one for each tensor-parallel rank)
    RequestGate -- SlotOrders, with the metadata of a step -->   SlotManager: read, copy, drop
                <-- Report, with the outputs of a step --
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from manylora.core.plan import AdapterLoad, LoadResult, StepPlan
from manylora.core.ports import Executor, Work
from manylora.core.types import AdapterKey, Tier

__all__ = ["AdapterRef", "Done", "Order", "Outbox", "Report", "SlotOrders"]


class AdapterRef(NamedTuple):
    """A version of an adapter, as vLLM's workers know it.

    Args:
        number: Its ``lora_int_id`` in the engine, given by the gate.
        name: Its ``lora_name`` in the engine, of which the hashes of prefix blocks are made: the adapter's name, and
            with a suffix for a version that replaces another.
        path: Its ``lora_path``.
        file_key: Identity of the files; empty where vLLM fetches them from a hub.
    """

    number: int
    name: str
    path: str
    file_key: str


class Order(NamedTuple):
    """Work for every worker: a load to a tier, or the drop of the copy there. ``slot`` is the target of a copy."""

    number: int
    work: Literal["load", "drop"]
    tier: Tier
    adapter: AdapterRef
    slot: int = -1


class SlotOrders(NamedTuple):
    """What one step brings to the workers; ``failed`` are requests whose adapter cannot be read, which end."""

    orders: tuple[Order, ...] = ()
    failed: tuple[str, ...] = ()


class Done(NamedTuple):
    """An order that a worker has carried out, and how long it took, in seconds."""

    error: str | None = None
    took_s: float = 0.0


@dataclass(slots=True)
class Report:
    """What one step brings back: orders done, by number and worker, and the loads that the step waited for."""

    done: dict[int, tuple[Done, ...]] = field(default_factory=dict)
    num_blocking: int = 0

    def add(self, other: Report) -> None:
        """Add the report of other workers."""
        for number, done in other.done.items():
            self.done[number] = self.done.get(number, ()) + done
        self.num_blocking = max(self.num_blocking, other.num_blocking)


@dataclass(slots=True)
class _OrderedLoad:
    num_workers: int
    done: tuple[Done, ...] = ()
    ready_at: float = math.inf

    def poll(self, now: float) -> LoadResult | None:
        if len(self.done) < self.num_workers:
            return None
        return LoadResult(
            error=next((one.error for one in self.done if one.error is not None), None),
            device_s=max(one.took_s for one in self.done),
        )


class Outbox(Executor):
    """Turns loads of the core into orders: an executor whose steps are vLLM's own.

    Args:
        num_workers: Workers that carry out every order.
        ref_of: Returns a version as the workers know it.
    """

    def __init__(self, num_workers: int, ref_of: Callable[[AdapterKey], AdapterRef]) -> None:
        self._num_workers, self._ref_of = num_workers, ref_of
        self._orders: list[Order] = []
        self._loads: dict[int, _OrderedLoad] = {}  # by order
        self._num_orders = 0

    def take(self) -> tuple[Order, ...]:
        """Return the orders since the last call."""
        orders, self._orders = tuple(self._orders), []
        return orders

    def learn(self, report: Report) -> None:
        """Take in the reports of workers."""
        for number, done in report.done.items():
            load = self._loads[number]
            load.done += done
            if len(load.done) == self._num_workers:
                del self._loads[number]

    def launch(self, plan: StepPlan, now: float) -> Work:
        """Refuse: vLLM runs the steps."""
        raise TypeError("vLLM runs the steps")

    def load_adapter(self, load: AdapterLoad, now: float) -> Work:
        """Order a read, or a copy to the slot that is the load's only page."""
        number = self._order("load", load.tier, load.version.key, *load.pages)
        made = self._loads[number] = _OrderedLoad(self._num_workers)
        return made

    def drop_adapter(self, key: AdapterKey, tier: Tier) -> None:
        """Order that a copy is dropped."""
        self._order("drop", tier, key)

    def _order(self, work: Literal["load", "drop"], tier: Tier, key: AdapterKey, slot: int = -1) -> int:
        self._num_orders += 1
        self._orders.append(Order(self._num_orders, work, tier, self._ref_of(key), slot))
        return self._num_orders
