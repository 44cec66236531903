"""Replay: the simulator with the logged times of a live run.

Steps and loads complete at the turns at which they completed live. If server and simulator are one code path, every
decision follows from that, and the whole event log is equal, times included. The first difference is an error.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from manylora.core.costs.features import step_features
from manylora.core.costs.step_log import LoadRecord, LogLine, StepRecord
from manylora.core.errors import ManyloraError
from manylora.core.plan import AdapterLoad, LoadResult, PlannedSequence, StepPlan, StepResult
from manylora.core.types import AdapterKey, SampledToken, Tier
from manylora.lab.sim.run.executor import SimulatedWork

__all__ = ["Diverged", "ReplayExecutor"]


class Diverged(ManyloraError):
    """A replay started work that the logged run did not start."""


class ReplayExecutor:
    """Completes work at the times in the log of a run.

    ``choose`` makes the token of a sequence; the tokens that end an answer must be those of the run.
    """

    def __init__(self, lines: Iterable[LogLine], choose: Callable[[PlannedSequence], SampledToken]) -> None:
        self._choose = choose
        self._steps: dict[int, StepRecord] = {}
        self._loads: dict[tuple[AdapterKey, Tier], deque[LoadRecord]] = {}
        for line in lines:
            if isinstance(line, StepRecord):
                self._steps[line.step_id] = line
            elif isinstance(line, LoadRecord):
                self._loads.setdefault((line.adapter, line.tier), deque()).append(line)

    def launch(self, plan: StepPlan, now: float) -> SimulatedWork:
        """Start a step.

        Raises:
            Diverged: The run started no such step at this time.
        """
        step, features = self._steps.get(plan.step_id), step_features(plan)
        if step is None:
            raise Diverged(f"Step {plan.step_id} at {now!r} s: there was none")
        if step.launched_at != now or step.features != features:
            was = f"at {step.launched_at!r} s with {step.features}"
            raise Diverged(f"Step {plan.step_id} at {now!r} s with {features}: it was {was}")
        tokens = {part.seq_id: self._choose(part) for part in plan.sequences if part.is_sampled}
        return SimulatedWork(step.ended_at, StepResult(tokens=tokens, device_s=step.device_s))

    def load_adapter(self, load: AdapterLoad, now: float) -> SimulatedWork:
        """Start a load.

        Raises:
            Diverged: The run started no such load at this time.
        """
        key, tier = load.version.key, load.tier
        waiting = self._loads.get((key, tier))
        if not waiting:
            raise Diverged(f"Load of {key} to {tier.value} at {now!r} s: there was none")
        record = waiting.popleft()
        if record.launched_at != now:
            raise Diverged(f"Load of {key} to {tier.value} at {now!r} s: it was at {record.launched_at!r} s")
        return SimulatedWork(record.ended_at, LoadResult(error=record.error, device_s=record.device_s))

    def drop_adapter(self, key: AdapterKey, tier: Tier) -> None:
        """Do nothing: no weights are held."""
