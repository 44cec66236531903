"""Tokens from logits in Triton: one program for each row, one launch for any mix of parameters, nothing read back.

::

    all rows     largest logit, its first place, whether the row is broken            1 pass over the row
    draws        mass of each block of columns, then the token in one block           1 more
    top-k, top-p how many tokens, and how much mass, four distances hold              1
                 while the bracket around the last token that stays holds many: half  1 each
                 the tokens in the bracket, to scratch; the last one, in registers    1 each

Distributions of language models need no halving; flat ones about six. Sums are float64, as in ``sampling/draw.py``,
which defines what is left and is the code of the CPU. A pass adds up by thread, and the threads once at its end: a sum
over the program in every block would take longer than its loads.

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
_KEY_0, _KEY_1, _KEY_2, _KEY_3 = (tl.constexpr(key) for key in (0x40000000, 0x40C00000, 0x41200000, 0x41600000))
"""Of the distances 2, 6, 10 and 14."""
_SLACK = tl.constexpr(1e-5)  # more than float32 loses in the sum of a thread


@triton.jit
def largest(row, vocab, BLOCK: tl.constexpr):
    """Return the largest logit, its first place, and the number of logits that are NaN or plus infinity."""
    highest = tl.full((BLOCK,), float("-inf"), tl.float32)
    best = tl.zeros((BLOCK,), tl.int32)
    bad = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, vocab, BLOCK):
        places = first + tl.arange(0, BLOCK)
        logits = tl.load(row + places, mask=places < vocab, other=float("-inf"))
        is_bad = (logits != logits) | (logits == float("inf"))
        bad += is_bad.to(tl.int32)
        logits = tl.where(is_bad, float("-inf"), logits)
        best = tl.where(logits > highest, places, best)
        highest = tl.maximum(highest, logits)
    most = tl.max(highest, 0)
    return most, tl.min(tl.where(highest == most, best, vocab), 0), tl.sum(bad, 0)


@triton.jit
def weighed(row, places, inside, highest, temperature, min_p):
    """Return keys and weights at some places: the most likely token has key 0 and weighs 1."""
    logits = tl.load(row + places, mask=inside, other=float("-inf"))
    distance = tl.abs((logits - highest) / temperature)
    weights = tl.exp(-distance)
    return distance.to(tl.int32, bitcast=True), tl.where(inside & (weights >= min_p), weights, 0.0)


@triton.jit
def weight_of(key, min_p):
    """Return the weight of the tokens of a key, float64."""
    weight = tl.exp(-key.to(tl.float32, bitcast=True))
    return tl.where(weight >= min_p, weight, 0.0).to(tl.float64)


@triton.jit
def measure(row, vocab, last, highest, temperature, min_p, BLOCK: tl.constexpr):
    """Return the number of tokens with keys up to ``last``, and their mass, float64."""
    counts = tl.zeros((BLOCK,), tl.int32)
    masses = tl.zeros((BLOCK,), tl.float64)
    for first in range(0, vocab, BLOCK):
        places = first + tl.arange(0, BLOCK)
        keys, weights = weighed(row, places, places < vocab, highest, temperature, min_p)
        is_within = (keys <= last) & (places < vocab)
        counts += is_within.to(tl.int32)
        masses += tl.where(is_within, weights, 0.0).to(tl.float64)
    return tl.sum(counts, 0), tl.sum(masses, 0)


@triton.jit
def measure_nearest(row, vocab, highest, temperature, min_p, BLOCK: tl.constexpr):
    """Return the mass of all tokens, and counts and masses of those within each of four distances.

    Those masses are added up in float32: ``bracket`` leaves room for their rounding.
    """
    total = tl.zeros((BLOCK,), tl.float64)
    counts = tl.zeros((BLOCK,), tl.int64)  # 16 bits for each distance: a thread sees fewer blocks than that
    masses_0 = tl.zeros((BLOCK,), tl.float32)
    masses_1 = tl.zeros((BLOCK,), tl.float32)
    masses_2 = tl.zeros((BLOCK,), tl.float32)
    masses_3 = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, vocab, BLOCK):
        places = first + tl.arange(0, BLOCK)
        inside = places < vocab
        keys, weights = weighed(row, places, inside, highest, temperature, min_p)
        total += weights.to(tl.float64)
        counts += (inside & (keys <= _KEY_0)).to(tl.int64) + ((inside & (keys <= _KEY_1)).to(tl.int64) << 16)
        counts += ((inside & (keys <= _KEY_2)).to(tl.int64) << 32) + ((inside & (keys <= _KEY_3)).to(tl.int64) << 48)
        masses_0 += tl.where(keys <= _KEY_0, weights, 0.0)
        masses_1 += tl.where(keys <= _KEY_1, weights, 0.0)
        masses_2 += tl.where(keys <= _KEY_2, weights, 0.0)
        masses_3 += tl.where(keys <= _KEY_3, weights, 0.0)
    return (
        tl.sum(total, 0),
        tl.sum(counts & 0xFFFF, 0).to(tl.int32),
        tl.sum((counts >> 16) & 0xFFFF, 0).to(tl.int32),
        tl.sum((counts >> 32) & 0xFFFF, 0).to(tl.int32),
        tl.sum((counts >> 48) & 0xFFFF, 0).to(tl.int32),
        tl.sum(masses_0.to(tl.float64), 0),
        tl.sum(masses_1.to(tl.float64), 0),
        tl.sum(masses_2.to(tl.float64), 0),
        tl.sum(masses_3.to(tl.float64), 0),
    )


@triton.jit
def narrow(low, high, num_low, num_high, key, num, found, wanted):
    """Return the bracket cut at a key, if what is found up to it is surely too little, or surely enough."""
    is_low = found * (1.0 + _SLACK) < wanted
    is_high = (found >= wanted * (1.0 + _SLACK)) & (key < high)
    low, num_low = tl.where(is_low, key + 1, low), tl.where(is_low, num, num_low)
    return low, tl.where(is_high, key, high), num_low, tl.where(is_high, num, num_high)


@triton.jit
def bracket(
    row,
    vocab,
    wanted,
    nums,
    founds,
    highest,
    temperature,
    min_p,
    IS_MASS: tl.constexpr,
    FEW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return the least and the largest key between which ``pick`` finds its key among at most ``FEW`` tokens.

    ``nums`` and ``founds`` are what four distances hold. More tokens are between them only if all have one key.
    """
    low = tl.full([], 0, tl.int32)
    high = tl.full([], _LAST_KEY, tl.int32)
    num_low = tl.full([], 0, tl.int32)
    num_high = tl.full([], 0, tl.int32) + vocab
    low, high, num_low, num_high = narrow(low, high, num_low, num_high, _KEY_0, nums[0], founds[0], wanted)
    low, high, num_low, num_high = narrow(low, high, num_low, num_high, _KEY_1, nums[1], founds[1], wanted)
    low, high, num_low, num_high = narrow(low, high, num_low, num_high, _KEY_2, nums[2], founds[2], wanted)
    low, high, num_low, num_high = narrow(low, high, num_low, num_high, _KEY_3, nums[3], founds[3], wanted)
    while (num_high - num_low > FEW) & (low < high):
        middle = low + (high - low) // 2
        num, mass = measure(row, vocab, middle, highest, temperature, min_p, BLOCK)
        is_short = (mass if IS_MASS else num.to(tl.float64)) < wanted
        low, num_low = tl.where(is_short, middle + 1, low), tl.where(is_short, num, num_low)
        high, num_high = tl.where(is_short, high, middle), tl.where(is_short, num_high, num)
    return tl.where(num_high <= FEW, 0, low), high


