"""Answers: the new tokens of each request, the log-probabilities of its prompt, and its end.

::

    step's token --> add_token() --> Output                     if it is the last one,
                         +---------> finish()  --> Output with a reason, all memory released

Log-probabilities of a prompt are planned with its chunks and gathered until its first token::

    tokens      | prompt .......................................| first token
    chunks      |--- step 4 ---|--- step 5 ---|---- step 6 -----|
    reported    |..............|..............|...............|     every position but the last, which is sampled from
                                                              +---> one output, in the turn of the first token

A reported position must run, so prefix blocks are found only below the first one that was not reported yet
(``Sequence.num_reusable``). A pre-empted sequence keeps the rows that it has. Another engine that goes on with an
answer after its first token has nothing to report; before that token it begins again, and the client has none of it.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from manylora.core.engine.adapters.cache import AdapterCache
from manylora.core.engine.adapters.cold_starts import ColdStarts
from manylora.core.engine.queue_wait import QueueWait
from manylora.core.engine.status import Telemetry
from manylora.core.engine.steps.running import RunningSet
from manylora.core.events import RequestFinished
from manylora.core.plan import ARRIVING, PromptRows, StepResult
from manylora.core.scheduling import LengthPredictor, Policy, Sequence, SequenceStatus
from manylora.core.types import AdapterKey, FinishReason, Output, PromptLogprobs, SampledToken

__all__ = ["Answers"]


@dataclass(eq=False)
class Answers:
    """Collects outputs, and ends requests."""

    _sequences: dict[str, Sequence]  # all requests in flight by id; a request that ends is removed
    _running: RunningSet
    _policy: Policy
    _cache: AdapterCache
    _cold_starts: ColdStarts
    _predictor: LengthPredictor  # learns the lengths of answers
    _queue_wait: QueueWait  # learns of requests that ended
    _telemetry: Telemetry
    outputs: list[Output] = field(default_factory=list)  # since the last ``take``
    # The log-probabilities so far of each prompt that is reported, by ``seq_id``, a part per step.
    reports: dict[int, list[PromptLogprobs]] = field(default_factory=dict)
    _released: list[int] = field(default_factory=list)

    def take(self) -> list[Output]:
        """Return the outputs since the last call."""
        outputs, self.outputs = self.outputs, []
        return outputs

    def take_released(self) -> tuple[int, ...]:
        """Return the sequences that ended since the last call, for the executor to forget."""
        released = tuple(self._released)
        self._released.clear()
        return released

    # -- prompts -----------------------------------------------------------------------------------------------------

    def plan_reports(self, parts: Seq[tuple[Sequence, int]]) -> tuple[PromptRows, ...]:
        """Return the positions of prompts that a step reports; to be called before its sequences are launched."""
        planned = [sequence.scored(num) for sequence, num in parts if sequence.seq_id in self.reports]
        return tuple([rows for rows in planned if rows is not None])

    def report_prompts(self, result: StepResult, answered: Seq[Sequence]) -> None:
        """Gather the rows of a step, and give them to the requests that it answered with their first token."""
        for seq_id, rows in result.prompt_logprobs.items():
            if seq_id in self.reports:  # else it ended while the step ran
                self.reports[seq_id].append(rows)
        for sequence in answered:
            if sequence.seq_id in self.reports:
                rows = PromptLogprobs.join(self.reports.pop(sequence.seq_id))
                self.outputs.append(
                    Output(
                        request_id=sequence.request.request_id,
                        num_cached_tokens=sequence.num_cached,
                        adapter=sequence.adapter,
                        prompt_logprobs=rows,
                    )
                )

    def report_again(self, sequence: Sequence) -> None:
        """Learn that a step which was to report a part of a prompt has left its sequence out."""
        if sequence.seq_id in self.reports:
            self.reports[sequence.seq_id] = []
            sequence.unscored()

    # -- answers -----------------------------------------------------------------------------------------------------

    def add_token(self, sequence: Sequence, token: SampledToken, now: float) -> None:
        """Give a request its newest token, and end it if that was the last."""
        num_output = len(sequence.tokens) - sequence.num_prompt_tokens
        if token.token_id in sequence.stop_token_ids and num_output >= sequence.request.sampling.min_tokens:
            self.finish(sequence, FinishReason.STOP, now, token=token)
        elif num_output >= sequence.max_tokens:
            self.finish(sequence, FinishReason.LENGTH, now, token=token)
        else:
            self.outputs.append(
                Output(
                    request_id=sequence.request.request_id,
                    tokens=(token,),
                    num_cached_tokens=sequence.num_cached,
                    adapter=sequence.adapter,
                )
            )

    def fail_adapter(self, key: AdapterKey, error: str, now: float) -> None:
        """End the sequences that wait for an adapter that failed to load, or run on its weights as they arrive."""
        for sequence in list(self._sequences.values()):
            if sequence.adapter != key:
                continue
            if sequence.status is SequenceStatus.WAITING or sequence.placement is ARRIVING:
                sequence.failed(error)
                if not sequence.num_in_flight:
                    self.finish(sequence, FinishReason.ERROR, now)

    def finish(
        self, sequence: Sequence, reason: FinishReason, now: float, *, token: SampledToken | None = None
    ) -> None:
        """End a sequence: release its memory, at the latest when no step in flight uses it, and report it."""
        if sequence.status is SequenceStatus.RUNNING:
            if not sequence.num_in_flight:
                self._running.stop(sequence, now)
        else:
            self._policy.remove(sequence)
            if sequence.adapter is not None:
                self._cache.unwant(sequence.adapter, now)
        sequence.finished()
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._predictor.observe(sequence)
            self._telemetry.counters.num_answers += 1
            self._telemetry.counters.num_answer_tokens += sequence.num_output_tokens
        self._cold_starts.choices.pop(sequence.seq_id, None)
        self.reports.pop(sequence.seq_id, None)
        self._queue_wait.ended(sequence, now)
        del self._sequences[sequence.request.request_id]
        self._released.append(sequence.seq_id)
        self.outputs.append(
            Output(
                request_id=sequence.request.request_id,
                tokens=(token,) if token else (),
                finish=reason,
                stop_token=token.token_id if token and reason is FinishReason.STOP else None,
                num_cached_tokens=sequence.num_cached,
                adapter=sequence.adapter,
                error=sequence.failure if reason is FinishReason.ERROR else None,
                is_refused=sequence.is_refused,
            )
        )
        self._telemetry.emit(
            RequestFinished(
                now,
                sequence.request.request_id,
                sequence.adapter,
                reason,
                sequence.arrived_at,
                sequence.admitted_at,
                sequence.first_token_at,
                sequence.num_prompt_tokens,
                sequence.num_output_tokens,
                sequence.num_cached,
                sequence.num_preemptions,
                sequence.engine_s,
            )
        )
