"""Attention of a step on the Triton kernels, with block tables that stay on the device.

A sequence keeps its line of the table while it runs, wherever it is in the batch, and gains a page every ``block_size``
tokens. So a step of many sequences with long contexts uploads a few numbers instead of all tables.

Rows of one token and longer chunks have a launch each, of shapes of their own, in any mix of them. Contexts of the
former are cut by their lengths, so that one long context among short ones does not keep the device waiting::

    lengths   500 | 480 | 30,000           parts   500 | 480 | 1,000 | 1,000 | ...
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from manylora.core.plan import PlannedSequence
from manylora.execution.attention.call import AttentionCall, Rotation
from manylora.execution.attention.kv import KvPages
from manylora.execution.device import DeviceOps
from manylora.execution.kernels.triton.support import BLOCK_FIELDS, num_programs, power_of_two
from manylora.execution.storage.page_tensor import PageTensor

__all__ = ["CutContexts", "PageTables", "StepBlocks", "StepOutline", "TritonAttention", "TritonAttentionKernel"]

MIN_LINES = 16  # rows of a matrix instruction; query blocks are padded to it

PROMPT_LINES = 64  # of large heads; twice as many of usual ones
USUAL_DIM = 128

TILE_BYTES = 8192
"""Keys of a tile. With stages enough to load pages' numbers and the pages ahead, registers and shared memory let two
blocks or more run on each processor, without spills on any of the GPUs of ``bench/kernels_offline.py``."""

WIDE_TILE, WIDE_SHARED_BYTES = 64, 200 * 1024
"""Keys of a tile of prompts, of usual heads in 16 bits, where a block can have so much shared memory. The matrix
instructions of such GPUs (wgmma) read keys from there. On an H200, tiles of 128 take 1.1 times as long."""

LEAST_PART = 512  # tokens of a part of a context: fewer do not pay for the sum over parts
MOST_PARTS = 64  # of one context
LEAST_FILL = 16

MOST_WRITTEN = 8192
"""Pages that a step writes to the tables by one copy. Lines beyond, of long prompts, have a copy each."""

Numbers = NDArray[np.int64]


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
        self.fill = max(LEAST_FILL, num_programs(ops.device) // pages.shape.num_kv_heads)
        """Parts of contexts that fill the device, and most parts beyond one for each row."""

    def outline(self, sequences: Sequence[PlannedSequence]) -> StepOutline:
        """Return the outline of a step; its rows are the tokens of ``sequences``, in their order. Any thread may."""
        return StepOutline.of_sequences(sequences, self.fill)

    def blocks(self, outline: StepOutline, sequences: Sequence[PlannedSequence]) -> StepBlocks:
        """Return the blocks of a step of that outline."""
        return StepBlocks.of(outline, self.kv, self.tables, sequences)

    def prepare(self, sequences: Sequence[PlannedSequence]) -> TritonAttention:
        """Return the step's attention."""
        blocks, upload = self.blocks(self.outline(sequences), sequences), self._ops.upload

        @cache
        def prompts(num_tokens: int) -> torch.Tensor:
            return upload(blocks.prompts(num_tokens))

        return TritonAttention(
            kv=self.kv,
            positions=upload(blocks.positions),
            slots=upload(blocks.slots),
            tables=self.tables.table,
            decode=CutContexts(upload(blocks.parts), upload(blocks.merges)) if len(blocks.parts) else None,
            prompts=prompts if blocks.spans else None,
        )

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
        # New pages of a step: their places in the table, counted through its lines, and the pages.
        self._new = ops.host_buffer((MOST_WRITTEN, 2), torch.int64)
        self._new_on_device = torch.zeros_like(self._new, device=ops.device)
        self._lines: dict[int, _Line] = {}
        self._free = list(range(num_lines))[::-1]

    def place(self, sequences: Sequence[PlannedSequence]) -> list[int]:
        """Return the line of each sequence, written up to its last page in the order of the current stream.

        The host's numbers may be rewritten only after the step that read them, that is, once its tokens are there.
        """
        lines, known, fresh = [], self._lines, list[_Line]()
        for sequence in sequences:
            line, pages = known.get(sequence.seq_id), sequence.pages
            if line is None:
                if not self._free:  # sequences that were pre-empted come back with other pages
                    needed = {one.seq_id for one in sequences}
                    self.release([seq_id for seq_id in known if seq_id not in needed])
                line = known[sequence.seq_id] = _Line(self._free.pop())
            # A step looks at no page that is written already: its cost does not grow with the context.
            if line.pages is not pages:
                line.pages, line.num_written = pages, 0
            if line.num_written < len(pages):
                fresh.append(line)
            lines.append(line.index)
        if fresh:
            self._write(fresh)
        return lines

    def pages(self, lines: Numbers, places: Numbers) -> Numbers:
        """Return the page at each place of a line, both ``[n]``."""
        pages: Numbers = self._rows[lines, places].astype(np.int64)
        return pages

    def release(self, seq_ids: Sequence[int]) -> None:
        """Free the lines of sequences that have left the engine."""
        for seq_id in seq_ids:
            if (line := self._lines.pop(seq_id, None)) is not None:
                self._free.append(line.index)

    def _write(self, lines: Sequence[_Line]) -> None:
        """Write the new pages of lines, most often one each; by one copy, since each takes the host some 20 us."""
        numbers, num_written, width = self._new.numpy(), 0, self._rows.shape[1]
        for line in lines:
            first, stop = line.num_written, len(line.pages)
            own = self._rows[line.index, first:stop]
            own[:] = line.pages[first:stop]
            line.num_written = stop
            if num_written + len(own) > MOST_WRITTEN:
                self.table[line.index, first:stop].copy_(self._host[line.index, first:stop], non_blocking=True)
                continue
            part = numbers[num_written : num_written + len(own)]
            part[:, 0], part[:, 1] = np.arange(first, stop) + line.index * width, own
            num_written += len(own)
        if num_written:
            written = self._new_on_device[:num_written]
            written.copy_(self._new[:num_written], non_blocking=True)
            self.table.view(-1).index_put_((written[:, 0],), written[:, 1].to(torch.int32))


