"""Compiled attention of decoding rows: K and V are read in place, page by page, once.

The torch path gathers every sequence's pages into one padded tensor, which a fused product reads again; here nothing is
copied or padded, and vectors of 16 or 8 bits are widened one by one. The work is ``length x kv heads`` per sequence,
laid end to end and cut into equal shares, so one long sequence among short ones keeps all threads busy::

    | seq 0: 4 heads x 900 tokens        | seq 1 | seq 2 | ...
    |------ thread 0 ------|------ thread 1 ------|
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
import torch
from numba import carray, njit

from manylora.core.adapters.shape import PageShape
from manylora.execution.kernels.cpu.openmp import FAST_MATH, Team, compile_kernel, num_threads, thread_num
from manylora.execution.kernels.cpu.tables import share
from manylora.execution.kernels.cpu.vectors import as_float32, typed_views

__all__ = ["attend_compiled", "attention_kernel"]

_KINDS = (torch.float32, torch.bfloat16, torch.float16, torch.int8)
_FLOAT32, _BFLOAT16, _FLOAT16, _INT8 = range(len(_KINDS))


def attend_compiled(
    team: Team,
    query: torch.Tensor,
    pool: torch.Tensor,
    shape: PageShape,
    layer: int,
    tables: np.ndarray,
    bounds: np.ndarray,
    *,
    scaling: float,
    softcap: float | None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend one token per sequence; ``[rows, heads, value_dim]``.

    ``query`` ``[rows, heads, head_dim]`` is float32 and contiguous, as is the result. ``pool`` has all pages
    ``[pages, elements]``, of ``shape``; ``tables`` are the pages of each row's sequence ``[rows, width]``, int64.
    ``bounds`` ``[rows, 2]`` are the first and one past the last position that a row sees, from its table's start.
    ``scaling``, ``softcap`` and ``sinks`` are as in ``AttentionCall``.
    """
    num_rows, num_heads, head_dim = query.shape
    value_dim = head_dim if shape.value_dim is None else shape.value_dim
    longest = tables.shape[1] * shape.block_size
    out = query.new_empty(num_rows, num_heads, value_dim)
    scratch = torch.empty(torch.get_num_threads(), num_heads * longest + max(head_dim, value_dim))
    own_sinks = torch.empty(0) if sinks is None else sinks.float()
    model = (num_rows, num_heads, shape.num_kv_heads, head_dim, value_dim, len(own_sinks))
    pages = (shape.num_layers, shape.block_size, shape.key_elements, shape.value_elements, _KINDS.index(pool.dtype))
    sizes = np.array((*model, *pages, pool.nbytes, tables.shape[1], layer), dtype=np.int64)
    factors = np.array([scaling, softcap or 0.0], dtype=np.float32)
    team.run(attention_kernel(), sizes, factors, query, out, pool, tables, bounds, scratch, own_sinks)
    return out