@triton.jit
def pick(scratch, low, high, wanted, count, mass, number, min_p, IS_MASS: tl.constexpr, FEW: tl.constexpr):
    """Return the least key up to which there are ``wanted`` tokens, or with ``IS_MASS`` as much mass.

    Also the number of tokens with lower keys, and their mass. ``count`` and ``mass`` are of those below ``low``.
    """
    lanes = tl.arange(0, FEW)
    keys = tl.load(scratch + lanes, mask=lanes < number, other=_LAST_KEY)
    weights = tl.where(lanes < number, weight_of(keys, min_p), 0.0)
    shares = weights if IS_MASS else tl.where(lanes < number, 1.0, 0.0).to(tl.float64)
    below = mass if IS_MASS else count.to(tl.float64)
    while low < high:
        middle = low + (high - low) // 2
        is_short = below + tl.sum(tl.where(keys <= middle, shares, 0.0), 0) < wanted
        low, high = tl.where(is_short, middle + 1, low), tl.where(is_short, high, middle)
    is_below = (keys < low) & (lanes < number)
    return low, count + tl.sum(is_below.to(tl.int32), 0), mass + tl.sum(tl.where(is_below, weights, 0.0), 0)


@triton.jit
def gather(row, vocab, low, high, scratch, highest, temperature, min_p, FEW: tl.constexpr, BLOCK: tl.constexpr):
    """Write the keys from ``low`` to ``high``, at most ``FEW``; return number and mass of lower ones, and theirs."""
    counts = tl.zeros((BLOCK,), tl.int32)
    masses = tl.zeros((BLOCK,), tl.float64)
    total = tl.full([], 0, tl.int32)
    for first in range(0, vocab, BLOCK):
        places = first + tl.arange(0, BLOCK)
        keys, weights = weighed(row, places, places < vocab, highest, temperature, min_p)
        is_below = (keys < low) & (places < vocab)
        counts += is_below.to(tl.int32)
        masses += tl.where(is_below, weights, 0.0).to(tl.float64)
        is_within = (keys >= low) & (keys <= high) & (places < vocab)
        number = tl.sum(is_within.to(tl.int32), 0)
        if number > 0:
            own = total + tl.cumsum(is_within.to(tl.int32), 0) - 1
            tl.store(scratch + own, keys, mask=is_within & (own < FEW))
        total += number
    tl.debug_barrier()  # other threads of the program read what this one has written
    return tl.sum(counts, 0), tl.sum(masses, 0), tl.minimum(total, FEW)


