"""Steps of cold sequences in virtual time: layer by layer, as weights arrive or as CPU workers compute them.

::

    copy                  | 0 |     | 1 |     | 2 | ...        ``SimulatedLink``
    step                  | layer 0 | waits | layer 1 | ...    of a sequence that is placed ARRIVING

A step is cut into as many equal parts as the model has layers, and so are the weights of an adapter. It waits as long
as a live one: the limit is the same code (``core/costs/arriving.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import NamedTuple

from manylora.core.costs.arriving import MAX_WAIT_S, WaitBudget, left_to_workers
from manylora.core.plan import LoadResult, PlannedSequence, StepPlan
from manylora.core.types import AdapterKey, Tier
from manylora.lab.costs.model import CostModel
from manylora.lab.costs.workers import AssistCost

__all__ = ["ColdStep", "ColdSteps", "LoadTimeline"]


@dataclass(slots=True, eq=False)
class LoadTimeline:
    """A load under way, which brings the layers of an adapter in their order; times in seconds.

    Loads that begin later may put off its pieces that wait for the tier below.
    """

    arrivals: list[float]  # time at which each layer has arrived
    begins_at: float = 0.0  # time of its turn on the link, from which on its layout is known
    uses: Seq[tuple[float, float]] = ()  # intervals in which it was to use the link when it began

    @property
    def ready_at(self) -> float:
        """Time at which all layers have arrived."""
        return self.arrivals[-1]

    def poll(self, now: float) -> LoadResult | None:
        """Return the result from ``ready_at`` on."""
        return LoadResult() if now >= self.ready_at else None


class ColdStep(NamedTuple):
    """The outcome of a step with cold sequences."""

    ends_at: float  # its end, in seconds
    cpu_share: float = 1.0  # share of its assisted layers that workers computed
    late: frozenset[AdapterKey] = frozenset()  # adapters that it has ceased to wait for


class ColdSteps:
    """Computes the end of a step with cold sequences. All sequences of the step end with it.

    ``assist`` prices CPU workers beside an accelerator; ``None`` where steps read the host image in place, on a CPU. A
    step waits for the layers of its adapters for ``max_wait_s``.
    """

    def __init__(
        self, cost: CostModel, num_layers: int = 1, assist: AssistCost | None = None, max_wait_s: float = MAX_WAIT_S
    ) -> None:
        self.num_layers = num_layers
        self._cost = cost
        self._assist = assist
        self._max_wait_s = max_wait_s

    def end(
        self,
        plan: StepPlan,
        cold: Seq[PlannedSequence],
        copies: Mapping[AdapterKey, LoadTimeline],
        begins_at: float,
        factor: float,
    ) -> ColdStep:
        """Return the end of a step that begins once the device is free, on a machine slower by ``factor``.

        A sequence in the host tier that no worker takes waits for its whole adapter before the step begins, and so does
        the step: a published system, whose steps have no limit to it. ``copies`` has the load of each adapter to the
        device.
        """
        arriving: dict[AdapterKey, LoadTimeline] = {}
        assisted: list[PlannedSequence] = []
        for part in cold:
            assert part.adapter is not None
            if part.placement.tier is Tier.DEVICE:
                arriving[part.adapter] = copies[part.adapter]
            elif self._assist is not None and self._assist.workers.take(part):
                assisted.append(part)
            elif self._assist is not None:
                begins_at = max(begins_at, copies[part.adapter].ready_at)
        if not arriving and not assisted:
            return ColdStep(begins_at + self._cost.step_time_s(plan) * factor)
        waits = _Waits(begins_at, self._max_wait_s)
        for key, copy in arriving.items():
            waits.wait_for(key, copy.begins_at)
        if waits.late:  # an adapter whose layout is not known has no rows in the step
            plan = replace(plan, sequences=tuple([part for part in plan.sequences if part.adapter not in waits.late]))
            if not plan.sequences:
                return ColdStep(waits.at, late=frozenset(waits.late))
        takes_over = self._assist is not None and self._assist.workers.takes_over
        adapters = on_cpu = tuple(dict.fromkeys([part.adapter for part in assisted if part.adapter]))
        layers_s = {on_cpu: self._layer_s(plan, assisted, on_cpu, factor)}
        num_on_cpu = 0
        for layer in range(self.num_layers):
            for key, copy in arriving.items():
                waits.wait_for(key, copy.arrivals[layer])
            if takes_over:
                arrivals = {key: copies[key].arrivals[layer] for key in adapters}
                on_cpu = left_to_workers(adapters, arrivals.__getitem__, waits.at)
                if on_cpu not in layers_s:
                    layers_s[on_cpu] = self._layer_s(plan, assisted, on_cpu, factor)
            num_on_cpu += len(on_cpu)
            waits.at += layers_s[on_cpu]
        cpu_share = num_on_cpu / (self.num_layers * len(adapters)) if adapters else 1.0
        return ColdStep(waits.at, cpu_share, frozenset(waits.late))

    def _layer_s(
        self, plan: StepPlan, assisted: list[PlannedSequence], on_cpu: tuple[AdapterKey, ...], factor: float
    ) -> float:
        """Return the time of a layer in which workers compute some of the adapters whose rows are theirs."""
        if on_cpu and self._assist is not None:
            return factor * self._assist.step_time_s(plan, assisted, on_cpu) / self.num_layers
        return factor * self._cost.step_time_s(plan) / self.num_layers


class _Waits:
    """The time that a step has reached, ``at``, and the adapters that it has ceased to wait for."""

    def __init__(self, begins_at: float, max_wait_s: float) -> None:
        self.at = begins_at
        self.late: dict[AdapterKey, None] = {}
        self._budget = WaitBudget(max_wait_s)

    def wait_for(self, key: AdapterKey, arrives_at: float) -> None:
        """Wait until a part of an adapter has arrived, or until the budget is spent."""
        if arrives_at <= self.at or key in self.late:
            return
        if arrives_at - self.at > self._budget.left_s:  # late, once the rest is spent
            self.late[key] = None
            arrives_at = self.at + self._budget.left_s
        self._budget.spend(arrives_at - self.at)
        self.at = arrives_at
