"""Run one step: from a plan to sampled tokens. Blocking and single-threaded; the executor owns the threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import accumulate, groupby
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import nn

from manylora.core.plan import PlannedSequence, StepPlan, StepResult
from manylora.core.types import AdapterKey, Constraint, PromptLogprobs, SampledToken
from manylora.execution.assist.take_over import Coming, TakeOver
from manylora.execution.attention.step import AttentionKernel, TorchAttentionKernel
from manylora.execution.decode_graphs import DecodeGraphs
from manylora.execution.device import DeviceOps, make_device_ops
from manylora.execution.lora.assisted import Assist
from manylora.execution.lora.batch import ArrivingBatch, LoraBatch, LoraSegment, StepContext, StepLora
from manylora.execution.lora.tables import LoraSpace
from manylora.execution.model.head import RecordedPass
from manylora.execution.prompt_rows import PromptPiece, cut_into_slices, pieces_of, rows_and_targets
from manylora.execution.sampling.logprobs import report_tokens
from manylora.execution.storage.arrival import ArrivingAdapter
from manylora.execution.storage.page_tensor import PageTensor
from manylora.execution.storage.resident import ResidentAdapter

if TYPE_CHECKING:
    from manylora.execution.assist.exchange import Assistant, AssistedStep, LostRows

__all__ = ["LogitsHook", "ModelRunner", "TokenSampler"]

LogitsHook = Callable[[StepPlan, torch.Tensor], None]
"""Called with a plan and the logits ``[n, vocab]`` of its sampled sequences, in the plan's order."""

TOO_DEAR = "The form of the answer takes too much time to follow: it is too ambiguous or too large"
"""The failure of a sequence whose grammar is over its budget."""

NOT_FINITE = "the logits of the next token are not finite: the weights overflow on this input, or hold NaN"
"""The failure of a sequence whose row has no token."""

_NONE: Mapping[AdapterKey, ResidentAdapter] = {}
_NONE_ARRIVING: Mapping[AdapterKey, ArrivingAdapter] = {}
_NONE_COMING: Mapping[AdapterKey, Coming] = {}

_LATE = "the adapter did not arrive in time for the log-probabilities of the prompt"
_LOST = "a worker on the CPU failed while it computed the adapter's part of a step"


class TokenSampler(Protocol):
    """Chooses tokens from logits."""

    def begin(self, sequences: Sequence[PlannedSequence]) -> None:
        """Begin the work for the sampled sequences of a step that needs no logits, beside the model."""
        ...

    def sample(self, logits: torch.Tensor, sequences: Sequence[PlannedSequence]) -> list[SampledToken | None]:
        """Return a token per row of ``logits`` ``[n, vocab]``, float32; row *i* belongs to ``sequences[i]``.

        A row whose logits are not finite has none, nor has a row that is over its budget.
        """
        ...

    def is_over_budget(self, seq_id: int) -> bool:
        """Return whether a sequence has no token because the form of its answer takes too much time."""
        ...

    def release(self, seq_ids: Sequence[int]) -> None:
        """Drop the state of sequences that have left the engine."""
        ...

    def prepare(self, constraint: Constraint) -> None:
        """Compile a constraint before its request; blocks, safe from any thread. ``RequestError`` if it cannot be."""
        ...