@triton.jit
def cut(row, vocab, top_k, top_p, scratch, highest, temperature, min_p, FEW: tl.constexpr, BLOCK: tl.constexpr):
    """Return the last key that top-k and then top-p leave, and how many tokens of that key, in the order of places."""
    total, num_0, num_1, num_2, num_3, mass_0, mass_1, mass_2, mass_3 = measure_nearest(
        row, vocab, highest, temperature, min_p, BLOCK
    )
    nums = (num_0, num_1, num_2, num_3)
    last = tl.full([], _LAST_KEY, tl.int32)
    room = tl.full([], 0, tl.int32) + vocab
    low = tl.full([], 1, tl.int32)
    high = last
    count = tl.full([], 0, tl.int32)
    mass = total
    base = total
    number = count
    if top_k < vocab:
        founds = (num_0.to(tl.float64), num_1.to(tl.float64), num_2.to(tl.float64), num_3.to(tl.float64))
        low, high = bracket(row, vocab, top_k, nums, founds, highest, temperature, min_p, False, FEW, BLOCK)
        count, base, number = gather(row, vocab, low, high, scratch, highest, temperature, min_p, FEW, BLOCK)
        last, num, mass = pick(scratch, low, high, top_k, count, base, number, min_p, False, FEW)
        room = top_k.to(tl.int32) - num
        total = mass + room.to(tl.float64) * weight_of(last, min_p)
    if top_p < 1.0:
        wanted = top_p * total
        if low > 0:  # else all tokens that top-k may leave are in the scratch already
            founds = (mass_0, mass_1, mass_2, mass_3)
            low, high = bracket(row, vocab, wanted, nums, founds, highest, temperature, min_p, True, FEW, BLOCK)
            count, base, number = gather(row, vocab, low, high, scratch, highest, temperature, min_p, FEW, BLOCK)
        own, _, own_mass = pick(scratch, low, high, wanted, count, base, number, min_p, True, FEW)
        own_mass = tl.where(own > last, mass, own_mass)
        own = tl.minimum(own, last)
        weight = tl.exp(-own.to(tl.float32, bitcast=True)).to(tl.float64)
        # The exclusive sums of those of this key are mass + i * weight: they stay while these are below what is wanted.
        parts = tl.where(weight > 0.0, (wanted - own_mass) / tl.where(weight > 0.0, weight, 1.0), 1.0)
        parts = tl.minimum(tl.maximum(parts, 1.0), vocab.to(tl.float64))
        fits = parts.to(tl.int32)
        fits += (fits.to(tl.float64) < parts).to(tl.int32)
        room = tl.where(own == last, tl.minimum(room, fits), fits)
        last = own
    return last, room


