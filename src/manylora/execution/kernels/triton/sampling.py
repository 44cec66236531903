"""Tokens from logits in Triton: one program for each row, one launch for any mix of parameters, nothing read back.

::

    all rows     largest logit, its first place, whether the row is broken         1 pass over the row
    draws        mass of all, then the token at ``uniform`` of it                  2 more
    top-k, top-p how many tokens are within a few distances of the largest         1
                 those within the nearest distance that holds enough of them       1, to scratch
                 the last token that stays, bit by bit, and the draw               over the scratch

A row whose distances hold too few tokens, or too many, is searched whole: 62 passes, which only flat distributions
take. Sums are float64, as in ``sampling/draw.py``, which defines what is left and is the code of the CPU.

The order of tokens is that of their *keys*: the bits of the distance to the largest logit over the temperature, as an
integer. So keys fall where logits rise, and equal logits have equal keys.

Source:
    FlashInfer (arXiv:2501.01005) samples top-k and top-p without sorting, by rejection. We search the threshold, since
    one uniform number must give one token (``docs/adr/0005``).
"""

from __future__ import annotations

import triton
import triton.language as tl

from manylora.execution.kernels.triton.support import SAMPLING_NUMBERS

__all__ = ["choose"]

_NUMBERS = tl.constexpr(SAMPLING_NUMBERS)
_LAST_KEY = tl.constexpr(0x7F800000)  # of a logit of minus infinity; none is larger
_BOUNDS = tl.constexpr(4)  # distances to the largest scaled logit: 2, 6, 10, 14


@triton.jit
def largest(row, vocab, BLOCK: tl.constexpr):
    """Return the largest logit, its first place, and the number of logits that are NaN or plus infinity."""
    highest = tl.full([], float("-inf"), tl.float32)
    best = tl.full([], 0, tl.int32)
    num_bad = tl.full([], 0, tl.int32)
    for first in range(0, vocab, BLOCK):
        places = first + tl.arange(0, BLOCK)
        logits = tl.load(row + places, mask=places < vocab, other=float("-inf"))
        is_bad = (logits != logits) | (logits == float("inf"))
        num_bad += tl.sum(is_bad.to(tl.int32), 0)
        logits = tl.where(is_bad, float("-inf"), logits)
        own = tl.max(logits, 0)
        place = tl.min(tl.where(logits == own, places, vocab), 0)
        best = tl.where(own > highest, place, best)
        highest = tl.maximum(highest, own)
    return highest, best, num_bad


@triton.jit
def weighed(row, places, inside, highest, temperature, min_p):
    """Return keys and weights at some places: the most likely token has key 0 and weighs 1."""
    logits = tl.load(row + places, mask=inside, other=float("-inf"))
    distance = tl.abs((logits - highest) / temperature)
    weights = tl.exp(-distance)
    return distance.to(tl.int32, bitcast=True), tl.where(inside & (weights >= min_p), weights, 0.0)


@triton.jit
def measure(row, num, last, highest, temperature, min_p, BLOCK: tl.constexpr):
    """Return the number of tokens with keys up to ``last``, and their mass, float64."""
    count = tl.full([], 0, tl.int32)
    mass = tl.full([], 0.0, tl.float64)
    for first in range(0, num, BLOCK):
        places = first + tl.arange(0, BLOCK)
        keys, weights = weighed(row, places, places < num, highest, temperature, min_p)
        is_within = (keys <= last) & (places < num)
        count += tl.sum(is_within.to(tl.int32), 0)
        mass += tl.sum(tl.where(is_within, weights, 0.0).to(tl.float64), 0)
    return count, mass


