"""Steps as captured graphs: one launch in place of hundreds, for any mix of adapters, of decoding and of short prompts.

A step of some shape makes the same launches every time. Only numbers differ, and they are in buffers at fixed
addresses:

::

    rows      token | position | slot of each row, rows to sample   one copy per step
    blocks    query blocks of rows that decode, of longer chunks    the same copy; those of chunks their own
    tables    page of every position, a line per sequence           rewritten where they changed (``PageTables``)
    adapters  row blocks and adapters' addresses                    a line per adapter, when the batch changes
    logits    [sampled rows, vocab]                                 the result of a replay

Steps are padded to a *shape*: a number of rows, which all decode, or tokens of decoding and of prompts in any mix. A
row of padding has no slot and no query block: nothing is written or read for it, and its attention is zeros, or the
output of an earlier step. A step of more than ``MOST_TOKENS`` tokens computes for longer than its launches take one by
one, and runs eagerly.

The start captures two graphs of each shape: the base's, and one with adapters that launches for every group and so
serves any of them. An empty launch takes two microseconds in each of, say, 32 layers. So a shape that is in use gets a
narrower graph, only of the groups that any adapter has changed so far, once it was replayed ``NARROW_AFTER`` times: a
capture takes as long as some steps. Graphs with and without an epilogue are different graphs for the same reason. When
adapters change a group that none has changed before, the graphs of fewer groups go. So a shape has four at most.

On the CPU ``capture`` returns the work itself, so the tests run this file without a GPU.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from manylora.core.plan import PlannedSequence
from manylora.execution.attention.call import attending
from manylora.execution.attention.triton import (
    CutContexts,
    StepBlocks,
    StepOutline,
    TritonAttention,
    TritonAttentionKernel,
)
from manylora.execution.device import DeviceOps
from manylora.execution.kernels.triton.support import BLOCK_FIELDS
from manylora.execution.lora.batch import LoraSegment, StepContext
from manylora.execution.lora.parts import GroupParts
from manylora.execution.lora.tables import LoraSpace, StepTables, TableRows, TableSizes, measure
from manylora.execution.storage.tile_tables import TileTemplate

__all__ = ["Shape", "StepGraphs", "batch_buckets", "token_buckets"]

logger = logging.getLogger(__name__)

ROOM_RANK, ROOM_TILES, ROOM_EXPERT_RANK = 384, 24, 64
"""Initial room: three modules of rank 128, and experts of rank 64. A larger adapter makes more room, and graphs are
captured again."""

MOST_TOKENS = 1024
"""Tokens of the largest step with prompts that is captured. On an H100 an 8B model takes 18 ms for 512 tokens and
28 for 1,024; their launches one by one take 28 to 47 ms, by the host."""

NARROW_AFTER = 2048
"""Replays of the graph of all groups that pay for the capture of a narrower one several times over: all sequences wait
for a capture."""


def batch_buckets(largest: int) -> tuple[int, ...]:
    """Return the batch sizes to capture, up to ``largest``; at most a third of a batch is padding."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, largest + 32, 32)]
    return (*(size for size in sizes if size < largest), largest)


def token_buckets(largest: int) -> tuple[int, ...]:
    """Return the numbers of tokens to capture of steps with prompts, up to ``largest``.

    Products take longer by jumps, not evenly: on an H100 an 8B model takes 18 ms for 512 tokens but 22 for 448, and as
    long for 896 as for 1,024.
    """
    sizes = (8, 16, 32, 64, 96, 128, 160, 192, 224, 256, 320, 384, 512, 640, 768, 1024)
    return (*(size for size in sizes if size < largest), largest)


class Shape(NamedTuple):
    """The rows of a step, and whether they are more than one token of each of as many sequences, all sampled."""

    num_rows: int
    is_mixed: bool


class _StaticLora:
    """The adapters of any step of a shape, as modules see them while a graph is captured.

    ``present`` and ``with_vectors`` tell by group whether any adapter changes it, and whether any has a factor or a
    shift in it.
    """

    def __init__(
        self,
        tables: Callable[[bool], StepTables],
        space: LoraSpace,
        present: NDArray[np.bool_],
        with_vectors: NDArray[np.bool_],
    ) -> None:
        self._tables = tables
        self._space = space
        self._present = present
        self._with_vectors = with_vectors

    def parts(self, group: str, *, is_sampled: bool = False) -> GroupParts | None:
        span = self._space.directory.groups.get(group)
        if span is None or not self._present[span.index]:
            return None
        tables = self._tables(is_sampled)
        return GroupParts((), tables=lambda: tables, span=span, has_vectors=bool(self._with_vectors[span.index]))


