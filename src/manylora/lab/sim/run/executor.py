"""The simulated executor: work completes by a cost model, and tokens are synthetic.

On the virtual clock it makes the engine a simulator; on the wall clock, a server without a model. Loads share one link
per tier and run beside steps, which they may slow down. A step with cold sequences takes longer, for all its sequences,
or goes on without them (``cold_steps.py``).

The link of a tier is one thread that copies pieces in the order in which they are there::

    read A    | layer 0 | layer 1 | layer 2 |            a file, in the order of the layers
    copy A              | 0 |     | 1 |       | 2 |      chained: a piece for each layer, once that has been read
    copy B                  | all layers......|          an image that is there: one piece

So a copy that follows its read leaves the link to others while it waits, and is delayed by those that begin meanwhile.
That is how the live link serves loads (``execution/storage/device_load.py``).
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from manylora.core.engine.steps.plan_ahead import fill_in
from manylora.core.plan import ON_DEVICE, AdapterLoad, LoadResult, PlannedSequence, StepPlan, StepResult
from manylora.core.types import AdapterKey, SampledToken, Tier
from manylora.lab.costs.fitted import MachineSpeed
from manylora.lab.costs.model import CostModel
from manylora.lab.sim.run.cold_steps import ColdStep, ColdSteps, LoadTimeline
from manylora.lab.sim.run.contents import synthetic_prompt_logprobs, synthetic_token

__all__ = ["SimulatedExecutor", "SimulatedLink", "SimulatedWork"]


@dataclass(slots=True)
class SimulatedWork:
    """Work with a known result, and known times of its begin and end in seconds."""

    ready_at: float
    result: StepResult | LoadResult
    begins_at: float = 0.0

    def poll(self, now: float) -> StepResult | LoadResult | None:
        """Return the result from ``ready_at`` on."""
        return self.result if now >= self.ready_at else None


@dataclass(slots=True, eq=False)
class _LayerCopy:
    """Layers of a load that are copied together from ``ready_at`` on; none for the table of a chained copy."""

    load: LoadTimeline
    layers: range
    ready_at: float
    seconds: float
    is_first: bool = True
    begins_at: float = 0.0
    ends_at: float = 0.0

    def begin(self, free_at: float) -> None:
        """Plan it behind the piece before it."""
        self.begins_at = at = max(free_at, self.ready_at)
        self.ends_at = at + self.seconds
        if self.is_first:
            self.load.begins_at = at
        num_layers = len(self.layers)
        for number, layer in enumerate(self.layers, 1):
            self.load.arrivals[layer] = at + self.seconds * (number / num_layers)


class SimulatedLink:
    """One link, first in, first out."""

    def __init__(self) -> None:
        self._pieces: list[_LayerCopy] = []  # that had not ended by the last load, in order

    @property
    def free_at(self) -> float:
        """Time at which the last piece ends; 0 if there is none."""
        return self._pieces[-1].ends_at if self._pieces else 0.0

    def busy(self) -> Iterator[tuple[float, float]]:
        """Yield the intervals in which it is in use, in order: all that had not ended by the last load."""
        if not self._pieces:
            return
        begins_at, ends_at = self._pieces[0].begins_at, self._pieces[0].ends_at
        for piece in self._pieces:
            if piece.begins_at > ends_at:
                yield begins_at, ends_at
                begins_at = piece.begins_at
            ends_at = piece.ends_at
        yield begins_at, ends_at

    def load(self, now: float, load_s: float, num_layers: int, below: LoadTimeline | None = None) -> LoadTimeline:
        """Start a load of ``load_s`` on an idle link, in equal parts for the layers of the model.

        ``below`` is the load into the tier below, if that is in flight: a layer is copied once it has arrived there.
        """
        del self._pieces[: bisect_right(self._pieces, now, key=lambda piece: piece.ends_at)]
        load = LoadTimeline([0.0] * num_layers)
        if below is None:
            pieces = [_LayerCopy(load, range(num_layers), now, load_s)]
        else:
            pieces = [_LayerCopy(load, range(0), max(now, below.begins_at), 0.0)]
            for layer, arrives_at in enumerate(below.arrivals):
                ready_at, seconds = max(now, arrives_at), load_s / num_layers
                pieces.append(_LayerCopy(load, range(layer, layer + 1), ready_at, seconds, is_first=False))
        first = bisect_right(self._pieces, pieces[0].ready_at, key=lambda piece: piece.ready_at)
        free_at = self._pieces[first - 1].ends_at if first else 0.0
        for piece in pieces:
            insort(self._pieces, piece, key=lambda one: one.ready_at)
        for piece in self._pieces[first:]:
            piece.begin(free_at)
            free_at = piece.ends_at
        load.uses = [(piece.begins_at, piece.ends_at) for piece in pieces if piece.seconds]
        return load


class SimulatedExecutor:
    """Reports steps and loads as completed at the modelled time.

    ``choose`` makes the token of a sequence; by default ``synthetic_token``. ``scheduler_time_s``, the time to decide a
    step, is a constant, so that a run does not depend on the machine that simulates it; it overlaps with a step in
    flight. ``interference`` is the slow-down of a step by a load beside it, by the load's tier: seconds of delay per
    second of the load, below 1. ``cold_steps`` computes steps with sequences whose adapter is not on the device; by
    default of a model with one layer, whose steps read adapters from host memory in place.
    """

    def __init__(
        self,
        cost: CostModel,
        *,
        vocab_size: int,
        choose: Callable[[PlannedSequence], SampledToken] | None = None,
        scheduler_time_s: float = 0.0,
        interference: Mapping[Tier, float] | None = None,
        speed: MachineSpeed | None = None,
        cold_steps: ColdSteps | None = None,
    ) -> None:
        self._cost = cost
        self._vocab_size = vocab_size
        self._cold_steps = cold_steps or ColdSteps(cost)
        self._interference = {tier: share for tier, share in (interference or {}).items() if share}
        self._speed = speed
        self._steps: list[SimulatedWork] = []  # the last two, for loads to slow down
        self._last = StepResult()
        self._late: dict[int, Seq[int]] = {}  # sequences that the last step went on without, with their pages
        self._scheduler_time_s = scheduler_time_s
        self._choose = choose or (lambda part: synthetic_token(part, vocab_size))
        self._links = {Tier.HOST: SimulatedLink(), Tier.DEVICE: SimulatedLink()}
        self._timelines: dict[Tier, dict[AdapterKey, LoadTimeline]] = {Tier.HOST: {}, Tier.DEVICE: {}}

    def launch(self, plan: StepPlan, now: float) -> SimulatedWork:
        """Start a step."""
        if self._late:
            plan = fill_in(plan, self._last.tokens, late=self._late)
        tokens = {part.seq_id: self._choose(part) for part in plan.sequences if part.is_sampled}
        begins_at = max(now + self._scheduler_time_s, self._steps[-1].ready_at if self._steps else 0.0)
        factor = 1.0 if self._speed is None else self._speed.factor(begins_at)
        # A sequence is cold only while its adapter is on its way to the device.
        cold: list[PlannedSequence] = []
        if now < self._links[Tier.DEVICE].free_at:
            cold = [one for one in plan.sequences if one.placement is not ON_DEVICE and one.placement != ON_DEVICE]
        if cold:
            step = self._cold_steps.end(plan, cold, self._timelines[Tier.DEVICE], begins_at, factor)
        else:
            step_s = self._cost.step_time_s(plan) if plan.sequences else 0.0
            step = ColdStep(begins_at + step_s * factor, cpu_share=0.0)
        ready_at = step.ends_at
        for tier, share in self._interference.items():
            ready_at = _delayed(ready_at, share, begins_at, self._links[tier].busy())
        prompt_logprobs = synthetic_prompt_logprobs(plan, self._vocab_size)
        late_parts = [part for part in plan.sequences if part.adapter in step.late] if step.late else []
        self._late = {part.seq_id: part.pages for part in late_parts}
        for seq_id in self._late:
            tokens.pop(seq_id, None)
            prompt_logprobs.pop(seq_id, None)
        self._last = StepResult(
            tokens=tokens, late=frozenset(self._late), prompt_logprobs=prompt_logprobs, cpu_share=step.cpu_share
        )
        self._steps = [*self._steps[-1:], SimulatedWork(ready_at, self._last, begins_at)]
        return self._steps[-1]

    def load_adapter(self, load: AdapterLoad, now: float) -> LoadTimeline:
        """Start a load on its link. A copy follows the read of its adapter if that is in flight.

        Steps in flight keep the arrivals that they were launched with.
        """
        tier, key = load.tier, load.version.key
        below = self._timelines[Tier.HOST].get(key) if tier is Tier.DEVICE else None
        if below is not None and below.ready_at <= now:
            below = None
        timeline = self._links[tier].load(now, self._cost.load_time_s(load), self._cold_steps.num_layers, below)
        self._timelines[tier][key] = timeline
        if tier in self._interference:
            self._delay_steps(tier, timeline)
        return timeline

    def _delay_steps(self, tier: Tier, load: LoadTimeline) -> None:
        """Delay the steps in flight beside a load, and the second also by the delay of the first."""
        late_s = 0.0
        for step in self._steps:
            step.begins_at += late_s
            step.ready_at += late_s
            ready_at = _delayed(step.ready_at, self._interference[tier], step.begins_at, load.uses)
            late_s, step.ready_at = late_s + ready_at - step.ready_at, ready_at

    def drop_adapter(self, key: AdapterKey, tier: Tier) -> None:
        """Forget the times at which its layers arrived in ``tier``; nothing is kept on a disk."""
        if tier is not Tier.DISK:
            self._timelines[tier].pop(key, None)


def _delayed(ends_at: float, interference: float, begins_at: float, uses: Iterable[tuple[float, float]]) -> float:
    """Return the end of a step that runs from ``begins_at``, beside loads that use their link in some intervals."""
    for from_s, to_s in uses:
        both_at = max(begins_at, from_s)
        together_s = min(to_s - both_at, (ends_at - both_at) / (1.0 - interference))
        ends_at += interference * max(0.0, together_s)
    return ends_at
