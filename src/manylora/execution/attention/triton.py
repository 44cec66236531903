"""Attention of a step on the Triton kernels, with block tables that stay on the device.

A sequence keeps its line of the table while it runs, wherever it is in the batch, and gains a page every ``block_size``
tokens. So a step of many sequences with long contexts uploads a few numbers instead of all tables.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch

from manylora.core.plan import PlannedSequence
from manylora.execution.attention.call import AttentionCall, Rotation
from manylora.execution.attention.kv import KvPages
from manylora.execution.device import DeviceOps
from manylora.execution.kernels.triton.support import num_programs, power_of_two
from manylora.execution.storage.page_tensor import PageTensor

__all__ = ["PageTables", "TritonAttention", "TritonAttentionKernel", "attend_step"]

MIN_LINES = 16  # rows of a matrix instruction; query blocks are padded to it

PROMPT_LINES = 64
MAX_SPLITS = 16


class TritonAttentionKernel:
    """The Triton kernels, with block tables kept on the device.

    A step has at most ``max_num_seqs`` sequences, each of at most ``max_model_len`` tokens.
    """

    def __init__(self, ops: DeviceOps, pages: PageTensor, *, max_num_seqs: int, max_model_len: int) -> None:
        self._ops = ops
        self.kv = KvPages(pages)
        width = -(-max_model_len // self.kv.block_size)
        # Two more for the check at start; further lines for sequences that are pre-empted meanwhile.
        self.tables = PageTables(ops, num_lines=max_num_seqs + max(2, max_num_seqs // 4), width=width)

    def prepare(self, sequences: Sequence[PlannedSequence]) -> TritonAttention:
        """Return the step's attention."""
        return attend_step(self._ops, self.kv, self.tables, sequences)

    def release(self, seq_ids: Sequence[int]) -> None:
        """Free the table lines of sequences that have left the engine."""
        self.tables.release(seq_ids)


@dataclass(slots=True)
class _Line:
    index: int
    pages: Sequence[int] = ()  # the engine's own list, which only grows as long as it is the same (``PlannedSequence``)
    num_written: int = 0


class PageTables:
    """Block tables of ``width`` pages for sequences that ran lately; a step has at most ``num_lines`` sequences."""

    def __init__(self, ops: DeviceOps, *, num_lines: int, width: int) -> None:
        self._host = ops.host_buffer((num_lines, width), torch.int32)
        self._rows = self._host.numpy()
        self.table = torch.zeros((num_lines, width), dtype=torch.int32, device=ops.device)
        self._lines: dict[int, _Line] = {}
        self._free = list(range(num_lines))[::-1]

    def place(self, sequences: Sequence[PlannedSequence]) -> list[int]:
        """Return the line of each sequence, written up to its last page in the order of the current stream.

        The host's copy may be rewritten only after the step that read it, that is, once its tokens are there.
        """
        lines = []
        missing = sum(sequence.seq_id not in self._lines for sequence in sequences)
        if missing > len(self._free):
            # Sequences that were pre-empted come back with other pages.
            needed = {sequence.seq_id for sequence in sequences}
            self.release([seq_id for seq_id in self._lines if seq_id not in needed])
        for sequence in sequences:
            line = self._lines.get(sequence.seq_id)
            if line is None:
                line = self._lines[sequence.seq_id] = _Line(self._free.pop())
            # A step looks at no page that is written already: its cost does not grow with the context.
            if line.pages is not sequence.pages:
                line.pages, line.num_written = sequence.pages, 0
            if line.num_written < len(sequence.pages):
                self._write(line)
            lines.append(line.index)
        return lines

    def release(self, seq_ids: Sequence[int]) -> None:
        """Free the lines of sequences that have left the engine."""
        for seq_id in seq_ids:
            if (line := self._lines.pop(seq_id, None)) is not None:
                self._free.append(line.index)

    def _write(self, line: _Line) -> None:
        first, stop = line.num_written, len(line.pages)
        self._rows[line.index, first:stop] = line.pages[first:stop]
        line.num_written = stop
        self.table[line.index, first:stop].copy_(self._host[line.index, first:stop], non_blocking=True)


