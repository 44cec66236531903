"""From logits to tokens: one vectorised pass for the whole batch, with no state that a seed depends on.

The order is vLLM's, so that the parameters mean what people know::

    raw logits -> (log-probabilities to report) -> logit bias, min_tokens, grammar -> penalties
               -> temperature -> min-p -> top-k -> top-p -> one draw

A draw needs one uniform number, and that is a pure function of ``(seed, tokens generated so far)``: a
counter-based generator (Philox4x32-10, the one CUDA uses) instead of generator objects that would have to
be kept, saved at pre-emption and replayed. So a seed gives the same tokens whatever shares the batch and
however often the request is recomputed. Rows pay only for what they ask: an all-greedy batch is one
``max``, edits are sparse scatters, and only rows with top-k or top-p are looked at in sorted order.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray
from torch import Tensor

from manylora.adapters.shape import BaseShape
from manylora.config import ModelConfig
from manylora.engine.ports import PlannedSequence
from manylora.execution.device_ops import make_device_ops
from manylora.execution.grammar import JsonGrammar
from manylora.types import SampledToken

__all__ = ["Sampler", "TokenMasks", "make_sampler", "philox_uniform"]

logger = logging.getLogger(__name__)

GREEDY_BELOW = 1e-5
"""Temperatures under this are greedy: dividing by them would only lose digits."""

LEAST_LOGPROB = -9999.0
"""What a token of probability zero reports: JSON has no infinity (vLLM answers the same)."""

PREFIX = 256
"""Sorted candidates that top-k and top-p look at first; nearly always enough, and far cheaper than a full sort."""

BLOCK = 256
"""Width of the blocks a draw steps over before it looks inside one."""

LOW, SHIFT = np.uint64(0xFFFFFFFF), np.uint64(32)

Words = NDArray[np.uint64]


class TokenMasks(Protocol):
    """What constrained decoding gives the sampler; implemented by ``execution.grammar``."""

    def allowed(self, seq_id: int, schema: str, generated: Sequence[int]) -> NDArray[np.bool_]:
        """Return which tokens may follow ``generated``, bool ``[vocab]``; never raises."""
        ...

    def release(self, seq_ids: Sequence[int]) -> None:
        """Forget these sequences."""
        ...


class Sampler:
    """Choose the next token of every row.

    Logits a broken adapter made do not stop the others: NaN is never chosen, +inf is the largest finite
    number, and a row where nothing is left to choose (all NaN or masked) ends with an end-of-sequence token
    where the model has one, token 0 otherwise.

    Args:
        vocab_size: Columns of the logits.
        eos_token_ids: The model's end-of-sequence tokens.
        device: Where the logits live.
        grammar: Masks for requests with ``json_schema``; without it such rows end at once, since an
            unconstrained answer would be wrong in silence (callers refuse such requests before).
    """

    def __init__(
        self,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        device: torch.device | str = "cpu",
        *,
        grammar: TokenMasks | None = None,
    ) -> None:
        self._vocab_size = vocab_size
        self._eos = tuple(t for t in eos_token_ids if 0 <= t < vocab_size)
        self._ops = make_device_ops(torch.device(device))
        # On the CPU a look saves a pass; a GPU would have to finish first, and stand still until it is told.
        self._may_look = self._ops.device.type == "cpu"
        self._grammar = grammar

    def release(self, seq_ids: Sequence[int]) -> None:
        """Forget sequences that will not come back (only grammars keep anything)."""
        if self._grammar is not None:
            self._grammar.release(seq_ids)

    @torch.inference_mode()
    def sample(self, logits: Tensor, sequences: Sequence[PlannedSequence]) -> list[SampledToken]:
        """Choose one token per row.

        Args:
            logits: ``[n, vocab]``, any float type; never written to.
            sequences: Row ``i`` is the next token of ``sequences[i]``.

        Returns:
            One token per row, with log-probabilities of the raw logits where asked for.
        """
        if not sequences:
            return []
        logits = logits.float()
        highest, best = logits.max(dim=-1)  # the first of equals, as documented by torch
        if not (self._may_look and bool(highest.isfinite().all())):
            logits = logits.nan_to_num(nan=-torch.inf, posinf=torch.finfo(torch.float32).max, neginf=-torch.inf)
            highest, best = logits.max(dim=-1)
        raw = logits
        edited = self._edit(logits, sequences)
        if edited is not logits:
            logits = edited
            highest, best = logits.max(dim=-1)

        drawn = [i for i, s in enumerate(sequences) if s.sampling.temperature >= GREEDY_BELOW]
        if drawn:
            rows = self._upload(drawn, np.int64)
            everyone = len(drawn) == len(sequences)
            tokens = self._draw(
                logits if everyone else logits[rows],
                highest if everyone else highest[rows],
                [sequences[i] for i in drawn],
            )
            best = tokens if everyone else best.index_copy(0, rows, tokens)
        dead = highest == -torch.inf
        if not (self._may_look and not bool(dead.any())):
            best = best.masked_fill(dead, self._eos[0] if self._eos else 0)
        chosen: list[int] = best.tolist()

        reported = [i for i, s in enumerate(sequences) if s.sampling.logprobs is not None]
        if not reported:
            return [SampledToken(token_id=token) for token in chosen]
        logprobs = self._logprobs(raw, reported, sequences, chosen)
        return [logprobs.get(i) or SampledToken(token_id=token) for i, token in enumerate(chosen)]

    def _edit(self, logits: Tensor, sequences: Sequence[PlannedSequence]) -> Tensor:
        """Apply bias, min_tokens, grammar and penalties; the same tensor when no row asks for any.

        All but the grammar touch few columns, so they are gathered as (row, column) lists and scattered once.
        """
        vocab = self._vocab_size
        bias: list[tuple[int, int, float]] = []
        banned: list[tuple[int, int]] = []
        masks: list[tuple[int, NDArray[np.bool_]]] = []
        penalties: list[tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.float32]]] = []
        for row, sequence in enumerate(sequences):
            sampling = sequence.sampling
            for token, value in sampling.logit_bias:
                if token < vocab:
                    bias.append((row, token, value))
            if sampling.min_tokens > num_generated(sequence):
                ending = {*self._eos, *sampling.stop_token_ids}
                banned.extend((row, token) for token in sorted(ending) if token < vocab)
            if sampling.json_schema is not None:
                masks.append((row, self._grammar_mask(sequence, sampling.json_schema)))
            if sampling.presence_penalty or sampling.frequency_penalty or sampling.repetition_penalty != 1.0:
                penalties.append(_penalties(row, sequence, vocab))
        if not (bias or banned or masks or penalties):
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
        if masks:
            allowed = self._ops.upload(np.stack([mask for _, mask in masks]))
            rows = self._upload([row for row, _ in masks], np.int64)
            logits[rows] = logits[rows].masked_fill(~allowed, -torch.inf)
        if penalties:
            at, subtract, scale = (self._ops.upload(np.concatenate(parts)) for parts in zip(*penalties, strict=True))
            values = flat[at]
            flat[at] = torch.where(values > 0, values / scale, values * scale) - subtract
        return logits

    def _grammar_mask(self, sequence: PlannedSequence, schema: str) -> NDArray[np.bool_]:
        if self._grammar is None:
            logger.error("grammar_missing seq_id=%d", sequence.seq_id)
            return np.zeros(self._vocab_size, dtype=np.bool_)
        return self._grammar.allowed(sequence.seq_id, schema, sequence.tokens[sequence.num_prompt_tokens :])

    def _draw(self, logits: Tensor, highest: Tensor, sequences: Sequence[PlannedSequence]) -> Tensor:
        """Draw a token per row by inverting its cumulative distribution at one uniform number.

        Args:
            logits: ``[n, vocab]`` float32, edited.
            highest: ``[n]``, the largest of each row.
            sequences: The rows.

        Returns:
            ``[n]`` int64; undefined for rows whose ``highest`` is -inf.
        """
        samplings = [s.sampling for s in sequences]
        temperature = self._column([s.temperature for s in samplings])
        cut = [i for i, s in enumerate(samplings) if s.top_p < 1.0 or 0 < s.top_k < self._vocab_size]
        # In place where it can be: fresh buffers of this size cost more (page faults) than the arithmetic.
        scaled = (logits - highest[:, None]).div_(temperature)  # largest is 0: no overflow however cold
        weights = scaled.exp() if cut else scaled.exp_()  # [n, vocab], the most likely token weighs 1
        min_p = self._column([s.min_p for s in samplings])
        if any(s.min_p > 0.0 for s in samplings):
            weights *= weights >= min_p
        if cut:
            rows = self._upload(cut, np.int64)
            top_k = self._upload([min(samplings[i].top_k or self._vocab_size, self._vocab_size) for i in cut], np.int64)
            top_p = self._upload([samplings[i].top_p for i in cut], np.float64)
            everyone = len(cut) == len(sequences)
            if everyone:
                _cut(scaled, weights, min_p, top_k, top_p, PREFIX)
            else:
                some = weights[rows]
                _cut(scaled[rows], some, min_p[rows], top_k, top_p, PREFIX)
                weights[rows] = some
        uniform = philox_uniform(
            np.array([s.seed % 2**64 for s in sequences], dtype=np.uint64),
            np.array([num_generated(s) for s in sequences], dtype=np.uint64),
        )
        return _invert(weights, self._ops.upload(uniform))

    def _column(self, values: list[float]) -> Tensor:
        return self._upload(values, np.float32)[:, None]

    def _upload(self, values: Sequence[float], dtype: DTypeLike) -> Tensor:
        return self._ops.upload(np.asarray(values, dtype=dtype))

    def _logprobs(
        self, raw: Tensor, rows: list[int], sequences: Sequence[PlannedSequence], chosen: list[int]
    ) -> dict[int, SampledToken]:
        """Report the chosen token and the most likely ones, equals in the order of their ids."""
        wanted = raw[self._upload(rows, np.int64)]
        totals = wanted.logsumexp(dim=-1)
        mine = wanted.gather(1, self._upload([chosen[i] for i in rows], np.int64)[:, None]).squeeze(1) - totals
        counts = [min(sequences[i].sampling.logprobs or 0, self._vocab_size) for i in rows]
        tops: list[list[tuple[int, float]]] = [[] for _ in rows]
        if most := max(counts):
            least = wanted.topk(most, dim=-1).values[:, -1:]
            found = (wanted >= least).nonzero()  # at least `most` per row, more where equals straddle the cut
            values = (wanted[found[:, 0], found[:, 1]] - totals[found[:, 0]]).cpu().numpy()
            where = found.cpu().numpy()
            order = np.lexsort((where[:, 1], -values, where[:, 0]))
            for row, token, value in zip(
                where[order, 0].tolist(), where[order, 1].tolist(), values[order].tolist(), strict=True
            ):
                if len(tops[row]) < counts[row]:
                    tops[row].append((token, _reportable(value)))
        return {
            i: SampledToken(token_id=chosen[i], logprob=_reportable(value), top=tuple(top))
            for i, value, top in zip(rows, mine.tolist(), tops, strict=True)
        }


def make_sampler(config: ModelConfig, base: BaseShape) -> Sampler:
    """Return the sampler of a live engine, ready for requests with a JSON schema.

    Args:
        config: Where the model runs, and its tokenizer.
        base: The model's shape.
    """
    device = config.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    grammar = JsonGrammar(
        config.tokenizer or config.model, base.vocab_size, base.eos_token_ids, revision=config.revision
    )
    return Sampler(base.vocab_size, base.eos_token_ids, device, grammar=grammar)


def num_generated(sequence: PlannedSequence) -> int:
    """Count the tokens generated so far: the position of the next draw."""
    return sequence.start + sequence.num_tokens - sequence.num_prompt_tokens


def _reportable(logprob: float) -> float:
    return logprob if logprob > LEAST_LOGPROB else LEAST_LOGPROB  # a NaN (row without any finite logit) too


def _penalties(
    row: int, sequence: PlannedSequence, vocab: int
) -> tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.float32]]:
    """Return flat positions in the logits, what to subtract there, and the scale, for one row's seen tokens.

    Presence and frequency look at generated tokens, repetition at the prompt too (vLLM's definitions).
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


def _cut(scaled: Tensor, weights: Tensor, min_p: Tensor, top_k: Tensor, top_p: Tensor, width: int) -> None:
    """Zero, in place, the weights that top-k, then top-p of what it left, rule out.

    Both keep the first ``m`` tokens of the stable descending order, so a row is settled by the value at
    rank ``m`` and by how many of its equals are still in. Only the ``width`` largest are sorted; rows they
    do not settle are sorted whole. At least the most likely token is kept.

    Args:
        scaled: ``[n, vocab]`` logits over temperature: the order.
        weights: ``[n, vocab]`` unnormalised probabilities after min-p: the mass.
        min_p: ``[n, 1]``, what min-p was, to weigh the candidates alike.
        top_k: ``[n]`` int64, from 1.
        top_p: ``[n]`` float64 in (0, 1].
        width: Candidates to look at.
    """
    vocab = scaled.shape[1]
    width = min(width, vocab)
    candidates = _largest(scaled, width)  # [n, width]
    mass = candidates.exp()
    mass *= mass >= min_p
    mass = mass.double()
    mass *= torch.arange(width, device=scaled.device) < top_k[:, None]
    reached = mass.cumsum(dim=-1)
    # What top-p takes its share of: the k best, or everything.
    total = torch.where(top_k <= width, reached[:, -1], weights.sum(dim=-1, dtype=torch.float64))
    wanted = top_p * total
    kept = torch.where(
        top_p < 1.0, ((reached - mass) < wanted[:, None]).sum(dim=-1).clamp(min=1), top_k.clamp(max=width)
    )

    if width < vocab:
        settled = (top_k <= width) | ((top_k == vocab) & (reached[:, -1] >= wanted))
        if not bool(settled.all()):
            for part, wide in ((settled, width), (~settled, vocab)):
                rows = part.nonzero().squeeze(1)
                some = weights[rows]
                _cut(scaled[rows], some, min_p[rows], top_k[rows], top_p[rows], wide)
                weights[rows] = some
            return

    last = candidates.gather(1, (kept - 1)[:, None])
    equals_in = kept - (candidates > last).sum(dim=-1)
    equal = scaled == last
    if bool((equal.sum(dim=-1) > equals_in).any()):
        equal &= equal.cumsum(dim=-1) <= equals_in[:, None]
    weights *= equal.logical_or_(scaled > last)


def _largest(x: Tensor, width: int) -> Tensor:
    """Return the ``width`` largest values of each row, largest first.

    On CPU through numpy, whose partition and sort are vectorised: torch takes 6 times (``topk``) to 30 times
    (``sort``) as long.
    """
    if x.device.type != "cpu":
        return x.topk(width, dim=-1).values
    values = x.numpy()
    if width < x.shape[1]:
        values = np.partition(values, x.shape[1] - width, axis=-1)[:, -width:]
    return torch.from_numpy(np.ascontiguousarray(np.sort(values, axis=-1)[:, ::-1]))


def _invert(weights: Tensor, uniform: Tensor) -> Tensor:
    """Return per row the first token whose cumulative weight exceeds ``uniform`` of the total.

    Two levels: over blocks of columns, then inside one, because a cumulative sum over the whole vocabulary is
    what the draw would mostly cost. Sums are float64: with 100,000 tokens float32 would bias the tail.

    Args:
        weights: ``[n, vocab]`` float32, none negative.
        uniform: ``[n]`` float64 in [0, 1).
    """
    n, vocab = weights.shape
    if pad := -vocab % BLOCK:
        weights = torch.nn.functional.pad(weights, (0, pad))
    blocks = weights.view(n, -1, BLOCK)  # [n, blocks, BLOCK]
    reached = blocks.sum(dim=-1, dtype=torch.float64).cumsum(dim=-1)  # [n, blocks]
    total = reached[:, -1]
    target = torch.minimum(uniform * total, total.nextafter(torch.zeros_like(total)))[:, None]
    block = torch.searchsorted(reached, target, right=True).clamp(max=reached.shape[1] - 1)
    before = torch.where(block > 0, reached.gather(1, (block - 1).clamp(min=0)), 0.0)
    inside = blocks[torch.arange(n, device=weights.device), block.squeeze(1)].double().cumsum(dim=-1)  # [n, BLOCK]
    # A block is entered only when it has mass; rounding must not carry the target past its last token.
    end = inside[:, -1:]
    target = torch.minimum(target - before, end.nextafter(torch.zeros_like(end)))
    offset = torch.searchsorted(inside, target, right=True).clamp(max=BLOCK - 1)
    return (block * BLOCK + offset).squeeze(1).clamp(max=vocab - 1)


def philox_uniform(seeds: Words, counters: Words) -> NDArray[np.float64]:
    """Return one uniform number in [0, 1) per row: the first 53 bits of Philox4x32-10.

    A counter-based generator has no state: the number is a hash of key and counter that passes BigCrush.
    Vectorised over rows, a batch costs about 0.1 ms whatever its size; a numpy generator per row costs 9 us
    each, and stays on the host.

    Args:
        seeds: ``[n]``, the key.
        counters: ``[n]``, the position in the stream.

    Source:
        Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (SC 2011), section 4.3.
    """
    nothing = np.zeros_like(counters)
    words = philox4x32((counters & LOW, counters >> SHIFT, nothing, nothing), (seeds & LOW, seeds >> SHIFT))
    bits = (words[0] << SHIFT) | words[1]
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def philox4x32(counter: tuple[Words, Words, Words, Words], key: tuple[Words, Words]) -> tuple[Words, ...]:
    """Run the ten rounds of Philox4x32 on four counter words and two key words (32 bits each, held in 64)."""
    (c0, c1, c2, c3), (key0, key1) = counter, key
    for _ in range(10):
        left, right = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (right >> SHIFT) ^ c1 ^ key0, right & LOW, (left >> SHIFT) ^ c3 ^ key1, left & LOW
        key0, key1 = (key0 + np.uint64(0x9E3779B9)) & LOW, (key1 + np.uint64(0xBB67AE85)) & LOW
    return c0, c1, c2, c3