@dataclass(frozen=True, slots=True)
class StepOutline:
    """The rows of a step, as far as neither its tokens nor its pages are needed; on the host.

    So it can be made while the step before is running.
    """

    of: Numbers  # number of each row's sequence ``[rows]``
    positions: Numbers  # position of each row in its sequence ``[rows]``
    sampled: Numbers  # last row of each sequence that is sampled
    parts: Numbers  # as of ``StepBlocks``, without lines
    of_parts: Numbers  # number of each part's sequence
    merges: Numbers  # as of ``StepBlocks``
    chunks: Sequence[tuple[int, int, int, int]]  # longer chunks: first row, tokens, start, number of the sequence

    @classmethod
    def of_sequences(cls, sequences: Sequence[PlannedSequence], fill: int) -> StepOutline:
        """Return the outline of a step, contexts cut into about ``fill`` parts where they are long."""
        numbers = np.arange(len(sequences))
        table = np.array([(one.start, one.num_tokens, one.is_sampled) for one in sequences], np.int64)
        starts, counts, is_sampled = table.reshape(-1, 3).T
        ends = counts.cumsum()
        firsts, of = ends - counts, np.repeat(numbers, counts)
        is_single = counts == 1
        cut = _cut(firsts[is_single], starts[is_single], numbers[is_single], fill)
        chunks = np.stack((firsts, counts, starts, numbers), axis=1)[~is_single].tolist()
        positions = np.arange(len(of)) + (starts - firsts)[of]
        return cls(of, positions, ends[is_sampled > 0] - 1, *cut, chunks)

    @property
    def num_rows(self) -> int:
        """The tokens of the step."""
        return len(self.of)

    @property
    def is_mixed(self) -> bool:
        """Whether the rows are more than one token of each of as many sequences, all sampled."""
        return bool(self.chunks) or self.num_rows != len(self.sampled)


