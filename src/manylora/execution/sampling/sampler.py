"""From logits to tokens: one vectorised pass for the whole batch.

The order is vLLM's, so that parameters have vLLM's meaning::

    raw logits -> (log-probabilities to report) -> logit bias, min_tokens, bad words, grammar -> penalties
               -> temperature -> min-p -> top-k -> top-p -> one draw

A draw needs one uniform number, a pure function of ``(seed, tokens generated so far)`` (``philox``). So a seed gives
the same tokens in any batch, and after any recomputation of the request. Rows pay only for the options that they use:
an all-greedy batch is one ``max``, edits are sparse scatters, and only rows with top-k or top-p are sorted. On a GPU
all but the edits and the log-probabilities is one launch (``kernels/triton/sampling.py``).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray
from torch import Tensor

from manylora.core.adapters.shape import BaseShape
from manylora.core.config import ModelConfig
from manylora.core.plan import PlannedSequence
from manylora.core.types import USUAL_LOGPROBS, Constraint, SampledToken
from manylora.execution.device import find_device, make_device_ops
from manylora.execution.kernels.triton.support import SAMPLING_NUMBERS
from manylora.execution.sampling.draw import choose_fused, choose_tokens, num_generated, row_numbers
from manylora.execution.sampling.grammar import Grammars
from manylora.execution.sampling.logprobs import finite, most_likely, reportable

__all__ = ["Sampler", "make_sampler"]

logger = logging.getLogger(__name__)

BROKEN = -1  # stands for the token of a row that has none, in the one tensor that is read back from the device


class Sampler:
    """Choose the next token of every row.

    A broken adapter's logits do not affect other rows: a row whose largest logit is not finite (NaN or an infinity, by
    weights that overflow) has no token, and neither has a row whose grammar is over its budget of time. A row whose
    choices are all masked ends with the model's end-of-sequence token, or token 0 if it has none.
    Without ``grammar`` a row with a constraint ends at once, since an unconstrained answer would be silently wrong
    (the server refuses such requests before). ``is_fused`` chooses by the kernel in Triton, by default on a GPU.
    """

    def __init__(
        self,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        device: torch.device | str = "cpu",
        *,
        grammar: Grammars | None = None,
        is_fused: bool | None = None,
    ) -> None:
        self._vocab_size = vocab_size
        self._eos = tuple(t for t in eos_token_ids if 0 <= t < vocab_size)
        self._ops = make_device_ops(torch.device(device))
        # One launch, of which nothing is read back before the tokens are; a CPU is quicker by vectorised operations.
        self._is_fused = self._ops.device.type == "cuda" if is_fused is None else is_fused
        self._grammar = grammar

    def release(self, seq_ids: Sequence[int]) -> None:
        """Drop the state of sequences that have left the engine (only grammars keep state)."""
        if self._grammar is not None:
            self._grammar.release(seq_ids)

    def is_over_budget(self, seq_id: int) -> bool:
        """Return whether a sequence has no token because its grammar takes too much time."""
        return self._grammar is not None and self._grammar.is_over(seq_id)

    def prepare(self, constraint: Constraint) -> None:
        """Compile a constraint, so that no step does; blocks, safe from any thread. Errors as ``Grammars.prepare``."""
        if self._grammar is not None:
            self._grammar.prepare(constraint)

    def compile(self) -> None:
        """Compile the kernel for rows as they are and for edited ones, so that no step does."""
        raw = torch.zeros((1, self._vocab_size), device=self._ops.device)
        for logits in (raw, raw.clone()) if self._is_fused else ():
            choose_fused(raw, logits, np.zeros((1, SAMPLING_NUMBERS)), 0, self._ops)

    def begin(self, sequences: Sequence[PlannedSequence]) -> None:
        """Begin the work for a step's sampled sequences that needs no logits: the masks of grammars."""
        bound = [sequence for sequence in sequences if sequence.sampling.constraint is not None]
        if bound and self._grammar is not None:
            self._grammar.begin(bound)

    @torch.inference_mode()
    def sample(self, logits: Tensor, sequences: Sequence[PlannedSequence]) -> list[SampledToken | None]:
        """Return a token per row of ``logits`` ``[n, vocab]``, with log-probabilities of them where requested.

        Logits may be of any float type and are not modified. Row ``i`` is the next token of ``sequences[i]``; it is
        ``None`` if the row's largest logit is not finite, or its grammar over its budget. All is read from the device
        at once, at the end: nothing before waits for it.
        """
        if not sequences:
            return []
        raw = logits.float().contiguous()  # behind a vocabulary that workers divide there may be columns to fill it up
        numbers = row_numbers(sequences, self._vocab_size)
        dead = self._eos[0] if self._eos else 0
        if self._is_fused:
            tokens = choose_fused(raw, self._edit(raw, sequences), numbers, dead, self._ops)
        else:
            highest, best = raw.max(dim=-1)  # the first of equals, as documented by torch
            broken = ~highest.isfinite()  # a NaN or +inf anywhere in a row is its largest
            if is_any_broken := bool(broken.any()):
                raw = finite(raw)
            edited = self._edit(raw, sequences)
            if is_any_broken or edited is not raw:
                highest, best = edited.max(dim=-1)
            tokens = choose_tokens(edited, highest, best, numbers)
            tokens = tokens.masked_fill(highest == -torch.inf, dead).masked_fill(broken, BROKEN)
        over = {row for row, s in enumerate(sequences) if s.sampling.constraint and self.is_over_budget(s.seq_id)}
        chosen, reported = self._read(raw, tokens, sequences)  # the device is waited for here: all else is before
        return [
            None if token == BROKEN or row in over else reported.get(row) or SampledToken(token_id=token)
            for row, token in enumerate(chosen)
        ]

    def _edit(self, logits: Tensor, sequences: Sequence[PlannedSequence]) -> Tensor:
        """Apply bias, min_tokens, bad words, grammar and penalties; return the same tensor if no row has any.

        All but the grammar change few columns, so they are collected as (row, column) lists and scattered once.
        """
        vocab = self._vocab_size
        bias: list[tuple[int, int, float]] = []
        banned: list[tuple[int, int]] = []
        bound: list[int] = []
        only: list[tuple[int, tuple[int, ...]]] = []
        penalties: list[tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.float32]]] = []
        for row, sequence in enumerate(sequences):
            sampling = sequence.sampling
            for token, value in sampling.logit_bias:
                if token < vocab:
                    bias.append((row, token, value))
            if sampling.min_tokens > num_generated(sequence):
                ending = {*self._eos, *sampling.stop_token_ids}
                banned.extend((row, token) for token in sorted(ending) if token < vocab)
            if sampling.bad_words_token_ids:
                banned.extend((row, token) for token in _bad_tokens(sequence) if token < vocab)
            if sampling.constraint is not None:
                bound.append(row)
            if sampling.allowed_token_ids:
                only.append((row, sampling.allowed_token_ids))
            if sampling.presence_penalty or sampling.frequency_penalty or sampling.repetition_penalty != 1.0:
                penalties.append(_penalties(row, sequence, vocab))
        if not (bias or banned or bound or only or penalties):
            return logits

        logits = logits.clone()
        flat = logits.view(-1)
        if bias:
            at = self._upload([row * vocab + token for row, token, _ in bias], np.int64)
            values = self._upload([value for _, _, value in bias], np.float32)
            flat.index_put_((at,), values, accumulate=True)
        if banned:
            at = self._upload([row * vocab + token for row, token in banned], np.int64)
            flat.index_fill_(0, at, -torch.inf)
        for row, token_ids in only:
            at = self._upload(token_ids, np.int64)
            kept = logits[row, at]
            logits[row] = -torch.inf
            logits[row, at] = kept
        if bound:
            forbidden = self._forbidden([sequences[row] for row in bound])
            if len(bound) == len(sequences):
                logits.masked_fill_(forbidden, -torch.inf)
            else:
                rows = self._upload(bound, np.int64)
                logits[rows] = logits[rows].masked_fill_(forbidden, -torch.inf)
        if penalties:
            at, subtract, scale = (self._ops.upload(np.concatenate(parts)) for parts in zip(*penalties, strict=True))
            values = flat[at]
            flat[at] = torch.where(values > 0, values / scale, values * scale) - subtract
        return logits

    def _forbidden(self, sequences: Sequence[PlannedSequence]) -> Tensor:
        """Return the tokens that the grammars of these sequences do not allow next, bool ``[n, vocab]``."""
        if self._grammar is None:
            logger.error("grammar_missing seq_ids=%s", [sequence.seq_id for sequence in sequences])
            return torch.ones((len(sequences), self._vocab_size), dtype=torch.bool, device=self._ops.device)
        return self._ops.upload_bits(~self._grammar.masks(sequences), self._vocab_size)

    def _upload(self, values: Sequence[float], dtype: DTypeLike) -> Tensor:
        return self._ops.upload(np.asarray(values, dtype=dtype))

    def _read(
        self, raw: Tensor, tokens: Tensor, sequences: Sequence[PlannedSequence]
    ) -> tuple[list[int], dict[int, SampledToken]]:
        """Read the tokens, and of rows that ask for them log-probabilities: of the chosen token and others.

        Others are the most likely ones (equal ones in the order of their ids) or given ones.
        """
        rows = [i for i, s in enumerate(sequences) if s.sampling.logprobs is not None]
        if not rows:
            return self._ops.read(tokens)[0].tolist(), {}
        given = [sequences[i].sampling.logprob_token_ids for i in rows]
        wanted = raw if len(rows) == len(sequences) else raw[self._upload(rows, np.int64)]
        own = tokens if len(rows) == len(sequences) else tokens[self._upload(rows, np.int64)]
        totals = wanted.logsumexp(dim=-1)
        mine = wanted.gather(1, own.clamp(min=0)[:, None]).squeeze(1) - totals
        pairs = [(row, token) for row, ids in enumerate(given) for token in ids]
        in_rows, at = (self._ops.upload(column) for column in np.array(pairs, dtype=np.int64).reshape(-1, 2).T)
        counts = [0 if ids else sequences[i].sampling.logprobs or 0 for i, ids in zip(rows, given, strict=True)]
        searches = _searches(counts)
        found: list[Tensor] = []
        for part, most in searches:
            own_rows = slice(None) if len(part) == len(rows) else self._upload(part, np.int64)
            found += most_likely(wanted[own_rows], totals[own_rows], most)
        chosen, mine_read, others, *tops = self._ops.read(tokens, mine, wanted[in_rows, at] - totals[in_rows], *found)
        top: list[list[tuple[int, float]]] = [[] for _ in rows]
        for (row, token), value in zip(pairs, reportable(others).tolist(), strict=True):
            top[row].append((token, value))
        for (part, _), ids, values in zip(searches, tops[::2], tops[1::2], strict=True):
            for row, row_ids, row_values in zip(part, ids.tolist(), reportable(values).tolist(), strict=True):
                top[row] += zip(row_ids[: counts[row]], row_values[: counts[row]], strict=True)
        known = chosen.tolist()
        return known, {
            i: SampledToken(token_id=known[i], logprob=logprob, top=tuple(others_of))
            for i, logprob, others_of in zip(rows, reportable(mine_read).tolist(), top, strict=True)
        }


