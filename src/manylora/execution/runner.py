"""Run one step: from a plan to sampled tokens. Blocking and single-threaded; the executor owns the threads."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, groupby
from operator import itemgetter
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from manylora.core.costs.arriving import WaitBudget
from manylora.core.plan import PlannedSequence, StepPlan, StepResult
from manylora.core.types import AdapterKey, PromptLogprobs, SampledToken
from manylora.execution.assist.take_over import TakeOver
from manylora.execution.attention.call import AttentionKernel, attending
from manylora.execution.collectives import Collectives
from manylora.execution.device import DeviceOps
from manylora.execution.lora.batch import ArrivingBatch, LoraBatch, LoraSegment, StepContext, StepLora
from manylora.execution.lora.parts import Assist
from manylora.execution.model.head import PromptPiece, RecordedPass, cut_into_slices, pieces_of, rows_and_targets
from manylora.execution.sampling.logprobs import TokenReport, report_tokens
from manylora.execution.sampling.sampler import Sampler
from manylora.execution.step_graphs import StepGraphs
from manylora.execution.storage.arrival import ArrivingAdapter
from manylora.execution.storage.device_load import DeviceLoad
from manylora.execution.storage.resident import ResidentAdapter

if TYPE_CHECKING:
    from manylora.execution.assist.exchange import Assistant, AssistedStep, LostRows
    from manylora.execution.attention.triton import StepOutline

__all__ = ["LogitsHook", "ModelRunner", "OffDevice", "RowOrder", "SharedLogits"]

_Span = tuple[AdapterKey, int, int, int, int]
"""An adapter, its first row and one past its last, the same among the sampled rows."""

LogitsHook = Callable[[StepPlan, torch.Tensor], None]
"""Called with a plan and the logits ``[n, vocab]`` of its sampled sequences, in the plan's order."""

TOO_DEAR = "The form of the answer takes too much time to follow: it is too ambiguous or too large"
"""The failure of a sequence whose grammar is over its budget."""

NOT_FINITE = "the logits of the next token are not finite: the weights overflow on this input, or hold NaN"
"""The failure of a sequence whose row has no token."""

_LOST = "a worker on the CPU failed while it computed the adapter's part of a step"


@dataclass(frozen=True, slots=True)
class OffDevice:
    """The adapters of a step that are not on the device, by key."""

    # Adapters that the step reads from host memory.
    in_host: Mapping[AdapterKey, ResidentAdapter] = field(default_factory=dict)
    # Adapters that the step waits for, group by group. If an adapter does not arrive, its sequences fail; if it is
    # late, they get no token in this step. Other sequences are not affected.
    arriving: Mapping[AdapterKey, ArrivingAdapter] = field(default_factory=dict)
    # The loads of adapters in host memory: the device takes over the groups that arrive in time from the assistant.
    coming: Mapping[AdapterKey, DeviceLoad] = field(default_factory=dict)
    wait_budget: WaitBudget = field(default_factory=WaitBudget)  # of the arriving adapters

    def find(self, key: AdapterKey) -> ResidentAdapter | None:
        """Return an adapter's weights, ``None`` if they are on the device."""
        arriving = self.arriving.get(key)
        return self.in_host.get(key) if arriving is None else arriving.weights

    def wait_for_copies(self) -> bool:
        """Let the device wait for the arriving adapters; return False if any is not wholly in the copies' stream yet.

        A graph reads all weights at once. It is launched the sooner: what is left of a copy takes less time than the
        launches of a step one by one.
        """
        if not all(adapter.arrival.is_complete for adapter in self.arriving.values()):
            return False
        for adapter in self.arriving.values():
            adapter.wait_for_all()
        return True

    def absent(self, sequences: Sequence[PlannedSequence]) -> tuple[dict[int, str], frozenset[int]]:
        """Return why sequences have failed whose adapter will not arrive, and the sequences whose adapter is late."""
        failed: dict[int, str] = {}
        late: list[int] = []
        for sequence in sequences if self.arriving else ():
            adapter = self.arriving.get(sequence.adapter) if sequence.adapter is not None else None
            if adapter is not None and adapter.arrival.error is not None:
                failed[sequence.seq_id] = adapter.arrival.error
            elif adapter is not None and adapter.is_late:
                late.append(sequence.seq_id)
        return failed, frozenset(late)


NOTHING_OFF_DEVICE = OffDevice()


@dataclass(frozen=True, slots=True)
class RowOrder:
    """The order of a step's rows, in which those of one adapter are adjacent, and what follows from it."""

    places: Sequence[int]  # places of the sequences in the plan
    spans: Sequence[_Span]  # rows of each adapter
    outline: StepOutline | None  # for a graph, if one can run the step