def _widen(kind: int, memory: Any, start: int, target: Any) -> None:
    """Write the vector of 16 or 8 bits at element ``start`` to ``target``, as float32."""
    head_dim = target.shape[0]
    if kind == _BFLOAT16:
        own = memory[1][start : start + head_dim]
        for d in range(head_dim):
            target[d] = as_float32(own[d])
    elif kind == _FLOAT16:
        halves = memory[2][start : start + head_dim]
        for d in range(head_dim):
            target[d] = as_float32(halves[d])
    else:
        codes, scale = memory[3][start : start + head_dim], memory[0][(start + head_dim) // 4]
        for d in range(head_dim):
            target[d] = np.float32(codes[d]) * scale


def _scores(
    keys: Any, stride: int, head_dim: int, table: Any, block_size: int, page: int, first: int, queries: Any, scores: Any
) -> None:
    """Write ``q k`` for all heads of ``queries`` ``[kv_heads, group, head_dim]`` into ``scores``."""
    num_kv_heads, group, _ = queries.shape
    for j in range(scores.shape[2]):
        position = first + j
        start = table[position // block_size] * page + position % block_size * stride
        for h in range(num_kv_heads):
            key = keys[start + h * head_dim : start + (h + 1) * head_dim]
            for g in range(group):
                vector = queries[h, g]
                total = np.float32(0.0)
                for d in range(head_dim):
                    total += vector[d] * key[d]
                scores[h, g, j] = total


def _narrow_scores(
    kind: int,
    memory: Any,
    at: int,
    stride: int,
    size: int,
    table: Any,
    block_size: int,
    page: int,
    first: int,
    queries: Any,
    scores: Any,
    target: Any,
) -> None:
    """The same for keys of 16 or 8 bits, each widened into ``target`` ``[head_dim]``.

    A loop of its own: one for all kinds takes twice as long in float32, where nothing is to be widened.
    """
    num_kv_heads, group, head_dim = queries.shape
    for j in range(scores.shape[2]):
        position = first + j
        start = at + table[position // block_size] * page + position % block_size * stride
        for h in range(num_kv_heads):
            widen(kind, memory, start + h * size, target)
            for g in range(group):
                query = queries[h, g]
                total = np.float32(0.0)
                for d in range(head_dim):
                    total += query[d] * target[d]
                scores[h, g, j] = total


def _softmax(scores: Any, scaling: float, softcap: float, sinks: Any) -> None:
    """Turn scores into weights; ``sinks`` has a score of each head ``[kv_heads * group]``, or nothing."""
    for h in range(scores.shape[0]):
        for g in range(scores.shape[1]):
            row = scores[h, g]
            sink = sinks[h * scores.shape[1] + g] if sinks.shape[0] > 0 else np.float32(-math.inf)
            highest = sink
            for j in range(row.shape[0]):
                value = row[j] * scaling
                if softcap > 0.0:
                    value = softcap * np.tanh(value / softcap)
                row[j] = value
                highest = max(highest, value)
            total = np.exp(sink - highest)
            for j in range(row.shape[0]):
                row[j] = np.exp(row[j] - highest)
                total += row[j]
            for j in range(row.shape[0]):
                row[j] /= total


def _mix(
    values: Any, stride: int, head_dim: int, table: Any, block_size: int, page: int, first: int, weights: Any, out: Any
) -> None:
    num_kv_heads, group, _ = out.shape
    out[:] = np.float32(0.0)
    for j in range(weights.shape[2]):
        position = first + j
        start = table[position // block_size] * page + position % block_size * stride
        for h in range(num_kv_heads):
            value = values[start + h * head_dim : start + (h + 1) * head_dim]
            for g in range(group):
                weight = weights[h, g, j]
                target = out[h, g]
                for d in range(head_dim):
                    target[d] += weight * value[d]


def _narrow_mix(
    kind: int,
    memory: Any,
    at: int,
    stride: int,
    size: int,
    table: Any,
    block_size: int,
    page: int,
    first: int,
    weights: Any,
    out: Any,
    target: Any,
) -> None:
    num_kv_heads, group, head_dim = out.shape
    out[:] = np.float32(0.0)
    for j in range(weights.shape[2]):
        position = first + j
        start = at + table[position // block_size] * page + position % block_size * stride
        for h in range(num_kv_heads):
            widen(kind, memory, start + h * size, target)
            for g in range(group):
                weight = weights[h, g, j]
                row = out[h, g]
                for d in range(head_dim):
                    row[d] += weight * target[d]


def _attend(thread: Any, num_threads: Any, pointers: Any) -> None:
    sizes = carray(pointers[0], 14, np.int64)
    num_rows, num_heads, num_kv_heads, head_dim, value_dim, num_sinks = sizes[:6]
    num_layers, block_size, key_size, value_size, kind, num_bytes, width, layer = sizes[6:]
    factors = carray(pointers[1], 2, np.float32)
    group = num_heads // num_kv_heads
    query = carray(pointers[2], (num_rows, num_kv_heads, group, head_dim), np.float32)
    out = carray(pointers[3], (num_rows, num_kv_heads, group, value_dim), np.float32)
    memory = (*typed_views(pointers[4], num_bytes), carray(pointers[4], num_bytes, np.int8))
    tables = carray(pointers[5], (num_rows, width), np.int64)
    bounds = carray(pointers[6], (num_rows, 2), np.int64)
    length = num_heads * width * block_size
    scratch = carray(pointers[7], (num_threads, length + max(head_dim, value_dim)), np.float32)[thread]
    key_target, value_target = scratch[length : length + head_dim], scratch[length : length + value_dim]
    sinks = carray(pointers[8], num_sinks, np.float32)
    key_stride, value_stride = num_kv_heads * key_size, num_kv_heads * value_size
    own_page = block_size * (key_stride + value_stride)  # of one layer
    page = num_layers * own_page
    total = 0
    for row in range(num_rows):
        total += (bounds[row, 1] - bounds[row, 0]) * num_kv_heads
    start = 0
    for row in range(num_rows):
        first = bounds[row, 0]
        length = bounds[row, 1] - first
        low, high = share(thread, num_threads, total, start, length)
        low, high = min(low, num_kv_heads), min(high, num_kv_heads)
        start += length * num_kv_heads
        if low >= high:
            continue
        weights = scratch[: (high - low) * group * length].reshape((high - low, group, length))
        table, asked, own = tables[row], query[row, low:high], out[row, low:high]
        keys = layer * own_page + low * key_size
        values = layer * own_page + block_size * key_stride + low * value_size
        place = (table, block_size, page, first)
        if kind == _FLOAT32:
            scores(memory[0][keys:], key_stride, head_dim, *place, asked, weights)
        else:
            narrow_scores(kind, memory, keys, key_stride, key_size, *place, asked, weights, key_target)
        softmax(weights, factors[0], factors[1], sinks[low * group : high * group] if num_sinks > 0 else sinks)
        if kind == _FLOAT32:
            mix(memory[0][values:], value_stride, value_dim, *place, weights, own)
        else:
            narrow_mix(kind, memory, values, value_stride, value_size, *place, weights, own, value_target)


widen = njit(cache=True)(_widen)
scores = njit(cache=True, fastmath=FAST_MATH)(_scores)
narrow_scores = njit(cache=True, fastmath=FAST_MATH)(_narrow_scores)
softmax = njit(cache=True, fastmath=FAST_MATH)(_softmax)
narrow_mix = njit(cache=True, fastmath=FAST_MATH)(_narrow_mix)
mix = njit(cache=True, fastmath=FAST_MATH)(_mix)
attend = njit(cache=True)(_attend)


def _entry(pointers: Any) -> None:
    attend(thread_num(), num_threads(), pointers)


@cache
def attention_kernel() -> int:
    """Return the kernel's address; the first call compiles it."""
    return compile_kernel(_entry)