@triton.jit
def find_key(row, num, wanted, highest, temperature, min_p, IS_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the least key up to which there are ``wanted`` tokens, or with ``IS_MASS`` as much mass."""
    low = tl.full([], 0, tl.int32)
    width = tl.full([], 1 << 30, tl.int32)
    for _ in range(31):
        count, mass = measure(row, num, low + width - 1, highest, temperature, min_p, BLOCK)
        found = mass if IS_MASS else count.to(tl.float64)
        is_short = found < wanted
        low = tl.where(is_short, low + width, low)
        width = width // 2
    return tl.minimum(low, _LAST_KEY)


@triton.jit
def cut(row, num, vocab, total, top_k, top_p, highest, temperature, min_p, BLOCK: tl.constexpr):
    """Return the last key that top-k and then top-p leave, and how many tokens of that key, in the order of places."""
    last = tl.full([], _LAST_KEY, tl.int32)
    room = tl.full([], 0, tl.int32) + vocab
    if top_k < vocab:
        last = find_key(row, num, top_k, highest, temperature, min_p, False, BLOCK)
        count, mass = measure(row, num, last - 1, highest, temperature, min_p, BLOCK)
        room = top_k.to(tl.int32) - count
        weight = tl.exp(-last.to(tl.float32, bitcast=True))
        total = mass + room.to(tl.float64) * tl.where(weight >= min_p, weight, 0.0).to(tl.float64)
    if top_p < 1.0:
        wanted = top_p * total
        own = tl.minimum(find_key(row, num, wanted, highest, temperature, min_p, True, BLOCK), last)
        count, mass = measure(row, num, own - 1, highest, temperature, min_p, BLOCK)
        weight = tl.exp(-own.to(tl.float32, bitcast=True)).to(tl.float64)
        # The exclusive sums of those of this key are mass + i * weight: they stay while these are below what is wanted.
        parts = tl.where(weight > 0.0, (wanted - mass) / tl.where(weight > 0.0, weight, 1.0), 1.0)
        parts = tl.minimum(tl.maximum(parts, 1.0), vocab.to(tl.float64))
        fits = parts.to(tl.int32)
        fits += (fits.to(tl.float64) < parts).to(tl.int32)
        room = tl.where(own == last, tl.minimum(room, fits), fits)
        last = own
    return last, room


@triton.jit
def kept_weights(row, places, inside, last, room, seen, highest, temperature, min_p, BLOCK: tl.constexpr):
    """Return the weights of the tokens that are left, float64, and the number of those of key ``last`` so far."""
    keys, weights = weighed(row, places, inside, highest, temperature, min_p)
    equal = (inside & (keys == last)).to(tl.int32)
    num_equal = tl.sum(equal, 0)
    if num_equal > 0:
        is_left = (keys < last) | ((equal > 0) & (seen + tl.cumsum(equal, 0) <= room))
        weights = tl.where(is_left, weights, 0.0)
    else:
        weights = tl.where(keys < last, weights, 0.0)
    return weights.to(tl.float64), seen + num_equal


@triton.jit
def draw(row, num, last, room, uniform, highest, temperature, min_p, BLOCK: tl.constexpr):
    """Return the first of the places that are left whose cumulative weight exceeds ``uniform`` of the total."""
    total = tl.full([], 0.0, tl.float64)
    seen = tl.full([], 0, tl.int32)
    for first in range(0, num, BLOCK):
        places = first + tl.arange(0, BLOCK)
        weights, seen = kept_weights(row, places, places < num, last, room, seen, highest, temperature, min_p, BLOCK)
        total += tl.sum(weights, 0)
    # Rounding must not carry the target past the last token: it stays one float below the total.
    below = (total.to(tl.int64, bitcast=True) - 1).to(tl.float64, bitcast=True)
    target = tl.minimum(uniform * total, below)
    before = tl.full([], 0.0, tl.float64)
    seen = tl.full([], 0, tl.int32)
    found = tl.full([], -1, tl.int32)
    for first in range(0, num, BLOCK):
        places = first + tl.arange(0, BLOCK)
        weights, seen = kept_weights(row, places, places < num, last, room, seen, highest, temperature, min_p, BLOCK)
        after = before + tl.sum(weights, 0)
        if (found < 0) & (after > target):
            passed = (before + tl.cumsum(weights, 0) > target) & (weights > 0.0)
            place = tl.min(tl.where(passed, places, num), 0)
            end = tl.max(tl.where(weights > 0.0, places, 0), 0)
            found = tl.minimum(place, end)
        before = after
    return tl.maximum(found, 0)


@triton.jit
def nearest(row, vocab, top_k, top_p, highest, temperature, min_p, FEW: tl.constexpr, BLOCK: tl.constexpr):
    """Return the mass of all tokens, and the least distance that holds all that stay in at most ``FEW``; 0 for none."""
    lanes = tl.arange(0, _BOUNDS)
    counts = tl.zeros((_BOUNDS,), tl.int32)
    masses = tl.zeros((_BOUNDS,), tl.float64)
    total = tl.full([], 0.0, tl.float64)
    for first in range(0, vocab, BLOCK):
        places = first + tl.arange(0, BLOCK)
        keys, weights = weighed(row, places, places < vocab, highest, temperature, min_p)
        total += tl.sum(weights.to(tl.float64), 0)
        for lane in tl.static_range(_BOUNDS):
            is_within = (keys.to(tl.float32, bitcast=True) <= 2.0 + 4.0 * lane) & (places < vocab)
            counts += tl.where(lanes == lane, tl.sum(is_within.to(tl.int32), 0), 0)
            masses += tl.where(lanes == lane, tl.sum(tl.where(is_within, weights, 0.0).to(tl.float64), 0), 0.0)
    is_enough = tl.where(top_k < vocab, counts.to(tl.float64) >= top_k, masses >= top_p * total)
    lane = tl.min(tl.where(is_enough & (counts <= FEW), lanes, _BOUNDS), 0)
    return total, tl.where(lane < _BOUNDS, 2.0 + 4.0 * lane.to(tl.float32), 0.0)


@triton.jit
def gather(row, vocab, bound, values, tokens, highest, temperature, BLOCK: tl.constexpr):
    """Write the logits within ``bound``, and their tokens, one behind the other; return their number."""
    count = tl.full([], 0, tl.int32)
    for first in range(0, vocab, BLOCK):
        places = first + tl.arange(0, BLOCK)
        logits = tl.load(row + places, mask=places < vocab, other=float("-inf"))
        is_within = (tl.abs((logits - highest) / temperature) <= bound) & (places < vocab)
        number = tl.sum(is_within.to(tl.int32), 0)
        if number > 0:
            own = count + tl.cumsum(is_within.to(tl.int32), 0) - 1
            tl.store(values + own, logits, mask=is_within)
            tl.store(tokens + own, places, mask=is_within)
        count += number
    tl.debug_barrier()  # other threads of the program read what this one has written
    return count


@triton.jit(do_not_specialize=["dead"])
def choose(
    raw,
    logits,
    row_stride,
    numbers,
    values,
    tokens,
    out,
    vocab,
    dead,
    IS_EDITED: tl.constexpr,
    FEW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the token of row ``program_id(0)``.

    ::

        raw      logits [rows, vocab], float32, of which one that is not finite breaks the row: its token is -1
        logits   what to choose from, likewise; with IS_EDITED another tensor than raw
        numbers  [rows, SAMPLING_NUMBERS], float64
        values   scratch [rows, FEW] in float32, and tokens as much in int32
        out      [rows], int64
        dead     token of a row in which no logit is larger than minus infinity
    """
    number = tl.program_id(0).to(tl.int64)
    row = logits + number * row_stride
    highest, best, num_bad = largest(raw + number * row_stride, vocab, BLOCK)
    is_broken = (num_bad > 0) | (highest == float("-inf"))
    if IS_EDITED:
        highest, best, _ = largest(row, vocab, BLOCK)
    own = numbers + number * _NUMBERS
    temperature = tl.load(own).to(tl.float32)
    token = best
    if (temperature > 0.0) & (highest > float("-inf")) & (num_bad == 0):
        min_p = tl.load(own + 1).to(tl.float32)
        top_k, top_p, uniform = tl.load(own + 2), tl.load(own + 3), tl.load(own + 4)
        if (top_k < vocab) | (top_p < 1.0):
            total, bound = nearest(row, vocab, top_k, top_p, highest, temperature, min_p, FEW, BLOCK)
            if bound > 0.0:
                few, places = values + number * FEW, tokens + number * FEW
                num = gather(row, vocab, bound, few, places, highest, temperature, BLOCK)
                last, room = cut(few, num, vocab, total, top_k, top_p, highest, temperature, min_p, FEW)
                token = tl.load(places + draw(few, num, last, room, uniform, highest, temperature, min_p, FEW))
            else:
                last, room = cut(row, vocab, vocab, total, top_k, top_p, highest, temperature, min_p, BLOCK)
                token = draw(row, vocab, last, room, uniform, highest, temperature, min_p, BLOCK)
        else:
            last = tl.full([], _LAST_KEY, tl.int32)
            token = draw(row, vocab, last, 0, uniform, highest, temperature, min_p, BLOCK)
    token = tl.where(highest == float("-inf"), dead, token)
    tl.store(out + number, tl.where(is_broken, -1, token).to(tl.int64))
