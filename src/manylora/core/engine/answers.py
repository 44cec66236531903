"""Answers: the new tokens of each request, and its end.

::

    step's token --> token() --> Output          or, if it is the last one,
                       +-------> finish() --> Output with a reason, all memory released, ``released`` in the next plan
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Seq

from manylora.core.engine.adapters.cache import AdapterCache
from manylora.core.engine.prompt_logprobs import PromptReports
from manylora.core.engine.queue_wait import QueueWait
from manylora.core.engine.status import Counters
from manylora.core.engine.steps.running import RunningSet
from manylora.core.events import EventSink, RequestFinished
from manylora.core.plan import ARRIVING, StepResult
from manylora.core.scheduling import LengthPredictor, Policy, Sequence, SequenceStatus
from manylora.core.types import AdapterKey, FinishReason, Output, SampledToken

__all__ = ["Answers"]

FINISH_WINDOW = 64
"""Finished requests over which the rate of finishing is measured, for Retry-After."""


class Answers:
    """Collects outputs, and ends requests.

    Args:
        sequences: All requests in flight by id; one that ends is removed.
        reports: Log-probabilities of prompts.
        predictor: Learns the lengths of answers.
        queue_wait: Forgets requests that ended.
        counters: Counts answers and their tokens.
    """

    def __init__(
        self,
        *,
        sequences: dict[str, Sequence],
        reports: PromptReports,
        running: RunningSet,
        policy: Policy,
        cache: AdapterCache,
        predictor: LengthPredictor,
        queue_wait: QueueWait,
        counters: Counters,
        emit: EventSink,
    ) -> None:
        self._sequences = sequences
        self._reports = reports
        self._running = running
        self._policy = policy
        self._cache = cache
        self._predictor = predictor
        self._queue_wait = queue_wait
        self._counters = counters
        self._emit = emit
        self._outputs: list[Output] = []
        self._released: list[int] = []
        self._finish_times: deque[float] = deque(maxlen=FINISH_WINDOW)

    def __len__(self) -> int:
        return len(self._outputs)

    def take(self) -> list[Output]:
        """Return the outputs since the last call."""
        outputs, self._outputs = self._outputs, []
        return outputs

    def take_released(self) -> tuple[int, ...]:
        """Return the sequences that ended since the last call, for the executor to forget."""
        released = tuple(self._released)
        self._released.clear()
        return released

    def every_s(self, now: float) -> float:
        """Return the time from the end of one request to that of the next, lately; a second before two have ended."""
        if len(self._finish_times) < 2:
            return 1.0
        return (now - self._finish_times[0]) / len(self._finish_times)

    def token(self, sequence: Sequence, token: SampledToken, now: float) -> None:
        """Give a request its newest token, and end it if that was the last."""
        num_output = len(sequence.tokens) - sequence.num_prompt_tokens
        if token.token_id in sequence.stop_token_ids and num_output >= sequence.request.sampling.min_tokens:
            self.finish(sequence, FinishReason.STOP, now, token=token)
        elif num_output >= sequence.max_tokens:
            self.finish(sequence, FinishReason.LENGTH, now, token=token)
        else:
            self._outputs.append(
                Output(
                    request_id=sequence.request.request_id,
                    tokens=(token,),
                    num_cached_tokens=sequence.num_cached,
                    adapter=sequence.adapter,
                )
            )

    def report_prompts(self, result: StepResult, served: Seq[Sequence]) -> None:
        """Give the log-probabilities of prompts to requests that a step serves for the first time."""
        self._outputs += self._reports.take(result, served)

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
        self,
        sequence: Sequence,
        reason: FinishReason,
        now: float,
        *,
        token: SampledToken | None = None,
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
            self._counters.answers += 1
            self._counters.answer_tokens += sequence.num_output_tokens
        self._running.forget(sequence)
        self._reports.forget(sequence)
        self._queue_wait.ended(sequence)
        request_id = sequence.request.request_id
        del self._sequences[request_id]
        self._released.append(sequence.seq_id)
        self._finish_times.append(now)
        self._outputs.append(
            Output(
                request_id=request_id,
                tokens=(token,) if token else (),
                finish=reason,
                stop_token=token.token_id if token and reason is FinishReason.STOP else None,
                num_cached_tokens=sequence.num_cached,
                adapter=sequence.adapter,
                error=sequence.failure if reason is FinishReason.ERROR else None,
                is_refused=sequence.is_refused,
            )
        )
        self._emit(
            RequestFinished(
                now,
                request_id,
                sequence.adapter,
                reason,
                sequence.arrived_at,
                sequence.admitted_at,
                sequence.first_token_at,
                sequence.num_prompt_tokens,
                sequence.num_output_tokens,
                sequence.num_cached,
                sequence.num_preemptions,
            )
        )
