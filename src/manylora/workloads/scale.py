"""Scaling lengths to a machine: the factor at which a trace just fits its memory.

Chameleon (section 3.2) scales the lengths of a production trace by one constant, so that its peak memory is that of the
machine at hand. The peak depends on how long requests stay, which the paper leaves to its testbed; here a request is
taken to stay for a time per answer token that the caller states, and nobody waits.
"""

from __future__ import annotations

import numpy as np

from manylora.errors import ConfigError
from manylora.workloads.streams import FloatArray, IntArray

__all__ = ["peak_tokens", "scale_to_memory"]


def peak_tokens(arrival_s: FloatArray, prompt: IntArray, output: IntArray, *, scale: float, token_s: float) -> float:
    """Return the most tokens that requests hold at once if none of them waits.

    A request holds its prompt from its arrival on, and one token more every ``token_s``, until its answer is whole.

    Args:
        arrival_s: Arrivals in seconds, in order.
        prompt: Prompt tokens of each.
        output: Answer tokens of each.
        scale: Factor on both lengths.
        token_s: Seconds per answer token.
    """
    ends = arrival_s + output * (scale * token_s)
    by_end = np.argsort(ends, kind="stable")
    # The sum grows between departures, so it peaks just before one. At time t the requests that are there hold
    # sum(prompt - arrival / token_s) + count * t / token_s.
    held = prompt * scale - arrival_s / token_s
    came = np.searchsorted(arrival_s, ends[by_end], side="right")
    gone = np.arange(len(ends))
    totals = np.concatenate([[0.0], np.cumsum(held)])[came] - np.concatenate([[0.0], np.cumsum(held[by_end])])[gone]
    return float(np.max(totals + (came - gone) * (ends[by_end] / token_s)))


def scale_to_memory(
    arrival_s: FloatArray, prompt: IntArray, output: IntArray, *, capacity_tokens: float, token_s: float
) -> float:
    """Return the factor on lengths at which the peak of a trace is what a machine holds, found to a thousandth.

    Args:
        arrival_s: Arrivals in seconds, in order.
        prompt: Prompt tokens of each.
        output: Answer tokens of each.
        capacity_tokens: Tokens of KV that fit beside the weights.
        token_s: Seconds per answer token.

    Raises:
        ConfigError: A factor of a thousandth is too much, or one of a thousand too little.
    """
    if not (len(arrival_s) and capacity_tokens > 0 and token_s > 0):
        raise ConfigError(f"Got {len(arrival_s)} requests, {capacity_tokens = }, {token_s = }, expected all above 0")
    low, high = 1e-3, 1e3
    for scale, fits in ((low, True), (high, False)):
        peak = peak_tokens(arrival_s, prompt, output, scale=scale, token_s=token_s)
        if (peak <= capacity_tokens) is not fits:
            raise ConfigError(f"Got {capacity_tokens = }, but lengths times {scale:g} hold {peak:.0f} tokens at once")
    while high / low > 1.001:
        middle = (low * high) ** 0.5
        if peak_tokens(arrival_s, prompt, output, scale=middle, token_s=token_s) <= capacity_tokens:
            low = middle
        else:
            high = middle
    return low
