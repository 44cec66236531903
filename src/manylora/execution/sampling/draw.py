"""Top-k, top-p and the draw: the tokens left in each row, a uniform number for it, and the token for that number.

``choose_tokens`` is the code of the CPU and the definition, ``choose_fused`` the launch of a GPU.

Rows are unnormalised weights, so nothing is divided by a sum over the vocabulary. Top-k and top-p look at a few hundred
sorted candidates first.

Uniform numbers are counter-based: a hash of seed and position (Philox4x32-10, the generator of CUDA). A pure function
replaces a generator object per request, which would have to be kept, saved at pre-emption and replayed
(``docs/adr/0005``). It returns the same number for the same token of the same request.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from manylora.core.plan import PlannedSequence
from manylora.execution.device import DeviceOps
from manylora.execution.kernels.triton.support import SAMPLING_NUMBERS, power_of_two

__all__ = [
    "choose_fused",
    "choose_tokens",
    "cut_weights",
    "draw_at",
    "num_generated",
    "philox4x32",
    "philox_uniform",
    "row_numbers",
]

GREEDY_BELOW = 1e-5  # lower temperatures are greedy: a division by them would only lose digits

PREFIX = 256  # sorted candidates for top-k and top-p: nearly always enough, and far cheaper than a full sort
BLOCK = 256  # columns of a block: a draw finds the block, then the token in it

LOW, SHIFT = np.uint64(0xFFFFFFFF), np.uint64(32)
PHILOX_FACTORS = np.array([[0xD2511F53], [0xCD9E8D57]], dtype=np.uint64)
PHILOX_WEYL = np.array([[0x9E3779B9], [0xBB67AE85]], dtype=np.uint64) * np.arange(10, dtype=np.uint64)[:, None, None]

FUSED_BLOCK, FUSED_FEW = 2048, 2048  # columns of a pass of the kernel, and of the candidates that it searches

Words = NDArray[np.uint64]


def num_generated(sequence: PlannedSequence) -> int:
    """Return the number of generated tokens: the position of the next draw."""
    return sequence.start + sequence.num_tokens - sequence.num_prompt_tokens


def row_numbers(sequences: Sequence[PlannedSequence], vocab: int) -> NDArray[np.float64]:
    """Return temperature (0 is greedy), min_p, top_k (from 1), top_p and a uniform number of each row ``[n, 5]``."""
    numbers = np.zeros((len(sequences), SAMPLING_NUMBERS))
    drawn = [i for i, sequence in enumerate(sequences) if sequence.sampling.temperature >= GREEDY_BELOW]
    if not drawn:
        return numbers
    drawing = [sequences[i] for i in drawn]
    asked = [sequence.sampling for sequence in drawing]
    numbers[drawn, :4] = [(own.temperature, own.min_p, min(own.top_k or vocab, vocab), own.top_p) for own in asked]
    numbers[drawn, 4] = philox_uniform(
        np.array([sequence.seed % 2**64 for sequence in drawing], dtype=np.uint64),
        np.array([num_generated(sequence) for sequence in drawing], dtype=np.uint64),
    )
    return numbers


def choose_fused(raw: Tensor, logits: Tensor, numbers: NDArray[np.float64], dead: int, ops: DeviceOps) -> Tensor:
    """Return the token of each row, int64 ``[n]``, by one launch: -1 for a row of ``raw`` with logits not finite.

    ``logits`` are ``raw`` after edits, both float32 ``[n, vocab]``; a row without any finite logit gets ``dead``.
    """
    from manylora.execution.kernels.triton import sampling as triton_sampling

    num_rows, vocab = raw.shape
    assert raw.stride(1) == logits.stride(1) == 1 and raw.stride(0) == logits.stride(0), "rows lie as they come"
    tokens = torch.empty(num_rows, dtype=torch.int64, device=ops.device)
    scratch = torch.empty((num_rows, FUSED_FEW), dtype=torch.int32, device=ops.device)
    block = min(FUSED_BLOCK, power_of_two(vocab))
    triton_sampling.choose[(num_rows,)](
        *(raw, logits, raw.stride(0), ops.upload(numbers), scratch, tokens, vocab, dead),
        IS_EDITED=logits is not raw,
        FEW=FUSED_FEW,
        LANES=power_of_two(max(2, -(-vocab // block))),
        BLOCK=block,
        num_warps=16,  # a row is one program's: its loads need many threads
    )
    return tokens


def choose_tokens(logits: Tensor, highest: Tensor, best: Tensor, numbers: NDArray[np.float64]) -> Tensor:
    """Return ``best`` with the tokens of the rows that draw, each by its ``numbers``.

    A draw inverts the row's cumulative distribution at one uniform number. Logits are float32 ``[n, vocab]``,
    ``highest`` ``[n]`` is the largest of each row and ``best`` its place. The token is undefined for rows whose
    ``highest`` is -inf.
    """
    own = numbers[numbers[:, 0] > 0]
    if not len(own):
        return best
    is_all_rows = len(own) == len(numbers)
    rows = torch.from_numpy(np.flatnonzero(numbers[:, 0] > 0)).to(logits.device)
    if not is_all_rows:
        logits, highest = logits[rows], highest[rows]
    temperature, min_p = (torch.from_numpy(own[:, i].astype(np.float32))[:, None].to(logits.device) for i in range(2))
    cut = np.flatnonzero((own[:, 2] < logits.shape[1]) | (own[:, 3] < 1.0))
    # In place where possible: new buffers of this size cost more (page faults) than the arithmetic.
    scaled = (logits - highest[:, None]).div_(temperature)  # largest is 0: no overflow however cold
    weights = scaled.exp() if len(cut) else scaled.exp_()  # [n, vocab], the most likely token weighs 1
    if own[:, 1].any():
        weights *= weights >= min_p
    if len(cut):
        is_every_row = len(cut) == len(own)
        at = slice(None) if is_every_row else torch.from_numpy(cut).to(logits.device)
        some = weights[at]  # of every row a view
        top_k, top_p = (torch.from_numpy(own[cut, i]).to(logits.device) for i in (2, 3))
        cut_weights(scaled[at], some, min_p[at], top_k.long(), top_p)
        if not is_every_row:
            weights[at] = some
    tokens = draw_at(weights, torch.from_numpy(own[:, 4].copy()).to(logits.device))
    return tokens if is_all_rows else best.index_copy(0, rows, tokens)


def cut_weights(
    scaled: Tensor, weights: Tensor, min_p: Tensor, top_k: Tensor, top_p: Tensor, width: int = PREFIX
) -> None:
    """Zero, in place, the weights that top-k, then top-p of the rest, exclude.

    Both keep the first ``m`` tokens of the stable descending order, so the value at rank ``m`` and the number of equal
    values to keep decide a row. Only the ``width`` largest are sorted; a row that needs more is sorted whole. At least
    the most likely token is kept.

    Args:
        scaled: ``[n, vocab]`` logits over temperature: the order.
        weights: ``[n, vocab]`` unnormalised probabilities after min-p: the mass.
        min_p: ``[n, 1]``, applied to the candidates too.
        top_k: ``[n]`` int64, from 1.
        top_p: ``[n]`` float64 in (0, 1].
        width: Number of candidates.
    """
    vocab = scaled.shape[1]
    width = min(width, vocab)
    candidates = _largest(scaled, width)  # [n, width]
    mass = candidates.exp()
    mass *= mass >= min_p
    mass = mass.double()
    mass *= torch.arange(width, device=scaled.device) < top_k[:, None]
    reached = mass.cumsum(dim=-1)
    # The total for top-p: of the k best, or of all.
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
                cut_weights(scaled[rows], some, min_p[rows], top_k[rows], top_p[rows], wide)
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

    On the CPU by numpy, whose partition and sort are vectorised: torch takes 6 to 30 times as long.
    """
    if x.device.type != "cpu":
        return x.topk(width, dim=-1).values
    values = x.numpy()
    if width < x.shape[1]:
        values = np.partition(values, x.shape[1] - width, axis=-1)[:, -width:]
    return torch.from_numpy(np.sort(values, axis=-1)[:, ::-1].copy())  # numpy calls a single column contiguous as it is


