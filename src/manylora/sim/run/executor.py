"""The simulated executor: work completes by a cost model, and tokens are synthetic.

On the virtual clock it makes the engine a simulator; on the wall clock, a server without a model. Loads share one link
per tier, first in, first out, and run beside steps, which they may slow down. A step with cold sequences takes
longer, for all its sequences (``cold_steps.py``).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from zlib import crc32

from manylora.costs.model import CostModel
from manylora.costs.speed import MachineSpeed
from manylora.costs.workers import AssistCost
from manylora.plan import AdapterLoad, LoadResult, PlannedSequence, StepPlan, StepResult
from manylora.sim.run.cold_steps import ColdSteps, LoadTimeline, cold_sequences
from manylora.types import AdapterKey, PromptLogprobs, SampledToken, Tier

__all__ = ["SimulatedExecutor", "SimulatedWork", "synthetic_prompt_logprobs", "synthetic_token"]


@dataclass(slots=True)
class SimulatedWork:
    """Work with a known result, and known times of its begin and end in seconds."""

    ready_at: float
    result: StepResult | LoadResult
    begins_at: float = 0.0

    def poll(self, now: float) -> StepResult | LoadResult | None:
        """Return the result from ``ready_at`` on."""
        return self.result if now >= self.ready_at else None


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
    ) -> None:
        self._cost = cost
        self._vocab_size = vocab_size
        self._num_layers = num_layers
        self._cold_steps = ColdSteps(cost, num_layers, assist)
        self._interference = {tier: one for tier, one in (interference or {}).items() if one}
        self._speed = speed
        self._steps: list[SimulatedWork] = []  # the last two, for loads to slow down
        self._scheduler_time_s = scheduler_time_s
        self._choose = choose or (lambda part: synthetic_token(part, vocab_size, avoid))
        self._link_free_at = {Tier.HOST: 0.0, Tier.DEVICE: 0.0}
        self._timelines: dict[Tier, dict[AdapterKey, LoadTimeline]] = {Tier.HOST: {}, Tier.DEVICE: {}}

    def launch(self, plan: StepPlan, now: float) -> SimulatedWork:
        """Start a step."""
        tokens = {part.seq_id: self._choose(part) for part in plan.sequences if part.is_sampled}
        begins_at = max(now + self._scheduler_time_s, self._steps[-1].ready_at if self._steps else 0.0)
        factor = 1.0 if self._speed is None else self._speed.factor(begins_at)
        # A sequence is cold only while its adapter is on its way to the device.
        is_copying = now < self._link_free_at[Tier.DEVICE]
        if is_copying and (cold := cold_sequences(plan)):
            ready_at, cpu_share = self._cold_steps.end(plan, cold, self._timelines[Tier.DEVICE], begins_at, factor)
        else:
            ready_at, cpu_share = begins_at + self._cost.step_time_s(plan) * factor, 0.0
        for tier in self._interference:
            ready_at = self._delayed(ready_at, tier, begins_at, self._link_free_at[tier])
        prompt_logprobs = synthetic_prompt_logprobs(plan, self._vocab_size)
        result = StepResult(tokens=tokens, prompt_logprobs=prompt_logprobs, cpu_share=cpu_share)
        self._steps = [*self._steps[-1:], SimulatedWork(ready_at, result, begins_at)]
        return self._steps[-1]

    def load_adapter(self, load: AdapterLoad, now: float) -> SimulatedWork:
        """Start a load behind those on its link. A copy follows the read of its adapter if that is in flight."""
        tier, key = load.tier, load.version.key
        begins_at = max(now, self._link_free_at[tier])
        below = self._timelines[Tier.HOST].get(key) if tier is Tier.DEVICE else None
        if below is not None and below.ends_at <= now:
            below = None
        timeline = LoadTimeline(begins_at, self._cost.load_time_s(load), self._num_layers, below)
        self._timelines[tier][key] = timeline
        self._link_free_at[tier] = ready_at = timeline.ends_at
        if tier in self._interference:
            self._delay_steps(tier, begins_at, ready_at)
        return SimulatedWork(ready_at, LoadResult(), begins_at)

    def _delay_steps(self, tier: Tier, begins_at: float, ends_at: float) -> None:
        """Delay the steps in flight beside a load, and the second also by the delay of the first."""
        late_s = 0.0
        for step in self._steps:
            step.begins_at += late_s
            step.ready_at += late_s
            ready_at = self._delayed(step.ready_at, tier, max(begins_at, step.begins_at), ends_at)
            late_s, step.ready_at = late_s + ready_at - step.ready_at, ready_at

    def _delayed(self, step_ends_at: float, tier: Tier, begins_at: float, ends_at: float) -> float:
        """Return the end of a step beside a load that runs from ``begins_at`` to ``ends_at``."""
        interference = self._interference[tier]
        together_s = min(ends_at - begins_at, (step_ends_at - begins_at) / (1.0 - interference))
        return step_ends_at + interference * max(0.0, together_s)

    def drop_adapter(self, key: AdapterKey, tier: Tier) -> None:
        """Forget the times at which its layers arrived in ``tier``."""
        self._timelines[tier].pop(key, None)
