"""Cold starts: the mode of each request whose adapter is not on the device, and the quality of the predictions.

::

    first look at a cold request --> choose()  --> ColdStartChosen     prediction for each mode
    its adapter moved up a tier  --> choose() again
    its adapter runs another way --> choose() again
    its first token              --> learn()   --> ColdStartEnded      the prediction corrects the model

The model is pure (``core/costs/cold_start.py``). This module asks it the question: it knows the loads on the links, the
batch and the learnt costs. Nothing here runs while every adapter is on the device.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import InitVar, dataclass, field

from manylora.core.config import EngineConfig
from manylora.core.costs.cold_start import AssistCosts, ColdRequest, Corrections, Expected, choose, expect
from manylora.core.engine.adapters.cache import AdapterCache
from manylora.core.engine.adapters.loader import LoadsInFlight
from manylora.core.engine.adapters.residency import Residency
from manylora.core.engine.status import ColdStartStatus
from manylora.core.errors import ConfigError
from manylora.core.events import ColdStartChosen, ColdStartEnded, EventSink
from manylora.core.memory import ReloadCosts
from manylora.core.plan import ARRIVING, IN_HOST, StepPlan, StepResult
from manylora.core.ports import CoreParts
from manylora.core.scheduling import Sequence
from manylora.core.types import ColdStart, Tier

__all__ = ["ColdStarts", "possible_modes"]


NUM_STEPS = 16
"""Steps without cold rows after which the duration of a step is known well enough to tell what cold rows add."""

RECENT = 8
"""Most steps with cold rows after one without them whose durations are compared with that one's: steps become longer
with the KV they read, which no line over tokens shows."""


def possible_modes(parts: CoreParts) -> tuple[ColdStart, ...]:
    """Return the modes that the executor of an engine can do."""
    able = {ColdStart.WAIT: True, ColdStart.ASSIST: parts.reads_host, ColdStart.LAYERS: parts.waits_by_layer}
    return tuple(mode for mode in ColdStart if able[mode])


@dataclass(slots=True)
class StartChoice:
    """The mode of a request, the tier of its adapter at that time, and the prediction."""

    mode: ColdStart
    tier: Tier
    chosen_at: float
    resident_s: float
    expected: Expected
    plain_delay_s: float
    is_held_up: bool = False


@dataclass(slots=True)
class _Sums:
    num_starts: int = 0
    num_measured: int = 0
    expected_s: float = 0.0
    actual_s: float = 0.0
    error_s: float = 0.0
    relative_error: float = 0.0


@dataclass(eq=False)
class ColdStarts:
    """Chooses modes and learns from first tokens. Times are in seconds.

    ``choices`` has the mode of each cold request, by ``seq_id``, until its first token. ``ConfigError`` if the executor
    cannot do the mode that is asked for.
    """

    # Say what the executor can do, the layers of the base, and whether steps run on a device beside the CPU.
    parts: InitVar[CoreParts]
    config: InitVar[EngineConfig]  # has the mode that is asked for, if one is, and the most tokens in a step
    _cache: AdapterCache
    _loads: LoadsInFlight
    _costs: ReloadCosts  # costs of loads and steps, learnt elsewhere
    _emit: EventSink
    choices: dict[int, StartChoice] = field(default_factory=dict)
    _num_cold_steps: int = 0  # one after another, up to the last

    def __post_init__(self, parts: CoreParts, config: EngineConfig) -> None:
        mode, possible = config.adapters.cold_start, possible_modes(parts)
        self._forced = None if mode == "auto" else ColdStart(mode)
        if self._forced is not None and self._forced not in possible:
            names = ", ".join(["auto", *(one.value for one in possible)])
            raise ConfigError(f"Got cold_start = {mode!r}, which this engine cannot do; expected one of {names}")
        self._possible = possible
        self._chains_copies = parts.chains_copies
        self._num_layers = parts.base.num_layers
        self._max_step_tokens = config.scheduler.max_num_batched_tokens
        self._assist = AssistCosts(is_beside=parts.is_accelerated)
        self._corrections = Corrections()
        self._sums = {one: _Sums() for one in possible}
        self._last_cold_step = -1

    def mode(self, sequence: Sequence, residency: Residency, running: Seq[Sequence], now: float) -> ColdStart:
        """Return the mode of a waiting sequence whose adapter is not on the device, beside those that run."""
        if len(self._possible) == 1:
            return ColdStart.WAIT
        choice = self.choices.get(sequence.seq_id)
        is_late = residency.is_late and choice is not None and choice.mode is ColdStart.LAYERS
        if (
            choice is None
            or is_late
            or choice.tier is not residency.tier
            or choice.mode not in self._allowed(residency)  # another sequence has begun on the adapter, another way
        ):
            was_held_up = choice is not None and choice.is_held_up
            choice = self._choose(sequence, residency, running, now, was_held_up=was_held_up)
        return choice.mode

    def chains_copy(self, mode: ColdStart) -> bool:
        """Return whether to ask for a copy together with its read.

        Where no step runs on layers that arrive, it saves a step; behind other reads it would keep its pages empty for
        long.
        """
        return mode is ColdStart.LAYERS or (self._chains_copies and not self._loads.to(Tier.HOST))

    def begins_at(self, sequence: Sequence) -> float:
        """Return the time before which a sequence in the mode ``layers`` is not to begin."""
        choice = self.choices[sequence.seq_id]
        return choice.chosen_at + choice.expected.begins_s

    def room_for(self, sequence: Sequence, room: int) -> int:
        """Return how many tokens of a prompt that is assisted run in a step with room for ``room``.

        A request in the mode that was asked for takes the room there is.
        """
        choice = self.choices.get(sequence.seq_id)
        if choice is None or self._forced is not None or choice.expected.chunk_tokens is None:
            return room
        return min(room, choice.expected.chunk_tokens)

    def held_up(self, sequence: Sequence) -> None:
        """Learn that a sequence waits for memory, or for a limit of the step."""
        if sequence.seq_id in self.choices:
            self.choices[sequence.seq_id].is_held_up = True

    def was_late(self, sequence: Sequence, now: float) -> None:
        """Learn that a step went on without a sequence whose layers had not arrived.

        If the sequence has no token yet, its start was predicted too early, and the corrections learn the delay.
        """
        choice = self.choices.get(sequence.seq_id)
        if choice is not None:
            self._learn(choice, now - choice.chosen_at)

    def _choose(
        self, sequence: Sequence, residency: Residency, running: Seq[Sequence], now: float, *, was_held_up: bool
    ) -> StartChoice:
        question = self._question(sequence, residency, running, now)
        expected = expect(question, self._assist, self._corrections, is_forced=self._forced is not None)
        allowed = self._allowed(residency)
        mode = self._forced or choose(expected, allowed, question.num_sharing)
        if mode not in allowed and residency.is_late:
            mode = ColdStart.WAIT
        delay_s = (expected[mode].first_token_s - question.prompt_s) / self._corrections.factor(mode)
        choice = StartChoice(mode, residency.tier, now, question.prompt_s, expected[mode], delay_s, was_held_up)
        self.choices[sequence.seq_id] = choice
        key = residency.version.key
        in_seconds = {one: prediction.first_token_s for one, prediction in expected.items()}
        self._emit(ColdStartChosen(now, sequence.request.request_id, key, mode, in_seconds))
        return choice

    def _allowed(self, residency: Residency) -> tuple[ColdStart, ...]:
        """Return the modes to choose from; all sequences that run on an adapter share its placement.

        None begins on layers for which a step has waited in vain.
        """
        placement = self._cache.cold.get(residency.version.key)
        modes = self._possible
        if placement is not None:
            modes = (ColdStart.WAIT, ColdStart.ASSIST if placement is IN_HOST else ColdStart.LAYERS)
        return tuple([mode for mode in modes if mode is not ColdStart.LAYERS]) if residency.is_late else modes

    def _question(self, sequence: Sequence, residency: Residency, running: Seq[Sequence], now: float) -> ColdRequest:
        step, num_others, rank = self._costs.step, len(running), sequence.rank
        num_tokens = sequence.num_to_run
        num_first = max(1, min(num_tokens, self._max_step_tokens - num_others))
        step_s = max(1e-9, step.seconds(num_others + num_first))
        assisted = sum([other.rank for other in running if other.placement is IN_HOST])
        return ColdRequest(
            route=self._loads.route(residency, now),
            num_layers=self._num_layers,
            step_s=step_s,
            prompt_s=step_s * math.ceil(num_tokens / num_first),
            beat_s=step.seconds(num_others),
            num_others=num_others,
            num_sharing=residency.num_waiting,
            row_rank=assisted + rank * num_first,
            rank=rank,
            num_tokens=num_tokens,
            chunk_tokens=num_first,
            token_s=step.marginal_s(1),
        )

    # -- learning ----------------------------------------------------------------------------------------------------

    def took_token(self, sequences: Iterable[Sequence], now: float) -> None:
        """Learn that these sequences got a token: for a cold one, its first."""
        for sequence in sequences:
            choice = self.choices.pop(sequence.seq_id, None)
            if choice is not None:
                self._ended(sequence, choice, now)

    def _ended(self, sequence: Sequence, choice: StartChoice, now: float) -> None:
        mode, expected_s, actual_s = choice.mode, choice.expected.first_token_s, now - choice.chosen_at
        sums = self._sums[mode]
        sums.num_starts += 1
        if not choice.is_held_up:
            error_s = abs(actual_s - expected_s)
            sums.num_measured += 1
            sums.expected_s += expected_s
            sums.actual_s += actual_s
            sums.error_s += error_s
            sums.relative_error += error_s / max(1e-9, actual_s)
            if mode is not ColdStart.ASSIST:
                self._assist.forget()
            self._learn(choice, actual_s)
        assert sequence.adapter is not None
        request_id, is_measured = sequence.request.request_id, not choice.is_held_up
        self._emit(ColdStartEnded(now, request_id, sequence.adapter, mode, expected_s, actual_s, is_measured))

    def _learn(self, choice: StartChoice, actual_s: float) -> None:
        self._corrections.observe(
            choice.mode, resident_s=choice.resident_s, delay_s=choice.plain_delay_s, actual_s=actual_s
        )

    def learn_step(self, plan: StepPlan, num_tokens: int, took_s: float, result: StepResult) -> bool:
        """Learn from a step with cold rows; return whether one with all weights on the device had taken as long."""
        is_next = plan.step_id == self._last_cold_step + 1
        self._num_cold_steps = self._num_cold_steps + 1 if is_next else 1
        self._last_cold_step = plan.step_id
        step = self._costs.step
        is_arriving = any(part.placement is ARRIVING for part in plan.sequences)
        row_rank = sum([part.rank * part.num_tokens for part in plan.sequences if part.placement is IN_HOST])
        if self._assist.is_beside and (is_arriving or row_rank):
            mode = ColdStart.LAYERS if is_arriving else ColdStart.ASSIST
            self._corrections.observe_launches(mode, result.launch_s, step.seconds(num_tokens))
        if is_arriving:
            return False
        if not row_rank or not result.cpu_share or not self._assist.is_beside:
            return not result.launch_s
        if step.num_observed >= NUM_STEPS and self._num_cold_steps <= RECENT:
            step_s = max(1e-9, result.launch_s, step.seconds(num_tokens) + step.last_residual_s)
            self._assist.observe(row_rank, step_s, self._num_layers, took_s, result.cpu_share)
        return False

    def statuses(self) -> tuple[ColdStartStatus, ...]:
        """Return the counters of each possible mode; none where the executor can only wait."""
        if len(self._possible) == 1:
            return ()
        return tuple(
            ColdStartStatus(
                mode=mode.value,
                num_starts=sums.num_starts,
                num_measured=sums.num_measured,
                expected_s=sums.expected_s,
                actual_s=sums.actual_s,
                error_s=sums.error_s / max(1, sums.num_measured),
                relative_error=sums.relative_error / max(1, sums.num_measured),
                correction=self._corrections.factor(mode),
            )
            for mode, sums in self._sums.items()
        )