def draw_at(weights: Tensor, uniform: Tensor) -> Tensor:
    """Return per row the first token whose cumulative weight exceeds ``uniform`` of the total.

    Two levels, over blocks of columns and then inside one, because a cumulative sum over the vocabulary would be most
    of the cost. Sums are float64: with 100,000 tokens float32 would bias the tail.
    Weights are ``[n, vocab]`` float32, none negative; ``uniform`` is ``[n]`` float64 in [0, 1).
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

    The hash passes BigCrush. Vectorised over rows, a batch costs about 0.1 ms at any size; a numpy generator costs 9 us
    per row. ``seeds`` ``[n]`` are keys, ``counters`` ``[n]`` positions in the streams.

    Source:
        Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (SC 2011), section 4.3.
    """
    nothing = np.zeros_like(counters)
    words = philox4x32((counters & LOW, counters >> SHIFT, nothing, nothing), (seeds & LOW, seeds >> SHIFT))
    bits = (words[0] << SHIFT) | words[1]
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def philox4x32(counter: tuple[Words, Words, Words, Words], key: tuple[Words, Words]) -> tuple[Words, ...]:
    """Run the ten rounds of Philox4x32 on four counter words and two key words (32 bits each, held in 64)."""
    even, odd = np.stack(counter[::2]), np.stack(counter[1::2])  # words 0 and 2, and words 1 and 3 ``[2, n]``
    for keys in (np.stack(key) + PHILOX_WEYL) & LOW:
        crossed = (even * PHILOX_FACTORS)[::-1]
        even, odd = (crossed >> SHIFT) ^ odd ^ keys, crossed & LOW
    return even[0], odd[0], even[1], odd[1]