@dataclass(frozen=True, slots=True)
class StepBlocks:
    """The rows of a step, and the query blocks that attend for them (``BLOCK_FIELDS``); on the host."""

    positions: Numbers  # position of each row in its sequence ``[rows]``
    slots: Numbers  # place of each token ``[rows]`` (its slot: ``kv``)
    parts: Numbers  # blocks of chunks of one token, long contexts in several ``[n, BLOCK_FIELDS]``
    merges: Numbers  # of rows with several parts: the row, its first part, their number ``[m, 3]``
    spans: Sequence[tuple[int, int, int, int]]  # longer chunks: first row, tokens, start, line of the page table
    sampled: Numbers  # last row of each sequence that is sampled

    @classmethod
    def of(
        cls, outline: StepOutline, kv: KvPages, tables: PageTables, sequences: Sequence[PlannedSequence]
    ) -> StepBlocks:
        """Return the blocks of a step, whose pages are written to ``tables``."""
        lines = np.array(tables.place(sequences), np.int64)
        places, offsets = np.divmod(outline.positions, kv.block_size)
        slots = tables.pages(lines[outline.of], places) * kv.block_size + offsets
        parts = outline.parts.copy()
        parts[:, 3] = lines[outline.of_parts]
        spans = [(row, count, start, int(lines[number])) for row, count, start, number in outline.chunks]
        return cls(outline.positions, slots, parts, outline.merges, spans, outline.sampled)

    def prompts(self, num_tokens: int) -> Numbers:
        """Return the blocks of the longer chunks, of at most ``num_tokens`` each ``[n, BLOCK_FIELDS]``."""
        blocks = [
            (row + done, min(num_tokens, count - done), start + done, line, 0, start + min(done + num_tokens, count))
            for row, count, start, line in self.spans
            for done in range(0, count, num_tokens)
        ]
        blocks.sort(key=lambda block: -block[2])  # long contexts first: the programs that start last should be short
        return np.asarray(blocks, dtype=np.int64).reshape(-1, BLOCK_FIELDS)