class ModelRunner:
    """The model with its pages and resident adapters.

    Args:
        model: The causal language model with its modules replaced (``model.modules``).
        step: The context that those modules read.
        resident: Adapters on the device by key; changed by the executor.
        space: Makes the tables of a table-driven LoRA kernel.
        graphs: Runs decode steps, where it can.
        assistant: Computes adapters in host memory beside the device; without one, kernels read them in place.
    """

    def __init__(
        self,
        model: nn.Module,
        step: StepContext,
        pages: PageTensor,
        sampler: TokenSampler,
        resident: Mapping[AdapterKey, ResidentAdapter],
        space: LoraSpace | None = None,
        attention: AttentionKernel | None = None,
        ops: DeviceOps | None = None,
        graphs: DecodeGraphs | None = None,
        assistant: Assistant | None = None,
    ) -> None:
        self._model = model
        self._step = step
        self._pages = pages
        self._sampler = sampler
        self._resident = resident
        self._space = space
        self._attention: AttentionKernel = attention or TorchAttentionKernel(pages)
        self._ops = ops or make_device_ops(pages.flat.device)
        self._graphs = graphs
        self._assistant = assistant
        self._last_lora: LoraBatch | None = None
        self._recorded = RecordedPass(model)
        self.logits_hook: LogitsHook | None = None

    @torch.inference_mode()
    def run(
        self,
        plan: StepPlan,
        in_host: Mapping[AdapterKey, ResidentAdapter] = _NONE,
        arriving: Mapping[AdapterKey, ArrivingAdapter] = _NONE_ARRIVING,
        coming: Mapping[AdapterKey, Coming] = _NONE_COMING,
    ) -> StepResult:
        """Run the step and return its tokens.

        Args:
            plan: The step.
            in_host: The adapters that it reads from host memory.
            arriving: The adapters that it has to wait for, group by group. The sequences of one that does not arrive
                have failed, and those of one that is late are given up; the others are not affected.
            coming: The loads of adapters that it reads from host memory: the device takes over the groups that arrive
                in time from the assistant.
        """
        self._sampler.release(plan.released)
        self._attention.release(plan.released)
        if not plan.sequences:
            return StepResult()
        sequences = _by_adapter(plan.sequences)
        sampled = [sequence for sequence in sequences if sequence.is_sampled]
        self._sampler.begin(sampled)
        elsewhere = {**in_host, **{key: one.weights for key, one in arriving.items()}} if arriving else in_host
        segments, assisted = self._segments(sequences, elsewhere, in_host)
        lora: StepLora | None = self._lora_batch(segments)
        assist = self._begin_assist(tuple(assisted.values()))
        take_over = None
        if assist is not None and coming:
            loads = [coming.get(key) for key in assisted]
            lora = take_over = TakeOver(segments, assist, loads, self._make_batch)
        is_recorded = bool(plan.prompt_rows)
        failed: dict[int, str] = {}
        late: frozenset[int] = frozenset()
        with _assisting(assist) as lost:
            logits: torch.Tensor | None = None
            if arriving:
                assert lora is not None, "the adapters on their way are those of sequences"
                waiting = ArrivingBatch(lora, tuple(arriving.values()))
                logits = self._forward(sequences, waiting, take_over or assist, is_recorded=is_recorded)
                failed = {s.seq_id: error for s in sequences if (error := _error_of(s, arriving)) is not None}
                missed = [key for key, one in arriving.items() if one.is_late]
                late = frozenset([s.seq_id for s in sequences if s.adapter in missed and s.seq_id not in failed])
            elif self._graphs is not None and assist is None:
                logits = self._graphs.run(sequences, segments)
            if logits is None:
                logits = self._forward(sequences, lora, take_over or assist, is_recorded=is_recorded)
            if without := late.union(failed):
                kept = tuple(s for s in plan.sequences if s.seq_id not in without)
                plan = replace(plan, sequences=kept, released=())
                logits = logits[[row for row, s in enumerate(sampled) if s.seq_id not in without]]
                sampled = [s for s in sampled if s.seq_id not in without]
            tokens, broken = self._sample(plan, logits, sampled)
            failed |= broken
        if lost:
            failed |= dict.fromkeys(_find_lost(sequences, lost), _LOST)
        reported: dict[int, PromptLogprobs] = {}
        if is_recorded:
            without = late.union(failed)
            pieces = [piece for piece in pieces_of(sequences, plan.prompt_rows) if piece.sequence.seq_id not in without]
            reported, unreported = self._report(pieces, logits.shape[-1], elsewhere, in_host, arriving)
            failed |= unreported
        if failed:
            tokens = {key: token for key, token in tokens.items() if key not in failed}
        cpu_share = take_over.cpu_share if take_over is not None else 1.0
        refused = frozenset([seq_id for seq_id, reason in failed.items() if reason is TOO_DEAR])
        return StepResult(
            tokens=tokens, failed=failed, refused=refused, late=late, prompt_logprobs=reported, cpu_share=cpu_share
        )

    def _sample(
        self, plan: StepPlan, logits: torch.Tensor, sampled: Sequence[PlannedSequence]
    ) -> tuple[dict[int, SampledToken], dict[int, str]]:
        """Return the tokens of the sampled rows, and the reason of each that has none; then the device is done."""
        if self.logits_hook is not None:
            row_of = {sequence.seq_id: row for row, sequence in enumerate(sampled)}
            order = [row_of[sequence.seq_id] for sequence in plan.sequences if sequence.is_sampled]
            self.logits_hook(plan, logits[order])
        if not sampled:
            # No token is read back, which would wait for the device; and pages may change owners once we return.
            self._ops.wait()
            return {}, {}
        chosen = self._sampler.sample(logits, sampled)
        tokens = {s.seq_id: token for s, token in zip(sampled, chosen, strict=True) if token is not None}
        if len(tokens) == len(chosen):
            return tokens, {}
        without = [s.seq_id for s in sampled if s.seq_id not in tokens]
        return tokens, {id: TOO_DEAR if self._sampler.is_over_budget(id) else NOT_FINITE for id in without}

    def _report(
        self,
        pieces: Sequence[PromptPiece],
        vocab_size: int,
        elsewhere: Mapping[AdapterKey, ResidentAdapter],
        in_host: Mapping[AdapterKey, ResidentAdapter],
        arriving: Mapping[AdapterKey, ArrivingAdapter],
    ) -> tuple[dict[int, PromptLogprobs], dict[int, str]]:
        """Return the log-probabilities of prompts in the step that ran, and the reason of each that has none.

        The step waited for the weights of the head only if it sampled a row with an adapter, so this may wait as well.
        """
        parts: dict[int, list[PromptLogprobs]] = {}
        failed: dict[int, str] = {}
        for taken in cut_into_slices(pieces, vocab_size):
            segments, assisted = self._slice_segments(taken, elsewhere, in_host)
            assist = self._begin_assist(assisted)
            lora: StepLora | None = LoraBatch(segments, self._space) if segments else None
            if lora is not None and arriving:
                lora = ArrivingBatch(lora, tuple(arriving.values()))
            self._step.lora, self._step.assist = lora, assist
            with _assisting(assist) as lost:
                try:
                    rows, targets = rows_and_targets(taken)
                    logits = self._recorded.logits(self._ops.upload(rows)).float()
                    report = report_tokens(logits, targets, max(piece.num_top for piece in taken), self._ops)
                finally:
                    self._step.lora = self._step.assist = None
            first = 0
            for piece in taken:
                last = first + piece.stop - piece.start
                parts.setdefault(piece.sequence.seq_id, []).append(report.pack(first, last, piece.num_top))
                if any(max(first, part.start) < min(last, part.stop) for part in lost):
                    failed[piece.sequence.seq_id] = _LOST
                first = last
        self._recorded.forget()
        failed |= {s.seq_id: error for s, *_ in pieces if (error := _error_of(s, arriving)) is not None}
        late = [key for key, one in arriving.items() if one.is_late]
        failed |= dict.fromkeys([s.seq_id for s, *_ in pieces if s.adapter in late], _LATE)
        return {key: PromptLogprobs.join(part) for key, part in parts.items() if key not in failed}, failed

    def _slice_segments(
        self,
        pieces: Sequence[PromptPiece],
        elsewhere: Mapping[AdapterKey, ResidentAdapter],
        in_host: Mapping[AdapterKey, ResidentAdapter],
    ) -> tuple[tuple[LoraSegment, ...], tuple[LoraSegment, ...]]:
        """Return the segments of a slice, all of whose rows count as sampled; as ``_segments``."""
        segments: list[LoraSegment] = []
        assisted: list[LoraSegment] = []
        row = 0
        for key, same in groupby(pieces, key=lambda piece: piece.sequence.adapter):
            start, row = row, row + sum(piece.stop - piece.start for piece in same)
            if key is not None:
                weights = elsewhere[key] if key in elsewhere else self._resident[key]
                chosen = assisted if self._assistant is not None and key in in_host else segments
                chosen.append(LoraSegment(weights, start, row, start, row))
        return tuple(segments), tuple(assisted)

    def _begin_assist(self, segments: tuple[LoraSegment, ...]) -> AssistedStep | None:
        """Wake the workers for the segments that they compute, if there are any."""
        return self._assistant.begin(segments) if self._assistant is not None and segments else None

    def forget_batch(self) -> None:
        """Let go of the last step's adapters, which are kept for the next: they may hold images of the host tier."""
        self._last_lora = None
        if self._assistant is not None:
            self._assistant.forget()

    def _forward(
        self,
        sequences: Sequence[PlannedSequence],
        lora: StepLora | None,
        assist: Assist | None,
        *,
        is_recorded: bool,
    ) -> torch.Tensor:
        """Call the model; return logits ``[n, vocab]`` of the sampled rows, float32."""
        batch = self._attention.prepare(sequences)
        ids = [token for s in sequences for token in s.tokens[s.start : s.start + s.num_tokens]]
        token_ids = self._ops.upload(np.asarray(ids, dtype=np.int64))
        self._step.lora, self._step.token_ids, self._step.assist = lora, token_ids, assist
        try:
            with self._recorded.recording() if is_recorded else nullcontext():
                output = self._model(
                    input_ids=token_ids[None],
                    position_ids=batch.positions[None],
                    use_cache=False,
                    logits_to_keep=self._ops.upload(np.asarray(_sampled_rows(sequences), dtype=np.int64)),
                    paged=batch,
                )
        finally:
            self._step.lora = self._step.token_ids = self._step.assist = None
        logits: torch.Tensor = output.logits
        return logits[0].float()

    def _segments(
        self,
        sequences: Sequence[PlannedSequence],
        elsewhere: Mapping[AdapterKey, ResidentAdapter],
        in_host: Mapping[AdapterKey, ResidentAdapter],
    ) -> tuple[tuple[LoraSegment, ...], dict[AdapterKey, LoraSegment]]:
        """Return the step's segments: those of the kernels here, and by adapter those that the assistant computes."""
        segments: list[LoraSegment] = []
        assisted: dict[AdapterKey, LoraSegment] = {}
        row = sampled = first = 0
        while first < len(sequences):
            key = sequences[first].adapter
            last, start, sampled_start = first, row, sampled
            while last < len(sequences) and sequences[last].adapter == key:
                row += sequences[last].num_tokens
                sampled += sequences[last].is_sampled
                last += 1
            if key is not None:
                weights = elsewhere[key] if key in elsewhere else self._resident[key]
                segment = LoraSegment(weights, start, row, sampled_start, sampled)
                if self._assistant is not None and key in in_host:
                    assisted[key] = segment
                else:
                    segments.append(segment)
            first = last
        return tuple(segments), assisted

    def _lora_batch(self, segments: tuple[LoraSegment, ...]) -> LoraBatch | None:
        """Return the batch of these segments, ``None`` when there are none."""
        if not segments:
            self._last_lora = None
        elif self._last_lora is None or self._last_lora.segments != segments:
            self._last_lora = LoraBatch(segments, self._space)
        return self._last_lora

    def _make_batch(self, segments: tuple[LoraSegment, ...]) -> LoraBatch | None:
        """Return a batch of these segments, for one step unless it is the last one's."""
        if self._last_lora is not None and self._last_lora.segments == segments:
            return self._last_lora
        return LoraBatch(segments, self._space) if segments else None