def _searches(counts: Sequence[int]) -> list[tuple[list[int], int]]:
    """Return the rows that are searched together for their most likely tokens, and the most that any of them asks for.

    All rows of one search pay for the largest number among them, so a row that asks for many is on its own.
    """
    few = [row for row, count in enumerate(counts) if count <= USUAL_LOGPROBS]
    many = [[row] for row, count in enumerate(counts) if count > USUAL_LOGPROBS]
    return [(part, max(counts[row] for row in part)) for part in (few, *many) if part]


def make_sampler(config: ModelConfig, base: BaseShape) -> Sampler:
    """Return the sampler of a live engine, with grammars for requests with a constraint."""
    grammar = Grammars(config.tokenizer or config.model, base.vocab_size, base.eos_token_ids, revision=config.revision)
    return Sampler(base.vocab_size, base.eos_token_ids, find_device(config.device), grammar=grammar)


def _bad_tokens(sequence: PlannedSequence) -> list[int]:
    """Return the tokens that would complete a run of ``bad_words_token_ids`` in the answer."""
    longest = max(map(len, sequence.sampling.bad_words_token_ids))
    stop = sequence.start + sequence.num_tokens
    answer = sequence.tokens[max(sequence.num_prompt_tokens, stop - longest + 1) : stop]
    return [
        run[-1]
        for run in sequence.sampling.bad_words_token_ids
        if len(run) == 1 or tuple(answer[1 - len(run) :]) == run[:-1]
    ]


def _penalties(
    row: int, sequence: PlannedSequence, vocab: int
) -> tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.float32]]:
    """Return flat positions in the logits, the penalties to subtract, and the scales, for one row's tokens so far.

    Presence and frequency count generated tokens, repetition the prompt too (vLLM's definitions).
    """
    sampling = sequence.sampling
    tokens = np.asarray(sequence.tokens[:], dtype=np.int64)
    generated, counts = np.unique(tokens[sequence.num_prompt_tokens :], return_counts=True)
    seen = np.unique(tokens) if sampling.repetition_penalty != 1.0 else generated
    subtract = np.zeros(len(seen), dtype=np.float32)
    subtract[np.searchsorted(seen, generated)] = (
        sampling.frequency_penalty * counts.astype(np.float32) + sampling.presence_penalty
    )
    inside = seen < vocab
    scale = np.full(int(inside.sum()), sampling.repetition_penalty, dtype=np.float32)
    return row * vocab + seen[inside], subtract[inside], scale
