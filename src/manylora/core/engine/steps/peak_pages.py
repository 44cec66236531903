"""The most pages that running sequences will hold together, if each generates as many tokens as it may."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["peak_pages"]


def peak_pages(sequences: Iterable[tuple[int, int]], block_size: int) -> int:
    """Return an upper bound on the pages that sequences hold at once until the last has ended.

    All generate one token a step, so the most is held just before one of them ends. At that time the sequences that
    have as many tokens left, or more, have all grown by as many. Each may leave most of its last page empty.

    Source: S-LoRA's public request queue, which counts tokens.

    Args:
        sequences: Tokens that each holds now, and tokens that it may still generate.
        block_size: Tokens of a page.
    """
    held = peak = 0
    for count, (num_left, num_held) in enumerate(sorted(((left, now) for now, left in sequences), reverse=True), 1):
        held += num_held + block_size - 1
        peak = max(peak, (held + count * num_left) // block_size)
    return peak