@contextmanager
def _assisting(assist: AssistedStep | None) -> Iterator[list[LostRows]]:
    """End the assistance of what is inside; yield a list that afterwards has the rows of workers that failed."""
    lost: list[LostRows] = []
    try:
        yield lost
    except BaseException:
        if assist is not None:
            assist.break_off()
        raise
    if assist is not None:
        lost += assist.finish()


def _error_of(sequence: PlannedSequence, arriving: Mapping[AdapterKey, ArrivingAdapter]) -> str | None:
    adapter = arriving.get(sequence.adapter) if sequence.adapter is not None else None
    return adapter.error if adapter is not None else None


def _by_adapter(sequences: Sequence[PlannedSequence]) -> list[PlannedSequence]:
    """Order sequences so that rows of one adapter are adjacent, adapters by first appearance."""
    rank: dict[AdapterKey | None, int] = {}
    for sequence in sequences:
        rank.setdefault(sequence.adapter, len(rank))
    return sorted(sequences, key=lambda sequence: rank[sequence.adapter])


def _sampled_rows(sequences: Sequence[PlannedSequence]) -> list[int]:
    ends = accumulate(sequence.num_tokens for sequence in sequences)
    return [end - 1 for end, sequence in zip(ends, sequences, strict=True) if sequence.is_sampled]


def _find_lost(sequences: Sequence[PlannedSequence], lost: Sequence[LostRows]) -> set[int]:
    """Return the sequences that have any of these rows."""
    found: set[int] = set()
    row = sampled = 0
    for sequence in sequences:
        rows, own = row + sequence.num_tokens, sampled + sequence.is_sampled
        for part in lost:
            start, stop = (sampled, own) if part.is_sampled else (row, rows)
            if max(start, part.start) < min(stop, part.stop):
                found.add(sequence.seq_id)
        row, sampled = rows, own
    return found
