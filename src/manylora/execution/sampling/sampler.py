"""From logits to tokens: one vectorised pass for the whole batch.

The order is vLLM's, so that parameters have vLLM's meaning::

    raw logits -> (log-probabilities to report) -> logit bias, min_tokens, bad words, grammar -> penalties
               -> temperature -> min-p -> top-k -> top-p -> one draw

A draw needs one uniform number, a pure function of ``(seed, tokens generated so far)`` (``philox``). So a seed gives
the same tokens in any batch, and after any recomputation of the request. Rows pay only for the options that they use:
an all-greedy batch is one ``max``, edits are sparse scatters, and only rows with top-k or top-p are sorted.
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
from manylora.execution.sampling.draw import cut_weights, draw_at, philox_uniform
from manylora.execution.sampling.grammar import Grammars
from manylora.execution.sampling.logprobs import finite, most_likely, reportable

__all__ = ["Sampler", "make_sampler"]

logger = logging.getLogger(__name__)

GREEDY_BELOW = 1e-5  # lower temperatures are greedy: a division by them would only lose digits
BROKEN = -1  # stands for the token of a row that has none, in the one tensor that is read back from the device


class Sampler:
    """Choose the next token of every row.

    A broken adapter's logits do not affect other rows: a row whose largest logit is not finite (NaN or an infinity, by
    weights that overflow) has no token, and neither has a row whose grammar is over its budget of time. A row whose
    choices are all masked ends with the model's end-of-sequence token, or token 0 if it has none.
    Without ``grammar`` a row with a constraint ends at once, since an unconstrained answer would be silently wrong
    (the server refuses such requests before).
    """

    def __init__(
        self,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        device: torch.device | str = "cpu",
        *,
        grammar: Grammars | None = None,
    ) -> None:
        self._vocab_size = vocab_size
        self._eos = tuple(t for t in eos_token_ids if 0 <= t < vocab_size)
        self._ops = make_device_ops(torch.device(device))
        # On the CPU, reading a flag saves a pass; on a GPU the read would wait for all work before it.
        self._can_branch = self._ops.device.type == "cpu"
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

    def begin(self, sequences: Sequence[PlannedSequence]) -> None:
        """Begin the work for a step's sampled sequences that needs no logits: the masks of grammars."""
        bound = [sequence for sequence in sequences if sequence.sampling.constraint is not None]
        if bound and self._grammar is not None:
            self._grammar.begin(bound)

    @torch.inference_mode()
    def sample(self, logits: Tensor, sequences: Sequence[PlannedSequence]) -> list[SampledToken | None]:
        """Return a token per row of ``logits`` ``[n, vocab]``, with log-probabilities of them where requested.

        Logits may be of any float type and are not modified. Row ``i`` is the next token of ``sequences[i]``; it is
        ``None`` if the row's largest logit is not finite, or its grammar over its budget.
        """
        if not sequences:
            return []
        logits = logits.float()
        highest, best = logits.max(dim=-1)  # the first of equals, as documented by torch
        broken = ~highest.isfinite()  # a NaN or +inf anywhere in a row is its largest
        if not (self._can_branch and not bool(broken.any())):
            logits = finite(logits)
            highest, best = logits.max(dim=-1)
        raw = logits
        edited = self._edit(logits, sequences)
        if edited is not logits:
            logits = edited
            highest, best = logits.max(dim=-1)

        drawn = [i for i, s in enumerate(sequences) if s.sampling.temperature >= GREEDY_BELOW]
        if drawn:
            rows = self._upload(drawn, np.int64)
            is_all_rows = len(drawn) == len(sequences)
            tokens = self._draw(
                logits if is_all_rows else logits[rows],
                highest if is_all_rows else highest[rows],
                [sequences[i] for i in drawn],
            )
            best = tokens if is_all_rows else best.index_copy(0, rows, tokens)
        dead = highest == -torch.inf
        if not (self._can_branch and not bool(dead.any())):
            best = best.masked_fill(dead, self._eos[0] if self._eos else 0).masked_fill(broken, BROKEN)
        chosen: list[int] = best.tolist()
        for row, sequence in enumerate(sequences):
            if sequence.sampling.constraint is not None and self.is_over_budget(sequence.seq_id):
                chosen[row] = BROKEN

        reported = [i for i, s in enumerate(sequences) if s.sampling.logprobs is not None]
        if not reported:
            return [SampledToken(token_id=token) if token != BROKEN else None for token in chosen]
        known = [token if token != BROKEN else 0 for token in chosen]
        logprobs = self._logprobs(raw, reported, sequences, known)
        return [
            (logprobs.get(i) or SampledToken(token_id=token)) if token != BROKEN else None
            for i, token in enumerate(chosen)
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

    def _draw(self, logits: Tensor, highest: Tensor, sequences: Sequence[PlannedSequence]) -> Tensor:
        """Draw a token per row by inverting its cumulative distribution at one uniform number.

        Logits are float32 ``[n, vocab]``, edited, and ``highest`` ``[n]`` is the largest of each row. The result,
        ``[n]`` int64, is undefined for rows whose ``highest`` is -inf.
        """
        samplings = [s.sampling for s in sequences]
        temperature = self._column([s.temperature for s in samplings])
        cut = [i for i, s in enumerate(samplings) if s.top_p < 1.0 or 0 < s.top_k < self._vocab_size]
        # In place where possible: new buffers of this size cost more (page faults) than the arithmetic.
        scaled = (logits - highest[:, None]).div_(temperature)  # largest is 0: no overflow however cold
        weights = scaled.exp() if cut else scaled.exp_()  # [n, vocab], the most likely token weighs 1
        min_p = self._column([s.min_p for s in samplings])
        if any(s.min_p > 0.0 for s in samplings):
            weights *= weights >= min_p
        if cut:
            rows = self._upload(cut, np.int64)
            top_k = self._upload([min(samplings[i].top_k or self._vocab_size, self._vocab_size) for i in cut], np.int64)
            top_p = self._upload([samplings[i].top_p for i in cut], np.float64)
            is_all_rows = len(cut) == len(sequences)
            if is_all_rows:
                cut_weights(scaled, weights, min_p, top_k, top_p)
            else:
                some = weights[rows]
                cut_weights(scaled[rows], some, min_p[rows], top_k, top_p)
                weights[rows] = some
        uniform = philox_uniform(
            np.array([s.seed % 2**64 for s in sequences], dtype=np.uint64),
            np.array([num_generated(s) for s in sequences], dtype=np.uint64),
        )
        return draw_at(weights, self._ops.upload(uniform))

    def _column(self, values: list[float]) -> Tensor:
        return self._upload(values, np.float32)[:, None]

    def _upload(self, values: Sequence[float], dtype: DTypeLike) -> Tensor:
        return self._ops.upload(np.asarray(values, dtype=dtype))

    def _logprobs(
        self, raw: Tensor, rows: list[int], sequences: Sequence[PlannedSequence], chosen: list[int]
    ) -> dict[int, SampledToken]:
        """Report the chosen token, and the most likely ones (equal ones in the order of their ids) or given ones."""
        wanted = raw[self._upload(rows, np.int64)]
        totals = wanted.logsumexp(dim=-1)
        mine = wanted.gather(1, self._upload([chosen[i] for i in rows], np.int64)[:, None]).squeeze(1) - totals
        given = [sequences[i].sampling.logprob_token_ids for i in rows]
        counts = [
            0 if token_ids else sequences[i].sampling.logprobs or 0 for i, token_ids in zip(rows, given, strict=True)
        ]
        top = self._most_likely(wanted, totals, counts)
        if any(given):
            at = [(row, token) for row, token_ids in enumerate(given) for token in token_ids]
            in_rows, tokens = (self._upload(column, np.int64) for column in zip(*at, strict=True))
            values = iter(reportable((wanted[in_rows, tokens] - totals[in_rows]).cpu().numpy()).tolist())
            for row, token_ids in enumerate(given):
                if token_ids:
                    top[row] = tuple([(token, next(values)) for token in token_ids])
        return {
            i: SampledToken(token_id=chosen[i], logprob=own, top=pairs)
            for i, own, pairs in zip(rows, reportable(mine.cpu().numpy()).tolist(), top, strict=True)
        }

    def _most_likely(self, logits: Tensor, totals: Tensor, counts: list[int]) -> list[tuple[tuple[int, float], ...]]:
        """Return the most likely tokens of each row, as many as it asks for; rows that ask for many are on their own.

        All rows of one search pay for the largest number among them.
        """
        top: list[tuple[tuple[int, float], ...]] = [()] * len(counts)
        few = [row for row, count in enumerate(counts) if count <= USUAL_LOGPROBS]
        many = [[row] for row, count in enumerate(counts) if count > USUAL_LOGPROBS]
        for rows in (few, *many) if few else many:
            at = slice(None) if len(rows) == len(counts) else self._upload(rows, np.int64)
            ids, values = most_likely(logits[at], totals[at], max(counts[row] for row in rows))
            for row, row_ids, row_values in zip(rows, ids, values, strict=True):
                count = counts[row]
                top[row] = tuple(zip(row_ids[:count].tolist(), row_values[:count].tolist(), strict=True))
        return top


def make_sampler(config: ModelConfig, base: BaseShape) -> Sampler:
    """Return the sampler of a live engine, with grammars for requests with a constraint."""
    grammar = Grammars(config.tokenizer or config.model, base.vocab_size, base.eos_token_ids, revision=config.revision)
    return Sampler(base.vocab_size, base.eos_token_ids, find_device(config.device), grammar=grammar)


def num_generated(sequence: PlannedSequence) -> int:
    """Return the number of generated tokens: the position of the next draw."""
    return sequence.start + sequence.num_tokens - sequence.num_prompt_tokens


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