@dataclass(frozen=True, slots=True)
class SharedLogits:
    """The logits of workers that share a model: worker 0 has them all, and chooses tokens alone."""

    workers: Collectives
    vocab_size: int

    def gather(self, logits: torch.Tensor) -> torch.Tensor | None:
        """Return logits ``[n, vocab]`` from those of each worker's tokens; ``None`` on all workers but the first."""
        whole = self.workers.gather(logits) if len(logits) else logits.new_empty(0, self.vocab_size)
        return None if whole is None or not self.workers.is_first else whole[:, : self.vocab_size]


@dataclass(eq=False)
class ModelRunner:
    """The model with its pages and resident adapters."""

    model: nn.Module  # the causal language model with its modules replaced (``model.modules``)
    _step: StepContext  # the context that those modules read
    _attention: AttentionKernel  # attention over the pages
    sampler: Sampler  # chooses tokens from logits
    ops: DeviceOps  # operations of the device
    _graphs: StepGraphs | None = None  # runs steps, where it can
    # Computes adapters in host memory beside the device; without one, kernels read them in place.
    _assistant: Assistant | None = None
    _last_lora: LoraBatch | None = None
    # Adapters on the device; changed by the executor.
    resident: dict[AdapterKey, ResidentAdapter] = field(default_factory=dict)
    share: SharedLogits | None = None  # of a model that several workers share, who all run the same steps
    announce: Callable[[StepPlan], None] | None = None  # tells the other workers of each step before it runs
    logits_hook: LogitsHook | None = None

    def __post_init__(self) -> None:
        self._recorded = RecordedPass(self.model)

    @torch.inference_mode()
    def run(
        self,
        plan: StepPlan,
        adapters: OffDevice = NOTHING_OFF_DEVICE,
        launched: Callable[[], None] = lambda: None,
        order: RowOrder | None = None,
    ) -> StepResult:
        """Run the step and return its tokens.

        ``launched`` is called when its graph is on its way, or before its launches one by one; not for an empty step.
        ``order`` is that of these sequences, if it is known already (``arrange``).
        """
        if self.announce is not None:
            self.announce(plan)
        self.sampler.release(plan.released)
        self._attention.release(plan.released)
        if not plan.sequences:
            return StepResult()
        order = order or self.arrange(plan.sequences)
        sequences = [plan.sequences[place] for place in order.places]
        if self.share is None or self.share.workers.is_first:  # tokens are chosen here
            self.sampler.begin([sequence for sequence in sequences if sequence.is_sampled])
        segments, assisted = self._segments(order.spans, adapters)
        batch = self._last_lora = self._batch(segments)
        assist = self._begin_assist(tuple(assisted.values()))
        loads = [adapters.coming.get(key) for key in assisted]
        take_over = TakeOver(segments, assist, loads, self._batch) if assist is not None and adapters.coming else None
        lora: StepLora | None = take_over or batch
        with _assisting(assist) as lost:
            logits: torch.Tensor | None = None
            launch_s = 0.0
            if assist is None and not plan.prompt_rows:
                logits = self._replay(order.outline, sequences, segments, adapters)
            launched()
            if logits is None:
                if adapters.arriving:
                    assert lora is not None, "the adapters on their way are those of sequences"
                    lora = ArrivingBatch(lora, tuple(adapters.arriving.values()))
                began_at = time.perf_counter() - adapters.wait_budget.spent_s
                logits = self._forward(sequences, lora, take_over or assist, is_recorded=bool(plan.prompt_rows))
                if self._graphs is not None:
                    launch_s = time.perf_counter() - adapters.wait_budget.spent_s - began_at
            failed, late = adapters.absent(sequences)
            tokens, broken = self._sample(plan, sequences, logits, late.union(failed))
        failed |= broken | dict.fromkeys(_find_lost(sequences, lost), _LOST)
        reported: dict[int, PromptLogprobs] = {}
        if plan.prompt_rows:
            wanted = [rows for rows in plan.prompt_rows if rows.seq_id not in failed and rows.seq_id not in late]
            vocab_size = logits.shape[-1] if self.share is None else self.share.vocab_size
            reported, unreported, unscored = self._report(pieces_of(sequences, wanted), vocab_size, adapters)
            failed, late = failed | unreported, late | unscored
        return StepResult(
            tokens={seq_id: token for seq_id, token in tokens.items() if seq_id not in failed} if failed else tokens,
            failed=failed,
            refused=frozenset([seq_id for seq_id, reason in failed.items() if reason is TOO_DEAR]),
            late=late,
            prompt_logprobs=reported,
            cpu_share=take_over.cpu_share if take_over is not None else 1.0,
            launch_s=launch_s,
        )

    def _replay(
        self,
        outline: StepOutline | None,
        sequences: Sequence[PlannedSequence],
        segments: Sequence[LoraSegment],
        adapters: OffDevice,
    ) -> torch.Tensor | None:
        """Run the step by a graph; return logits of the sampled rows, ``None`` if no graph can run it."""
        if self._graphs is None or outline is None or not adapters.wait_for_copies():
            return None
        return self._graphs.run(sequences, segments, outline)

    @property
    def replays(self) -> bool:
        """Whether steps are replayed as graphs, so that the device waits for what the host does before each."""
        return self._graphs is not None

    def arrange(self, sequences: Sequence[PlannedSequence]) -> RowOrder:
        """Return the order of a step's rows; any thread may ask, while the step before is running."""
        of: dict[AdapterKey | None, list[int]] = {}
        for place, sequence in enumerate(sequences):
            of.setdefault(sequence.adapter, []).append(place)  # adapters by first appearance
        places = list(chain.from_iterable(of.values()))
        ordered = [sequences[place] for place in places]
        spans = _find_spans((one.adapter, one.num_tokens, int(one.is_sampled)) for one in ordered)
        return RowOrder(places, spans, self._graphs.outline(ordered) if self._graphs is not None else None)

    def _sample(
        self, plan: StepPlan, sequences: Sequence[PlannedSequence], logits: torch.Tensor, without: Set[int]
    ) -> tuple[dict[int, SampledToken], dict[int, str]]:
        """Return the tokens of the sampled rows, and the reason of each that has none; then the device is done.

        ``logits`` are those of the sampled ``sequences``, in order; those ``without`` a result are left out.
        """
        sampled = [sequence for sequence in sequences if sequence.is_sampled]
        if self.share is not None:
            whole = self.share.gather(logits)
            if whole is None:
                self.ops.wait()
                return {}, {}
            logits = whole
        if without:
            plan = replace(plan, sequences=tuple(s for s in plan.sequences if s.seq_id not in without), released=())
            logits = logits[[row for row, s in enumerate(sampled) if s.seq_id not in without]]
            sampled = [sequence for sequence in sampled if sequence.seq_id not in without]
        if self.logits_hook is not None:
            row_of = {sequence.seq_id: row for row, sequence in enumerate(sampled)}
            order = [row_of[sequence.seq_id] for sequence in plan.sequences if sequence.is_sampled]
            self.logits_hook(plan, logits[order])
        if not sampled:
            # No token is read back, which would wait for the device; and pages may change owners once we return.
            self.ops.wait()
            return {}, {}
        chosen = self.sampler.sample(logits, sampled)
        tokens = {s.seq_id: token for s, token in zip(sampled, chosen, strict=True) if token is not None}
        if len(tokens) == len(chosen):
            return tokens, {}
        broken = [s.seq_id for s in sampled if s.seq_id not in tokens]
        return tokens, {id: TOO_DEAR if self.sampler.is_over_budget(id) else NOT_FINITE for id in broken}

    def _report(
        self, pieces: Sequence[PromptPiece], vocab_size: int, adapters: OffDevice
    ) -> tuple[dict[int, PromptLogprobs], dict[int, str], frozenset[int]]:
        """Return the log-probabilities of prompts in the step that ran; why others have failed, or which are late.

        The step waited for the weights of the head only if it sampled a row with an adapter, so this may wait as well,
        for chunks that have no token.
        """
        parts: dict[int, list[PromptLogprobs]] = {}
        failed: dict[int, str] = {}
        for taken in cut_into_slices(pieces, vocab_size):
            report, lost = self._report_slice(taken, adapters)
            if report is None:
                continue
            first = 0
            for piece in taken:
                last = first + piece.stop - piece.start
                parts.setdefault(piece.sequence.seq_id, []).append(report.pack(first, last, piece.num_top))
                if any(max(first, part.start) < min(last, part.stop) for part in lost):
                    failed[piece.sequence.seq_id] = _LOST
                first = last
        self._recorded.forget()
        errors, late = adapters.absent([piece.sequence for piece in pieces])
        failed |= errors
        without = late.union(failed)
        return {key: PromptLogprobs.join(part) for key, part in parts.items() if key not in without}, failed, late

    def _report_slice(
        self, pieces: Sequence[PromptPiece], adapters: OffDevice
    ) -> tuple[TokenReport | None, Sequence[LostRows]]:
        """Return the report of a slice, all of whose rows count as sampled, and the rows of workers that failed.

        Of workers that share the model, the first alone has a report.
        """
        counts = ((piece.sequence.adapter, piece.stop - piece.start) for piece in pieces)
        segments, assisted = self._segments(_find_spans((key, number, number) for key, number in counts), adapters)
        assist = self._begin_assist(tuple(assisted.values()))
        lora: StepLora | None = self._batch(segments)
        if lora is not None and adapters.arriving:
            lora = ArrivingBatch(lora, tuple(adapters.arriving.values()))
        self._step.lora, self._step.assist = lora, assist
        with _assisting(assist) as lost:
            try:
                rows, targets = rows_and_targets(pieces)
                logits: torch.Tensor | None = self._recorded.logits(self.ops.upload(rows)).float()
                if self.share is not None and logits is not None:
                    logits = self.share.gather(logits)
                if logits is None:
                    return None, lost
                report = report_tokens(logits, targets, max(piece.num_top for piece in pieces), self.ops)
            finally:
                self._step.lora = self._step.assist = None
        return report, lost

    def _begin_assist(self, segments: tuple[LoraSegment, ...]) -> AssistedStep | None:
        """Wake the workers for the segments that they compute, if there are any."""
        return self._assistant.begin(segments) if self._assistant is not None and segments else None

    def compile(self, num_tokens: int) -> None:
        """Compile the kernels that a step of up to ``num_tokens`` tokens may need, and capture graphs."""
        self.sampler.compile()
        if self._step.space is not None:
            self._step.space.compile(num_tokens)
        if self._graphs is not None:
            self._graphs.warm()

    def forget_batch(self) -> None:
        """Let go of the last step's adapters, which are kept for the next: they may hold images of the host tier."""
        self._last_lora = None
        if self._assistant is not None:
            self._assistant.forget()

    def _forward(
        self, sequences: Sequence[PlannedSequence], lora: StepLora | None, assist: Assist | None, *, is_recorded: bool
    ) -> torch.Tensor:
        """Call the model; return logits ``[n, vocab]`` of the sampled rows, float32."""
        batch = self._attention.prepare(sequences)
        ids = [token for s in sequences for token in s.tokens[s.start : s.start + s.num_tokens]]
        token_ids = self.ops.upload(np.asarray(ids, dtype=np.int64))
        ends = accumulate(sequence.num_tokens for sequence in sequences)
        sampled = [end - 1 for end, sequence in zip(ends, sequences, strict=True) if sequence.is_sampled]
        self._step.lora, self._step.token_ids, self._step.assist = lora, token_ids, assist
        try:
            with attending(batch), self._recorded.recording() if is_recorded else nullcontext():
                output = self.model(
                    input_ids=token_ids[None],
                    position_ids=batch.positions[None],
                    use_cache=False,
                    logits_to_keep=self.ops.upload(np.asarray(sampled, dtype=np.int64)),
                )
        finally:
            self._step.lora = self._step.token_ids = self._step.assist = None
        logits: torch.Tensor = output.logits
        return logits[0].float()

    def _segments(
        self, spans: Sequence[_Span], adapters: OffDevice
    ) -> tuple[tuple[LoraSegment, ...], dict[AdapterKey, LoraSegment]]:
        """Return the segments of the kernels here, and by adapter those that the assistant computes."""
        segments: list[LoraSegment] = []
        assisted: dict[AdapterKey, LoraSegment] = {}
        for key, *rows in spans:
            segment = LoraSegment(adapters.find(key) or self.resident[key], *rows)
            if self._assistant is not None and key in adapters.in_host:
                assisted[key] = segment
            else:
                segments.append(segment)
        return tuple(segments), assisted

    def _batch(self, segments: tuple[LoraSegment, ...]) -> LoraBatch | None:
        """Return a batch of these segments, ``None`` without any; the last step's batch if it had the same segments."""
        if self._last_lora is not None and self._last_lora.segments == segments:
            return self._last_lora
        return LoraBatch(segments, self._step.space) if segments else None


