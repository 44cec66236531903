"""Top-k, top-p and the draw: the tokens left in each row, and the token for a uniform number.

Rows are unnormalised weights, so nothing is divided by a sum over the vocabulary. Top-k and top-p look at a few hundred
sorted candidates first.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

__all__ = ["cut_weights", "draw_at"]

PREFIX = 256
"""Sorted candidates for top-k and top-p: nearly always enough, and far cheaper than a full sort."""

BLOCK = 256
"""Columns of a block: a draw finds the block, then the token in it."""


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
