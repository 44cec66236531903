"""A step's attention on the Triton kernels; the counterpart of ``PagedBatch``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from manylora.core.plan import PlannedSequence
from manylora.execution.attention.page_tables import PageTables
from manylora.execution.attention.paged import AttentionCall
from manylora.execution.attention.rotary import Rotation
from manylora.execution.device import DeviceOps
from manylora.execution.kernels.triton.support import num_programs, power_of_two
from manylora.execution.storage.page_tensor import PageTensor

__all__ = ["TritonAttention", "TritonBatch", "first_slot"]

MIN_LINES = 16
"""Rows of a matrix instruction; query blocks are padded to it."""

PROMPT_LINES = 64
MAX_SPLITS = 16


def first_slot(pages: PageTensor, page: int, position: int) -> int:
    """Return the row of ``pages.rows`` for the K of ``position`` in layer 0; ``page`` holds that position."""
    block_size = pages.shape.block_size
    return page * pages.shape.num_layers * 2 * block_size + position % block_size


@dataclass(frozen=True, slots=True)
class TritonAttention:
    """The launches of one step, for any layer.

    Args:
        slots: Row of each token's K in layer 0 ``[rows]``, int64; below 0 for none.
        tables: Pages of each sequence ``[lines, width]``, int32.
        blocks: Returns query blocks (``BLOCK_FIELDS``), given the most tokens of a block.
        is_decode: Whether every block is one token.
        splits: Pieces of a context, for decoding; by default as many as fill the device.
        outputs: Results of a batch with rows of padding, which no program writes: zeros ``[most_rows, heads,
            head_dim]`` by heads, made on first use. Stale memory would pass through the model as numbers that overflow.
    """

    pages: PageTensor
    slots: torch.Tensor
    tables: torch.Tensor
    blocks: Callable[[int], torch.Tensor]
    is_decode: bool
    splits: int | None = None
    outputs: dict[tuple[int, int], torch.Tensor] | None = None
    most_rows: int = 0

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Store the layer's K and V, then attend every row to its own sequence; ``[rows, heads, head_dim]``.

        The same launches rotate queries and keys that are not rotated yet.
        """
        from manylora.execution.kernels.triton import attention as triton_attention

        shape = self.pages.shape
        query = call.query if call.query.stride(2) == 1 else call.query.contiguous()
        num_heads, num_rows, head_dim = query.shape
        group = num_heads // shape.num_kv_heads
        first = int(call.module.layer_idx) * 2 * shape.block_size  # type: ignore[arg-type]
        angles = _angles(call)
        self._store(call, angles, first)

        lines = max(MIN_LINES if self.is_decode else PROMPT_LINES, power_of_two(group))
        blocks = self.blocks(1 if self.is_decode else lines // group)
        splits = self._num_splits(blocks.shape[0])
        out = self._output(query)
        partials, sums = out, out
        if splits > 1:
            partials = torch.empty((splits, *out.shape), dtype=torch.float32, device=out.device)
            sums = torch.empty((splits, num_rows, num_heads, 2), dtype=torch.float32, device=out.device)
        block_d = max(16, power_of_two(head_dim))
        queries = (query, query.stride(0), query.stride(1), angles.cos, angles.sin, angles.cos.stride(0))
        pages = (self.pages.rows, shape.num_elements, self.pages.rows.stride(0), first)
        numbers = (call.scaling, call.window or 0, call.softcap or 1.0, num_rows)
        sizes = {"HEADS": num_heads, "DIM": head_dim, "SPLITS": splits, "BLOCK_D": block_d}
        triton_attention.attend[(blocks.shape[0], shape.num_kv_heads, splits)](
            *(*queries, *pages, blocks, self.tables, self.tables.stride(0), partials, sums, *numbers),
            **sizes,
            GROUP=group,
            ROTARY=angles.rotary_dim,
            HAS_WINDOW=call.window is not None,
            HAS_SOFTCAP=call.softcap is not None,
            BLOCK_SIZE=shape.block_size,
            BLOCK_M=lines,
            BLOCK_N=max(16, (16384 if self.is_decode else 8192) // (block_d * query.dtype.itemsize)),
            num_warps=4,
            num_stages=2,
        )
        if splits > 1:
            triton_attention.combine[(blocks.shape[0], num_heads)](partials, sums, blocks, out, num_rows, **sizes)
        return out

    def _output(self, query: torch.Tensor) -> torch.Tensor:
        num_heads, num_rows, head_dim = query.shape
        if self.outputs is None:
            return query.new_empty((num_rows, num_heads, head_dim))
        key = (num_heads, head_dim)
        if key not in self.outputs:
            self.outputs[key] = query.new_zeros((self.most_rows, num_heads, head_dim))
        return self.outputs[key][:num_rows]

    def _store(self, call: AttentionCall, angles: Rotation, first: int) -> None:
        from manylora.execution.kernels.triton import attention as triton_attention

        key, value = (x if x.stride(2) == 1 else x.contiguous() for x in (call.key, call.value))
        num_heads, num_rows, head_dim = key.shape
        triton_attention.store[(num_rows,)](
            *(key, value, angles.cos, angles.sin, angles.cos.stride(0), self.slots, self.pages.rows),
            *(*key.stride()[:2], *value.stride()[:2], self.pages.rows.stride(0), first),
            HEADS=num_heads,
            DIM=head_dim,
            ROTARY=angles.rotary_dim,
            BLOCK_SIZE=self.pages.shape.block_size,
            BLOCK_H=power_of_two(num_heads),
            BLOCK_D=power_of_two(head_dim),
        )

    def _num_splits(self, num_blocks: int) -> int:
        if not self.is_decode:
            return 1
        if self.splits is not None:
            return self.splits
        wanted = num_programs(self.pages.flat.device) // max(1, num_blocks * self.pages.shape.num_kv_heads)
        return min(MAX_SPLITS, power_of_two(max(1, wanted)))


class TritonBatch:
    """One step's attention: the slots of K and V, and the positions that each row attends to.

    Args:
        sequences: In the order of their rows.
        splits: See ``TritonAttention``.
    """

    def __init__(
        self,
        ops: DeviceOps,
        pages: PageTensor,
        tables: PageTables,
        sequences: Sequence[PlannedSequence],
        splits: int | None = None,
    ) -> None:
        self._ops = ops
        lines = tables.place(sequences)
        block_size = pages.shape.block_size
        page_rows = pages.shape.num_layers * 2 * block_size
        positions: list[np.ndarray] = []
        slots: list[np.ndarray] = []
        self._spans: list[tuple[int, int, int, int]] = []
        row = 0
        for sequence, line in zip(sequences, lines, strict=True):
            start, stop = sequence.start, sequence.start + sequence.num_tokens
            position = np.arange(start, stop)
            first_block = start // block_size
            table = np.asarray(sequence.pages[first_block : (stop - 1) // block_size + 1], dtype=np.int64)
            positions.append(position)
            slots.append(table[position // block_size - first_block] * page_rows + position % block_size)
            self._spans.append((row, sequence.num_tokens, start, line))
            row += sequence.num_tokens
        self.num_rows = row
        self.positions = ops.upload(np.concatenate(positions))
        self._blocks: dict[int, torch.Tensor] = {}
        self._attention = TritonAttention(
            pages=pages,
            slots=ops.upload(np.concatenate(slots)),
            tables=tables.table,
            blocks=self._make_blocks,
            is_decode=all(sequence.num_tokens == 1 for sequence in sequences),
            splits=splits,
        )

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Store the layer's K and V, then attend every row to its own sequence; ``[T, heads, head_dim]``."""
        return self._attention.attend(call)

    def _make_blocks(self, num_tokens: int) -> torch.Tensor:
        if num_tokens not in self._blocks:
            blocks = [
                (row + done, min(num_tokens, count - done), start + done, line)
                for row, count, start, line in self._spans
                for done in range(0, count, num_tokens)
            ]
            # Long contexts first: the programs that start last should be short.
            blocks.sort(key=lambda block: -block[2])
            self._blocks[num_tokens] = self._ops.upload(np.asarray(blocks, dtype=np.int64))
        return self._blocks[num_tokens]


def _angles(call: AttentionCall) -> Rotation:
    """Return the rotation that q and k still need, or empty angles."""
    if call.rotation is not None:
        return call.rotation
    nothing = call.query[0, :, :0]
    return Rotation(nothing, nothing)