class StepGraphs:
    """Runs steps by replaying graphs.

    ``model`` has its modules replaced, and ``step`` is the context that those read. If it makes no tables for its
    kernel (``space``), only steps without adapters are run. Steps have at most ``max_num_seqs`` sequences.
    """

    def __init__(
        self,
        *,
        ops: DeviceOps,
        model: nn.Module,
        step: StepContext,
        attention: TritonAttentionKernel,
        vocab_size: int,
        max_num_seqs: int,
        max_num_tokens: int,
    ) -> None:
        self._ops = ops
        self._model = model
        self._step = step
        self._attention = attention
        self._space = step.space
        self._sizes = {
            False: batch_buckets(max_num_seqs),
            True: token_buckets(max(max_num_seqs, min(MOST_TOKENS, max_num_tokens))),
        }
        self._most_seqs, self._most_rows = max_num_seqs, self._sizes[True][-1]
        self._graphs: dict[tuple[Shape, bytes], Callable[[], None]] = {}
        self._is_broken = False
        self._inputs = _Inputs(ops, self._most_rows, max_num_seqs, attention.fill)
        self._blocks: StepBlocks | None = None  # of this step; ``None`` while the start captures
        self._prompts: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # host and device, by most tokens of a block
        self._logits = torch.zeros((max_num_seqs, vocab_size), dtype=torch.float32, device=ops.device)
        self._attended: dict[tuple[int, int], torch.Tensor] = {}
        # The tables of low row blocks, of the sampled rows, and those of high ones, of all rows of mixed steps.
        self._lora_tables: dict[bool, StepTables] = {}
        self._written: dict[bool, list[TableRows]] = {}
        self._templates: set[TileTemplate] = set()  # the adapters of the step, whose groups are chosen
        groups = len(step.space.directory.groups) if step.space is not None else 0
        self._present = np.zeros(groups, dtype=np.bool_)  # whether any adapter so far has changed the group
        self._vectors_seen = np.zeros(groups, dtype=np.bool_)  # whether any so far has a factor or a shift in it
        self._has_vectors = False  # whether this step has any
        self._adapted = b""  # the groups of this step's graph, and those with vectors, as part of its key
        self._every = np.repeat(np.array([True, False]), groups).tobytes()  # that of the graph of all groups
        self._num_wide: Counter[Shape] = Counter()  # replays of the graph of all groups
        self.narrow_after = NARROW_AFTER

    def outline(self, sequences: Sequence[PlannedSequence]) -> StepOutline | None:
        """Return the outline of a step, ``None`` if no graph can run it. Any thread may, while another step runs."""
        num_rows = sum([sequence.num_tokens for sequence in sequences])
        if self._is_broken or num_rows > self._most_rows or len(sequences) > self._most_seqs:
            return None
        return self._attention.outline(sequences)

    def run(
        self, sequences: Sequence[PlannedSequence], segments: Sequence[LoraSegment], outline: StepOutline
    ) -> torch.Tensor | None:
        """Run a step; return logits of the sampled rows ``[n, vocab]``, valid until the next step.

        ``None`` if no graph can run it.
        """
        is_mixed = outline.is_mixed
        rows = None if self._is_broken else self._table_rows(segments, is_sampled=False)
        if rows is None:
            return None
        shape = Shape(next(size for size in self._sizes[is_mixed] if size >= outline.num_rows), is_mixed)
        if rows:
            sampled = rows
            if is_mixed:
                self._write_adapters(rows, is_high=True)
                sampled = self._table_rows(segments, is_sampled=True) or []
            self._write_adapters(sampled, is_high=False)
            self._choose_groups(rows)
        self._blocks = self._attention.blocks(outline, sequences)
        self._inputs.write(shape, self._blocks, sequences)
        for most, table in self._prompts.items() if is_mixed else ():
            self._write_prompts(table, self._blocks.prompts(most))
        self._run(shape, has_adapters=bool(rows))
        return self._logits[: len(outline.sampled)]

    def _run(self, shape: Shape, *, has_adapters: bool) -> None:
        """Replay the narrowest graph there is, or capture it."""
        key = (shape, self._adapted if has_adapters else b"")
        wide = self._graphs.get((shape, self._every)) if has_adapters and not self._has_vectors else None
        if key not in self._graphs and wide is not None and self._num_wide[shape] < self.narrow_after:
            self._num_wide[shape] += 1
            wide()
        elif key in self._graphs:
            self._graphs[key]()
        else:
            self._record(key)

    @torch.inference_mode()
    def warm(self) -> None:
        """Capture every shape's graph of the base and that of all groups, so that no request waits for them later."""
        for is_high in (False, True) if self._space is not None else ():
            if is_high not in self._lora_tables:
                self._make_room([], is_high=is_high)
        # The largest first: smaller ones fit in the memory it leaves.
        shapes = [Shape(size, is_mixed) for is_mixed in (True, False) for size in reversed(self._sizes[is_mixed])]
        for shape in shapes:
            self._inputs.write(shape, None, ())
            self._record((shape, b""))
            if self._space is not None and not self._is_broken:
                self._record((shape, self._every))
        self._ops.wait()

    def _table_rows(self, segments: Sequence[LoraSegment], *, is_sampled: bool) -> list[TableRows] | None:
        """Return the rows of each adapter, ``None`` if an adapter changes modules that tables do not cover."""
        rows: list[TableRows] = []
        for segment in segments:
            table = segment.adapter.table
            if self._space is None or table is None or not table.template.is_complete:
                return None
            start, stop = segment.rows(is_sampled)
            if stop > start:
                rows.append((start, stop, table))
        return rows

    def _write_adapters(self, rows: list[TableRows], *, is_high: bool) -> None:
        """Bring one of the adapters' tables up to date."""
        if rows == self._written.get(is_high):
            return
        if is_high not in self._lora_tables or not self._lora_tables[is_high].write(rows):
            self._make_room(rows, is_high=is_high)
        self._written[is_high] = rows

    def _choose_groups(self, rows: Sequence[TableRows]) -> None:
        """Choose the graph's groups, and forget graphs that lack any."""
        templates = {table.template for _, _, table in rows}
        if templates == self._templates:
            return
        fresh, self._templates = templates - self._templates, templates  # the others are counted already
        present = np.logical_or.reduce([self._present, *(template.present for template in fresh)])
        vectors = np.logical_or.reduce([self._vectors_seen, *(template.has_vectors for template in fresh)])
        plain, shifted = (present.tobytes() + each.tobytes() for each in (np.zeros_like(vectors), vectors))
        self._has_vectors = any(template.any_vectors for template in templates)
        self._adapted = shifted if self._has_vectors else plain
        if (present != self._present).any() or (vectors != self._vectors_seen).any():
            kept = (b"", self._every, plain, shifted)
            self._graphs = {key: graph for key, graph in self._graphs.items() if key[1] in kept}
            self._num_wide.clear()
            self._present, self._vectors_seen = present, vectors

    def _make_room(self, rows: list[TableRows], *, is_high: bool) -> None:
        assert self._space is not None
        height = self._space.blocks.prompt if is_high else self._space.blocks.decode
        most_rows = self._most_rows if is_high else self._most_seqs
        most = self._most_seqs + (most_rows // height if is_high else 0)
        tiles = max([ROOM_TILES, *(table.template.max_tiles for _, _, table in rows)])
        room = TableSizes(
            num_blocks=most,
            num_items=most * tiles,
            num_rows=most_rows,
            max_rank=ROOM_RANK,
            max_planes=1,
            expert_rank=ROOM_EXPERT_RANK if self._space.directory.has_experts else 0,
        )
        if rows:
            room = room.union(measure(rows, height))
        if is_high in self._lora_tables:
            room = room.union(self._lora_tables[is_high].room)
            logger.info("graphs_dropped reason=larger_adapter max_rank=%d", room.max_rank)
            self._graphs = {key: graph for key, graph in self._graphs.items() if not key[1]}
        tables = self._lora_tables[is_high] = StepTables(self._space, room, height)
        is_written = not rows or tables.write(rows)
        assert is_written, "the room was made for these rows"

    def _prompt_blocks(self, most: int, shape: Shape) -> torch.Tensor:
        """Return the blocks of longer chunks, of at most ``most`` tokens each, for the graphs of a shape."""

        def room(num_rows: int) -> int:
            return -(-num_rows // most) + min(self._most_seqs, num_rows // 2)

        if most not in self._prompts:
            host = self._ops.host_buffer((room(self._most_rows), BLOCK_FIELDS), torch.int64)
            table = self._prompts[most] = (host, torch.zeros_like(host, device=self._ops.device))
            if self._blocks is not None:
                self._write_prompts(table, self._blocks.prompts(most))
        return self._prompts[most][1][: room(shape.num_rows)]

    def _write_prompts(self, table: tuple[torch.Tensor, torch.Tensor], blocks: NDArray[np.int64]) -> None:
        host, device = table
        numbers = host.numpy()
        numbers[: len(blocks)], numbers[len(blocks) :, 1] = blocks, 0
        device.copy_(host, non_blocking=True)

    def _lora(self, shape: Shape, adapted: bytes) -> tuple[_StaticLora, list[StepTables]]:
        """Return the adapters of a graph, and the tables that it plans."""
        assert self._space is not None
        present, with_vectors = np.frombuffer(adapted, dtype=np.bool_).reshape(2, -1)
        low = self._lora_tables[False]
        high = self._lora_tables[True] if shape.is_mixed else low
        lora = _StaticLora(lambda is_sampled: low if is_sampled else high, self._space, present, with_vectors)
        return lora, [low, high] if shape.is_mixed else [low]

    def _record(self, key: tuple[Shape, bytes]) -> None:
        """Run the step eagerly, then capture it."""
        shape, adapted = key
        lora, planned = self._lora(shape, adapted) if adapted else (None, [])
        inputs = self._inputs
        tokens, positions, slots = (numbers[: shape.num_rows] for numbers in inputs.rows)
        attention = TritonAttention(
            kv=self._attention.kv,
            positions=positions,
            slots=slots,
            tables=self._attention.tables.table,
            decode=inputs.contexts(shape),
            prompts=(lambda most: self._prompt_blocks(most, shape)) if shape.is_mixed else None,
            outputs=self._attended,
            most_rows=self._most_rows,
        )
        num_sampled = min(self._most_seqs, shape.num_rows)
        arguments: dict[str, Any] = {
            "input_ids": tokens[None],
            "position_ids": positions[None],
            "use_cache": False,
            "logits_to_keep": inputs.sampled[:num_sampled],
        }

        def work() -> None:
            for tables in planned:
                tables.plan()
            self._step.lora, self._step.token_ids = lora, tokens
            try:
                with attending(attention):
                    self._logits[:num_sampled].copy_(self._model(**arguments).logits[0])
            finally:
                self._step.lora = self._step.token_ids = None

        work()
        try:
            self._graphs[key] = self._ops.capture(work)
        except RuntimeError as error:
            # A model that chooses its launches on the host (which experts have tokens) cannot be captured.
            self._is_broken = True
            logger.warning("graphs_off reason=%s", str(error).splitlines()[0])


class _Inputs:
    """The numbers of a step at fixed addresses: one page-locked buffer, and one copy of it to the device."""

    def __init__(self, ops: DeviceOps, most_rows: int, most_seqs: int, fill: int) -> None:
        self._most_seqs, self._fill = most_seqs, fill
        sizes = (*(most_rows,) * 3, most_seqs, (most_seqs + fill) * BLOCK_FIELDS, fill * 3)
        self._host = ops.host_buffer((sum(sizes),), torch.int64)
        self._device = torch.zeros_like(self._host, device=ops.device)
        host, device = (list(numbers.split(sizes)) for numbers in (self._host, self._device))
        for parts in (host, device):
            parts[4], parts[5] = parts[4].view(-1, BLOCK_FIELDS), parts[5].view(-1, 3)
        self._numbers = [part.numpy() for part in host]
        self.rows = device[:3]  # tokens, positions and slots
        self.sampled = device[3]  # the rows whose logits are kept
        self._parts, self._merges = device[4:]

    def contexts(self, shape: Shape) -> CutContexts:
        """Return the query blocks of rows that decode, with room for those of any step of a shape."""
        most = min(self._most_seqs, shape.num_rows)
        return CutContexts(self._parts[: most + self._fill], self._merges[: min(most, self._fill)])

    def write(self, shape: Shape, blocks: StepBlocks | None, sequences: Sequence[PlannedSequence]) -> None:
        """Write a step, or nothing but padding; the copy before must have been read."""
        tokens, positions, slots, sampled, parts, merges = self._numbers
        num_rows = 0 if blocks is None else len(blocks.positions)
        for numbers, padding in ((tokens, 0), (positions, 0), (slots, -1)):
            numbers[num_rows : shape.num_rows] = padding
        num_parts = num_merges = 0
        kept = 0
        if blocks is not None:
            num_parts, num_merges = len(blocks.parts), len(blocks.merges)
            positions[:num_rows], slots[:num_rows] = blocks.positions, blocks.slots
            parts[:num_parts], merges[:num_merges] = blocks.parts, blocks.merges
            is_mixed = shape.is_mixed
            ids = [] if is_mixed else [sequence.tokens[sequence.start] for sequence in sequences]
            for sequence in sequences if is_mixed else ():
                start, count = sequence.start, sequence.num_tokens
                if count == 1:
                    ids.append(sequence.tokens[start])
                else:
                    ids.extend(sequence.tokens[start : start + count])
            tokens[:num_rows] = ids
            kept = len(blocks.sampled)
            sampled[:kept] = blocks.sampled
        sampled[kept:] = 0
        parts[num_parts:, 1], merges[num_merges:, 2] = 0, 0
        self._device.copy_(self._host, non_blocking=True)