@contextmanager
def _assisting(assist: AssistedStep | None) -> Iterator[list[LostRows]]:
    """End the assistance of the code inside; the list that is yielded then has the rows of workers that failed."""
    lost: list[LostRows] = []
    try:
        yield lost
    except BaseException:
        if assist is not None:
            assist.break_off()
        raise
    if assist is not None:
        lost += assist.finish()


def _find_spans(rows: Iterable[tuple[AdapterKey | None, int, int]]) -> list[_Span]:
    """Return the rows of each adapter: ``rows`` are (adapter, rows, sampled rows) of each part, in the step's order."""
    spans: list[_Span] = []
    row = sampled = 0
    for key, parts in groupby(rows, key=itemgetter(0)):
        start, sampled_start = row, sampled
        for _, num_rows, num_sampled in parts:
            row += num_rows
            sampled += num_sampled
        if key is not None:
            spans.append((key, start, row, sampled_start, sampled))
    return spans


def _find_lost(sequences: Sequence[PlannedSequence], lost: Sequence[LostRows]) -> set[int]:
    found: set[int] = set()
    row = sampled = 0
    for sequence in sequences if lost else ():
        rows, own = row + sequence.num_tokens, sampled + sequence.is_sampled
        for part in lost:
            start, stop = (sampled, own) if part.is_sampled else (row, rows)
            if max(start, part.start) < min(stop, part.stop):
                found.add(sequence.seq_id)
        row, sampled = rows, own
    return found
