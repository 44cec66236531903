"""Steps of cold sequences in virtual time: layer by layer, as weights arrive or as CPU workers compute them.

::

    read    | layer 0 | layer 1 | layer 2 | ...                a file, in the order of the layers
    copy              | 0 |     | 1 |     | 2 | ...            each layer once it has been read
    step                  | layer 0 | waits | layer 1 | ...    of a sequence that is placed ARRIVING

A step is cut into as many equal parts as the model has layers, and so are the weights of an adapter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from manylora.costs.model import CostModel
from manylora.costs.take_over import left_to_workers
from manylora.costs.workers import AssistCost
from manylora.plan import ON_DEVICE, PlannedSequence, StepPlan
from manylora.types import AdapterKey, Tier

__all__ = ["ColdSteps", "LoadTimeline", "cold_sequences"]


@dataclass(frozen=True, slots=True)
class LoadTimeline:
    """A load that brings the layers of an adapter in their order, at a constant rate; times in seconds.

    Args:
        begins_at: Time at which its link is free for it.
        load_s: Duration on an idle link.
        num_layers: Layers of the model.
        below: The load into the tier below, if that was in flight: a layer is copied once it has arrived there.
    """

    begins_at: float
    load_s: float
    num_layers: int
    below: LoadTimeline | None = None

    def arrival(self, layer: int) -> float:
        """Return the time at which a layer has arrived."""
        own_s = self.load_s * ((layer + 1) / self.num_layers)
        if self.below is None:
            return self.begins_at + own_s
        # Layers are equal: a copy that is slower than the read waits for the first layer, a faster one for each layer.
        after_first = self.below.arrival(0) + own_s
        after_each = self.below.arrival(layer) + self.load_s / self.num_layers
        return max(self.begins_at + own_s, after_first, after_each)

    @property
    def ends_at(self) -> float:
        """Time at which all layers have arrived."""
        return self.arrival(self.num_layers - 1)


def cold_sequences(plan: StepPlan) -> list[PlannedSequence]:
    """Return the sequences of a step whose adapter is not on the device."""
    return [part for part in plan.sequences if part.placement is not ON_DEVICE and part.placement != ON_DEVICE]


class ColdSteps:
    """Computes the end of a step with cold sequences. All sequences of the step end with it.

    Args:
        cost: Durations of steps.
        num_layers: Layers of the model.
        assist: Prices CPU workers beside an accelerator; ``None`` where steps read the host image in place, on a CPU.
    """

    def __init__(self, cost: CostModel, num_layers: int, assist: AssistCost | None) -> None:
        self._cost = cost
        self._num_layers = num_layers
        self._assist = assist

    def end(
        self,
        plan: StepPlan,
        cold: list[PlannedSequence],
        copies: Mapping[AdapterKey, LoadTimeline],
        begins_at: float,
        factor: float,
    ) -> tuple[float, float]:
        """Return the end of a step, in seconds, and the share of its assisted layers that workers computed.

        A sequence in the host tier that no worker takes waits for its whole adapter before the step begins, and so does
        the step.

        Args:
            plan: The step.
            cold: Its cold sequences.
            copies: The load of each adapter to the device.
            begins_at: Time at which the device is free.
            factor: Slowness of the machine at that time.
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
                begins_at = max(begins_at, copies[part.adapter].ends_at)
        if not arriving and not assisted:
            return begins_at + self._cost.step_time_s(plan) * factor, 1.0
        takes_over = self._assist is not None and self._assist.workers.takes_over
        adapters = on_cpu = tuple(dict.fromkeys([part.adapter for part in assisted if part.adapter]))
        layers_s = {on_cpu: self._layer_s(plan, assisted, factor)}
        at, num_on_cpu = begins_at, 0
        for layer in range(self._num_layers):
            for copy in arriving.values():
                at = max(at, copy.arrival(layer))
            if takes_over:
                arrivals = {key: copies[key].arrival(layer) for key in adapters}
                on_cpu = left_to_workers(adapters, arrivals.__getitem__, at)
                if on_cpu not in layers_s:
                    layers_s[on_cpu] = self._layer_s(plan, [p for p in assisted if p.adapter in on_cpu], factor)
            num_on_cpu += len(on_cpu)
            at += layers_s[on_cpu]
        return at, num_on_cpu / (self._num_layers * len(adapters)) if adapters else 1.0

    def _layer_s(self, plan: StepPlan, on_cpu: list[PlannedSequence], factor: float) -> float:
        """Return the time of a layer in which workers compute the adapters of some sequences."""
        if on_cpu and self._assist is not None:
            return factor * self._assist.step_time_s(plan, on_cpu) / self._num_layers
        return factor * self._cost.step_time_s(plan) / self._num_layers