@dataclass(frozen=True, slots=True)
class TritonAttention:
    """The launches of one step, for any layer."""

    kv: KvPages
    positions: torch.Tensor  # position of each row in its sequence ``[rows]``, int64
    slots: torch.Tensor  # place of each token ``[rows]``, int64 (``KvPages.slot``); below 0 for none
    tables: torch.Tensor  # pages of each sequence ``[lines, width]``, int32
    blocks: Callable[[int], torch.Tensor]  # returns query blocks (``BLOCK_FIELDS``), given the most tokens of a block
    is_decode: bool  # whether every block is one token
    splits: int | None = None  # pieces of a context, for decoding; by default as many as fill the device
    # Results of a batch with rows of padding, which no program writes: zeros ``[most_rows, heads, value_dim]`` by
    # heads, made on first use. Stale memory would pass through the model as numbers that overflow.
    outputs: dict[tuple[int, int], torch.Tensor] | None = None
    most_rows: int = 0

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Store the layer's K and V, then attend every row to its own sequence; ``[rows, heads, value_dim]``.

        The same launches rotate queries and keys that are not rotated yet.
        """
        from manylora.execution.kernels.triton import attention as triton_attention

        shape, pool = self.kv.pages.shape, self.kv.pages.flat
        query = call.query if call.query.stride(2) == 1 else call.query.contiguous()
        num_heads, num_rows, head_dim = query.shape
        value_dim = call.value.shape[2]
        group = num_heads // shape.num_kv_heads
        layer = int(call.module.layer_idx)  # type: ignore[arg-type]
        angles = _angles(call)
        self._store(call, angles, layer)

        lines = max(MIN_LINES if self.is_decode else PROMPT_LINES, power_of_two(group))
        blocks = self.blocks(1 if self.is_decode else lines // group)
        splits = self._num_splits(blocks.shape[0])
        out = self._output(query, value_dim)
        partials, sums = out, out
        if splits > 1:
            partials = torch.empty((splits, *out.shape), dtype=torch.float32, device=out.device)
            sums = torch.empty((splits, num_rows, num_heads, 2), dtype=torch.float32, device=out.device)
        block_d, block_v = (max(16, power_of_two(size)) for size in (head_dim, value_dim))
        queries = (query, query.stride(0), query.stride(1), angles.cos, angles.sin, angles.cos.stride(0))
        pages = (pool, shape.num_elements, layer, query if call.sinks is None else call.sinks)
        numbers = (call.scaling, call.window or 0, call.softcap or 1.0, num_rows)
        sizes = {"HEADS": num_heads, "SPLITS": splits}
        triton_attention.attend[(blocks.shape[0], shape.num_kv_heads, splits)](
            *(*queries, *pages, blocks, self.tables, self.tables.stride(0), partials, sums, *numbers),
            **sizes,
            GROUP=group,
            DIM=head_dim,
            VALUE_DIM=value_dim,
            ROTARY=angles.rotary_dim,
            HAS_WINDOW=call.window is not None,
            HAS_SOFTCAP=call.softcap is not None,
            HAS_SINKS=call.sinks is not None,
            BLOCK_SIZE=shape.block_size,
            BLOCK_M=lines,
            BLOCK_N=max(16, (16384 if self.is_decode else 8192) // (block_d * query.dtype.itemsize)),
            BLOCK_D=block_d,
            BLOCK_V=block_v,
            num_warps=8 if lines >= 128 or lines * block_v >= 16384 else 4,  # fewer spill registers
            num_stages=2,
        )
        if splits > 1:
            triton_attention.combine[(blocks.shape[0], num_heads)](
                partials, sums, blocks, out, num_rows, **sizes, DIM=value_dim, BLOCK_D=block_v
            )
        return out

    def _output(self, query: torch.Tensor, value_dim: int) -> torch.Tensor:
        num_heads, num_rows, _ = query.shape
        if self.outputs is None:
            return query.new_empty((num_rows, num_heads, value_dim))
        key = (num_heads, value_dim)
        if key not in self.outputs:
            self.outputs[key] = query.new_zeros((self.most_rows, num_heads, value_dim))
        return self.outputs[key][:num_rows]

    def _store(self, call: AttentionCall, angles: Rotation, layer: int) -> None:
        from manylora.execution.kernels.triton import attention as triton_attention

        key, value = (x if x.stride(2) == 1 else x.contiguous() for x in (call.key, call.value))
        num_heads, num_rows, head_dim = key.shape
        triton_attention.store[(num_rows,)](
            *(key, value, angles.cos, angles.sin, angles.cos.stride(0), self.slots, self.kv.pages.flat),
            *(*key.stride()[:2], *value.stride()[:2], self.kv.pages.shape.num_elements, layer),
            HEADS=num_heads,
            DIM=head_dim,
            VALUE_DIM=value.shape[2],
            ROTARY=angles.rotary_dim,
            BLOCK_SIZE=self.kv.block_size,
            BLOCK_H=power_of_two(num_heads),
            BLOCK_D=power_of_two(head_dim),
            BLOCK_V=power_of_two(value.shape[2]),
        )

    def _num_splits(self, num_blocks: int) -> int:
        if not self.is_decode:
            return 1
        if self.splits is not None:
            return self.splits
        wanted = num_programs(self.kv.device) // max(1, num_blocks * self.kv.pages.shape.num_kv_heads)
        return min(MAX_SPLITS, power_of_two(max(1, wanted)))


def attend_step(
    ops: DeviceOps,
    kv: KvPages,
    tables: PageTables,
    sequences: Sequence[PlannedSequence],
    splits: int | None = None,
) -> TritonAttention:
    """Return the attention of a step; its rows are the tokens of ``sequences``, in their order."""
    spans: list[tuple[int, int, int, int]] = []
    row = 0
    for sequence, line in zip(sequences, tables.place(sequences), strict=True):
        spans.append((row, sequence.num_tokens, sequence.start, line))
        row += sequence.num_tokens

    @cache
    def blocks(num_tokens: int) -> torch.Tensor:
        cut = [
            (row + done, min(num_tokens, count - done), start + done, line)
            for row, count, start, line in spans
            for done in range(0, count, num_tokens)
        ]
        cut.sort(key=lambda block: -block[2])  # long contexts first: the programs that start last should be short
        return ops.upload(np.asarray(cut, dtype=np.int64))

    positions, slots = kv.places(sequences)
    return TritonAttention(
        kv=kv,
        positions=ops.upload(positions),
        slots=ops.upload(slots),
        tables=tables.table,
        blocks=blocks,
        is_decode=all(sequence.num_tokens == 1 for sequence in sequences),
        splits=splits,
    )


def _angles(call: AttentionCall) -> Rotation:
    """Return the rotation that q and k still need, or empty angles."""
    if call.rotation is not None:
        return call.rotation
    nothing = call.query[0, :, :0]
    return Rotation(nothing, nothing)
