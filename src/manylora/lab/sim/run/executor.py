"""The simulated executor: work completes by a cost model, and tokens are synthetic.

On the virtual clock it makes the engine a simulator; on the wall clock, a server without a model. Loads share one link
per tier (``link.py``) and run beside steps, which they may slow down. A step with cold sequences takes longer, for all
its sequences, or goes on without them (``cold_steps.py``).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from zlib import crc32

from manylora.core.costs.arriving import MAX_WAIT_S
from manylora.core.engine.steps.plan_ahead import fill_in
from manylora.core.plan import AdapterLoad, LoadResult, PlannedSequence, StepPlan, StepResult
from manylora.core.types import AdapterKey, PromptLogprobs, SampledToken, Tier
from manylora.lab.costs.model import CostModel
from manylora.lab.costs.speed import MachineSpeed
from manylora.lab.costs.workers import AssistCost
from manylora.lab.sim.run.cold_steps import ColdStep, ColdSteps, cold_sequences
from manylora.lab.sim.run.link import LoadTimeline, SimulatedLink

__all__ = ["SimulatedExecutor", "SimulatedLoad", "SimulatedWork", "synthetic_prompt_logprobs", "synthetic_token"]


@dataclass(slots=True)
class SimulatedWork:
    """Work with a known result, and known times of its begin and end in seconds."""

    ready_at: float
    result: StepResult | LoadResult
    begins_at: float = 0.0

    def poll(self, now: float) -> StepResult | LoadResult | None:
        """Return the result from ``ready_at`` on."""
        return self.result if now >= self.ready_at else None


@dataclass(frozen=True, slots=True)
class SimulatedLoad:
    """A load in flight, which loads that begin later may put off."""

    timeline: LoadTimeline

    @property
    def ready_at(self) -> float:
        """Time of its end, in seconds."""
        return self.timeline.ends_at

    def poll(self, now: float) -> LoadResult | None:
        """Return the result from ``ready_at`` on."""
        return LoadResult() if now >= self.ready_at else None


def synthetic_token(part: PlannedSequence, vocab_size: int, avoid: tuple[int, ...] = ()) -> SampledToken:
    """Return a token that depends only on adapter, seed and position, so that it can be computed again."""
    position = part.start + part.num_tokens
    draw = crc32(f"{part.adapter}/{part.seed if part.sampling.temperature else 0}/{position}".encode())
    token_id = draw % vocab_size
    while token_id in avoid:
        token_id = (token_id + 1) % vocab_size
    if part.sampling.logprobs is None:
        return SampledToken(token_id=token_id)
    others = [(token_id + step) % vocab_size for step in range(part.sampling.logprobs)]
    top = tuple((other, -0.1 - rank) for rank, other in enumerate(others))
    return SampledToken(token_id=token_id, logprob=-0.1, top=top)


def synthetic_prompt_logprobs(plan: StepPlan, vocab_size: int) -> dict[int, PromptLogprobs]:
    """Return rows that depend only on the tokens of the prompts, which are their own most likely ones."""
    found: dict[int, PromptLogprobs] = {}
    parts = {part.seq_id: part for part in plan.sequences} if plan.prompt_rows else {}
    for rows in plan.prompt_rows:
        if (part := parts.get(rows.seq_id)) is None:
            continue  # it failed in the step before
        assert part.start <= rows.start < rows.stop <= part.start + part.num_tokens, "reported but not run"
        targets = part.tokens[rows.start + 1 : rows.stop + 1]
        numbers = [(token + step) % vocab_size for token in targets for step in (0, *range(rows.num_top))]
        logprobs = [-0.1 - step for step in (0, *range(rows.num_top))] * len(targets)
        found[rows.seq_id] = PromptLogprobs(
            num_top=rows.num_top,
            token_ids=array("i", numbers).tobytes(),
            logprobs=array("f", logprobs).tobytes(),
            ranks=array("i", [1] * len(targets)).tobytes(),
        )
    return found


class SimulatedExecutor:
    """Reports steps and loads as completed at the modelled time.

    Args:
        vocab_size: Bound of token ids.
        avoid: Tokens never chosen (those that would end a sequence early).
        choose: Makes the token of a sequence; by default ``synthetic_token``.
        scheduler_time_s: Time to decide a step: a constant, so that a run does not depend on the machine that simulates
            it. It overlaps with a step in flight.
        interference: Slow-down of a step by a load beside it, by the load's tier: seconds of delay per second of the
            load, below 1; none for missing tiers.
        speed: Speed of the machine over time; constant when ``None``.
        num_layers: Layers of the model, in whose order adapters arrive.
        assist: Prices the CPU workers that compute adapters from host memory; ``None`` where steps read it in place.
        patience_s: Longest wait of a step for the layers of its adapters, in seconds.
    """

    def __init__(
        self,
        cost: CostModel,
        *,
        vocab_size: int,
        avoid: tuple[int, ...] = (),
        choose: Callable[[PlannedSequence], SampledToken] | None = None,
        scheduler_time_s: float = 0.0,
        interference: Mapping[Tier, float] | None = None,
        speed: MachineSpeed | None = None,
        num_layers: int = 1,
        assist: AssistCost | None = None,
        patience_s: float = MAX_WAIT_S,
    ) -> None:
        self._cost = cost
        self._vocab_size = vocab_size
        self._num_layers = num_layers
        self._cold_steps = ColdSteps(cost, num_layers, assist, patience_s)
        self._interference = {tier: one for tier, one in (interference or {}).items() if one}
        self._speed = speed
        self._steps: list[SimulatedWork] = []  # the last two, for loads to slow down
        self._last = StepResult()
        self._late: dict[int, Seq[int]] = {}  # by the last step; with the pages of each
        self._scheduler_time_s = scheduler_time_s
        self._choose = choose or (lambda part: synthetic_token(part, vocab_size, avoid))
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
        is_copying = now < self._links[Tier.DEVICE].free_at
        if is_copying and (cold := cold_sequences(plan)):
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
            tokens=tokens,
            late=frozenset(self._late),
            prompt_logprobs=prompt_logprobs,
            cpu_share=step.cpu_share,
        )
        self._steps = [*self._steps[-1:], SimulatedWork(ready_at, self._last, begins_at)]
        return self._steps[-1]

    def load_adapter(self, load: AdapterLoad, now: float) -> SimulatedLoad:
        """Start a load on its link. A copy follows the read of its adapter if that is in flight.

        Steps in flight keep the arrivals that they were launched with.
        """
        tier, key = load.tier, load.version.key
        below = self._timelines[Tier.HOST].get(key) if tier is Tier.DEVICE else None
        if below is not None and below.ends_at <= now:
            below = None
        timeline = self._links[tier].load(now, self._cost.load_time_s(load), self._num_layers, below)
        self._timelines[tier][key] = timeline
        if tier in self._interference:
            self._delay_steps(tier, timeline)
        return SimulatedLoad(timeline)

    def _delay_steps(self, tier: Tier, load: LoadTimeline) -> None:
        """Delay the steps in flight beside a load, and the second also by the delay of the first."""
        late_s = 0.0
        for step in self._steps:
            step.begins_at += late_s
            step.ready_at += late_s
            ready_at = _delayed(step.ready_at, self._interference[tier], step.begins_at, load.uses)
            late_s, step.ready_at = late_s + ready_at - step.ready_at, ready_at

    def drop_adapter(self, key: AdapterKey, tier: Tier) -> None:
        """Forget the times at which its layers arrived in ``tier``."""
        self._timelines[tier].pop(key, None)


def _delayed(ends_at: float, interference: float, begins_at: float, uses: Iterable[tuple[float, float]]) -> float:
    """Return the end of a step that runs from ``begins_at``, beside loads that use their link in some intervals."""
    for from_s, to_s in uses:
        both_at = max(begins_at, from_s)
        together_s = min(to_s - both_at, (ends_at - both_at) / (1.0 - interference))
        ends_at += interference * max(0.0, together_s)
    return ends_at