@triton.jit
def draw(row, num, last, room, uniform, highest, temperature, min_p, LANES: tl.constexpr, BLOCK: tl.constexpr):
    """Return the first of the places that are left whose cumulative weight exceeds ``uniform`` of the total.

    The row has at most ``LANES`` blocks: one is found by their masses, and the place in that one.
    """
    lanes = tl.arange(0, LANES)
    masses = tl.zeros((LANES,), tl.float64)
    equals = tl.zeros((LANES,), tl.int32)
    for first in range(0, num, BLOCK):
        places = first + tl.arange(0, BLOCK)
        keys, weights = weighed(row, places, places < num, highest, temperature, min_p)
        mass = tl.sum(tl.where(keys < last, weights, 0.0).to(tl.float64), 0)
        equal = tl.sum(((keys == last) & (places < num)).to(tl.int32), 0)
        masses = tl.where(lanes == first // BLOCK, mass, masses)
        equals = tl.where(lanes == first // BLOCK, equal, equals)
    # Of the tokens of the last key the first ``room`` are left; they weigh the same.
    seen = tl.cumsum(equals, 0) - equals
    left = tl.minimum(tl.maximum(room - seen, 0), equals)
    masses += left.to(tl.float64) * weight_of(last, min_p)
    total = tl.sum(masses, 0)
    # Rounding must not carry the target past the last token: it stays one float below the total.
    below = (total.to(tl.int64, bitcast=True) - 1).to(tl.float64, bitcast=True)
    target = tl.minimum(uniform * total, below)
    after = tl.cumsum(masses, 0)
    lane = tl.minimum(tl.min(tl.where(after > target, lanes, LANES), 0), tl.max(tl.where(masses > 0.0, lanes, 0), 0))
    places = lane * BLOCK + tl.arange(0, BLOCK)
    keys, weights = weighed(row, places, places < num, highest, temperature, min_p)
    equal = ((keys == last) & (places < num)).to(tl.int32)
    number = tl.sum(tl.where(lanes == lane, seen, 0), 0) + tl.cumsum(equal, 0)
    weights = tl.where((keys < last) | ((equal > 0) & (number <= room)), weights, 0.0)
    before = tl.sum(tl.where(lanes == lane, after - masses, 0.0), 0)
    passed = (before + tl.cumsum(weights.to(tl.float64), 0) > target) & (weights > 0.0)
    return tl.minimum(tl.min(tl.where(passed, places, num), 0), tl.max(tl.where(weights > 0.0, places, 0), 0))


@triton.jit(do_not_specialize=["dead"])
def choose(
    raw,
    logits,
    row_stride,
    numbers,
    scratch,
    out,
    vocab,
    dead,
    IS_EDITED: tl.constexpr,
    FEW: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the token of row ``program_id(0)``.

    ::

        raw      logits [rows, vocab], float32, of which one that is not finite breaks the row: its token is -1
        logits   what to choose from, likewise; with IS_EDITED another tensor than raw
        numbers  [rows, SAMPLING_NUMBERS], float64
        scratch  [rows, FEW], int32
        out      [rows], int64
        LANES    at least the blocks of a row, a power of two
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
        last = tl.full([], _LAST_KEY, tl.int32)
        room = tl.full([], 0, tl.int32)
        if (top_k < vocab) | (top_p < 1.0):
            keys = scratch + number * FEW
            last, room = cut(row, vocab, top_k, top_p, keys, highest, temperature, min_p, FEW, BLOCK)
        token = draw(row, vocab, last, room, uniform, highest, temperature, min_p, LANES, BLOCK)
    token = tl.where(highest == float("-inf"), dead, token)
    tl.store(out + number, tl.where(is_broken, -1, token).to(tl.int64))
