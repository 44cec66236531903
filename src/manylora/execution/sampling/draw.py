"""Top-k, top-p and the draw: the tokens left in each row, a uniform number for it, and the token for that number.

Rows are unnormalised weights, so nothing is divided by a sum over the vocabulary. Top-k and top-p look at a few hundred
sorted candidates first.

Uniform numbers are counter-based: a hash of seed and position (Philox4x32-10, the generator of CUDA). A pure function
replaces a generator object per request, which would have to be kept, saved at pre-emption and replayed
(``docs/adr/0005``). It returns the same number for the same token of the same request.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["cut_weights", "draw_at", "philox4x32", "philox_uniform"]

PREFIX = 256  # sorted candidates for top-k and top-p: nearly always enough, and far cheaper than a full sort
BLOCK = 256  # columns of a block: a draw finds the block, then the token in it

LOW, SHIFT = np.uint64(0xFFFFFFFF), np.uint64(32)

Words = NDArray[np.uint64]


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
    return torch.from_numpy(np.ascontiguousarray(np.sort(values, axis=-1)[:, ::-1]))


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
    (c0, c1, c2, c3), (key0, key1) = counter, key
    for _ in range(10):
        left, right = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (right >> SHIFT) ^ c1 ^ key0, right & LOW, (left >> SHIFT) ^ c3 ^ key1, left & LOW
        key0, key1 = (key0 + np.uint64(0x9E3779B9)) & LOW, (key1 + np.uint64(0xBB67AE85)) & LOW
    return c0, c1, c2, c3