def _cut(rows: Numbers, positions: Numbers, numbers: Numbers, fill: int) -> tuple[Numbers, Numbers, Numbers]:
    """Return the parts of rows of one token, the sequence of each, and the merges.

    There are at most ``fill`` parts more than rows, and ``fill`` merges. Lines of the page table are left out.
    """
    if not len(rows):
        return np.empty((0, BLOCK_FIELDS), np.int64), np.empty(0, np.int64), np.empty((0, 3), np.int64)
    order = np.argsort(-positions, kind="stable")  # long contexts first
    rows, positions, numbers = rows[order], positions[order], numbers[order]
    lengths = positions + 1
    longest = max(LEAST_PART, -(-int(lengths.sum()) // fill), -(-int(lengths[0]) // MOST_PARTS))
    counts = -(-lengths // longest)
    shares = -(-lengths // counts)
    firsts = counts.cumsum() - counts
    of = np.repeat(np.arange(len(rows)), counts)
    starts = (np.arange(len(of)) - firsts[of]) * shares[of]
    parts = np.zeros((len(of), BLOCK_FIELDS), np.int64)
    parts[:, 0], parts[:, 1], parts[:, 2] = rows[of], 1, positions[of]
    parts[:, 4], parts[:, 5] = starts, np.minimum(starts + shares[of], lengths[of])
    is_cut = counts > 1
    return parts, numbers[of], np.stack((rows, firsts, counts), axis=1)[is_cut]


class CutContexts(NamedTuple):
    """The parts and merges of ``StepBlocks`` on the device."""

    parts: torch.Tensor
    merges: torch.Tensor


@dataclass(frozen=True, slots=True)
class TritonAttention:
    """The launches of one step, for any layer."""

    kv: KvPages
    positions: torch.Tensor  # position of each row in its sequence ``[rows]``, int64
    slots: torch.Tensor  # place of each token ``[rows]``, int64 (its slot: ``kv``); below 0 for none
    tables: torch.Tensor  # pages of each sequence ``[lines, width]``, int32
    decode: CutContexts | None  # rows of one token, if there are any
    prompts: Callable[[int], torch.Tensor] | None  # returns the blocks of longer chunks, given the most tokens of one
    # Results of a batch with rows of padding, which no program writes: zeros ``[most_rows, heads, value_dim]`` by
    # heads, made on first use. Stale memory would pass through the model as numbers that overflow.
    outputs: dict[tuple[int, int], torch.Tensor] | None = None
    most_rows: int = 0

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Store the layer's K and V, then attend every row to its own sequence; ``[rows, heads, value_dim]``.

        The same launches rotate queries and keys that are not rotated yet.
        """
        from manylora.execution.kernels.triton import attention as triton_attention

        query = call.query if call.query.stride(2) == 1 else call.query.contiguous()
        num_heads, value_dim = query.shape[0], call.value.shape[2]
        angles, layer = _angles(call), int(call.module.layer_idx)  # type: ignore[arg-type]
        self._store(call, angles, layer)
        out = self._output(query, value_dim)
        if self.decode is not None:
            parts, merges = self.decode
            partials = torch.empty((len(parts), num_heads, value_dim), dtype=torch.float32, device=out.device)
            sums = torch.empty((len(parts), num_heads, 2), dtype=torch.float32, device=out.device)
            self._attend(call, query, angles, layer, parts, (out, partials, sums), is_decode=True)
            if len(merges):
                triton_attention.combine[(len(merges), num_heads)](
                    *(partials, sums, merges, out),
                    HEADS=num_heads,
                    DIM=value_dim,
                    BLOCK_D=max(16, power_of_two(value_dim)),
                )
        if self.prompts is not None:
            lines = self._lines(num_heads, query.shape[2], is_decode=False)
            blocks = self.prompts(lines // (num_heads // self.kv.pages.shape.num_kv_heads))
            self._attend(call, query, angles, layer, blocks, (out, out, out), is_decode=False)
        return out

    def _tile(self, query: torch.Tensor, block_d: int, *, is_decode: bool) -> int:
        """Return the positions of a tile."""
        size = query.dtype.itemsize
        if is_decode or size > 2 or _shared_bytes(query.device) < WIDE_SHARED_BYTES:
            return max(16, TILE_BYTES // (block_d * size))
        return WIDE_TILE * USUAL_DIM // max(USUAL_DIM, block_d)

    def _lines(self, num_heads: int, head_dim: int, *, is_decode: bool) -> int:
        group = num_heads // self.kv.pages.shape.num_kv_heads
        of_prompts = PROMPT_LINES if head_dim > USUAL_DIM else 2 * PROMPT_LINES
        return max(MIN_LINES if is_decode else of_prompts, power_of_two(group))

    def _attend(
        self,
        call: AttentionCall,
        query: torch.Tensor,
        angles: Rotation,
        layer: int,
        blocks: torch.Tensor,
        results: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        *,
        is_decode: bool,
    ) -> None:
        from manylora.execution.kernels.triton import attention as triton_attention

        shape = self.kv.pages.shape
        num_heads, _, head_dim = query.shape
        value_dim = call.value.shape[2]
        lines = self._lines(num_heads, head_dim, is_decode=is_decode)
        block_d, block_v = (max(16, power_of_two(size)) for size in (head_dim, value_dim))
        queries = (query, query.stride(0), query.stride(1), angles.cos, angles.sin, angles.cos.stride(0))
        pages = (self.kv.pages.flat, shape.num_elements, layer, query if call.sinks is None else call.sinks)
        numbers = (call.scaling, call.window or 0, call.softcap or 1.0)
        count, kv_heads = len(blocks), shape.num_kv_heads
        triton_attention.attend[(count, kv_heads) if is_decode else (count * kv_heads,)](
            *(*queries, *pages, blocks, self.tables, self.tables.stride(0), *results, *numbers),
            HEADS=num_heads,
            GROUP=num_heads // kv_heads,
            DIM=head_dim,
            VALUE_DIM=value_dim,
            ROTARY=angles.rotary_dim,
            IS_CUT=is_decode,
            HAS_WINDOW=call.window is not None,
            HAS_SOFTCAP=call.softcap is not None,
            HAS_SINKS=call.sinks is not None,
            BLOCK_SIZE=shape.block_size,
            BLOCK_M=lines,
            BLOCK_N=self._tile(query, block_d, is_decode=is_decode),
            BLOCK_D=block_d,
            BLOCK_V=block_v,
            num_warps=8 if lines >= 128 or lines * block_v >= 16384 else 4,  # fewer spill registers
            num_stages=3 if not is_decode else 5 if block_d <= USUAL_DIM else 4,
        )

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


@cache
def _shared_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    return int(getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 0))


def _angles(call: AttentionCall) -> Rotation:
    """Return the rotation that q and k still need, or empty angles."""
    if call.rotation is not None:
        return call.rotation
    nothing = call.query[0, :, :0]
    return Rotation(nothing, nothing)
