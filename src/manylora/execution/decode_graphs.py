"""Decode steps as captured graphs: one launch in place of hundreds, for any mix of adapters.

A step in which every sequence decodes makes the same launches every time. Only numbers differ, and those are in buffers
at fixed addresses:

::

    inputs    token | position | slot | query block of 4        one line per row, one copy per step
    tables    page of every position, a line per sequence       rewritten where they changed (``page_tables``)
    adapters  row blocks and adapters' addresses                one line per adapter, when the batch changes
    logits    [rows, vocab]                                     the result of a replay

Batches are padded to a *bucket*. A row of padding has no slot and an empty query block: nothing is written or read for
it, and its attention is zeros, or the output of an earlier step.

The start captures two graphs of each bucket: the base's, and one with adapters that launches for every group and so
serves any of them. An empty launch takes two microseconds in each of, say, 32 layers. So a bucket that is in use gets a
narrower graph, only of the groups that any adapter has changed so far, once it was replayed ``NARROW_AFTER`` times: a
capture takes as long as some steps. Graphs with and without an epilogue are different graphs for the same reason. When
adapters change a group that none has changed before, the graphs of fewer groups go.

On the CPU ``capture`` returns the work itself, so the tests run this file without a GPU.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from manylora.core.plan import PlannedSequence
from manylora.execution.attention.call import attending
from manylora.execution.attention.triton import TritonAttention, TritonAttentionKernel
from manylora.execution.device import DeviceOps
from manylora.execution.kernels.triton.support import BLOCK_FIELDS
from manylora.execution.lora.batch import LoraSegment, StepContext
from manylora.execution.lora.parts import GroupParts
from manylora.execution.lora.tables import LoraSpace, StepTables, TableRows, TableSizes, measure

__all__ = ["DecodeGraphs", "batch_buckets"]

logger = logging.getLogger(__name__)

ROOM_RANK, ROOM_TILES = 384, 24
"""Initial room: three modules of rank 128. A larger adapter makes more room, and graphs are captured again."""


NARROW_AFTER = 256
"""Replays of the graph of all groups that pay for the capture of a narrower one."""


def batch_buckets(largest: int) -> tuple[int, ...]:
    """Return the batch sizes to capture, up to ``largest``; at most a third of a batch is padding."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, largest + 32, 32)]
    return (*(size for size in sizes if size < largest), largest)


class _StaticLora:
    """The adapters of any decode step, as modules see them while a graph is captured.

    ``present`` and ``with_vectors`` tell by group whether any adapter changes it, and whether any has a factor or a
    shift in it.
    """

    def __init__(
        self, tables: StepTables, space: LoraSpace, present: NDArray[np.bool_], with_vectors: NDArray[np.bool_]
    ) -> None:
        self._tables = tables
        self._space = space
        self._present = present
        self._with_vectors = with_vectors

    def parts(self, group: str, *, is_sampled: bool = False) -> GroupParts | None:
        # Every row of a decode step is sampled, so there is one set of rows.
        span = self._space.directory.groups.get(group)
        if span is None or not self._present[span.index]:
            return None
        return GroupParts((), tables=lambda: self._tables, span=span, has_vectors=bool(self._with_vectors[span.index]))


class DecodeGraphs:
    """Runs decode steps by replaying graphs.

    ``model`` has its modules replaced, and ``step`` is the context that those read. If it makes no tables for its
    kernel (``space``), only steps without adapters are run.
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
    ) -> None:
        self._ops = ops
        self._model = model
        self._step = step
        self._kv = attention.kv
        self._page_tables = attention.tables
        self._space = step.space
        self._buckets = batch_buckets(max_num_seqs)
        self._graphs: dict[tuple[int, bytes], Callable[[], None]] = {}
        self._is_broken = False
        self._host = ops.host_buffer((3 + BLOCK_FIELDS, max_num_seqs), torch.int64)
        self._numbers = self._host.numpy()
        self._inputs = torch.zeros_like(self._host, device=ops.device)
        self._blocks = torch.zeros((max_num_seqs, BLOCK_FIELDS), dtype=torch.int64, device=ops.device)
        self._logits = torch.zeros((max_num_seqs, vocab_size), dtype=torch.float32, device=ops.device)
        self._rows = torch.arange(max_num_seqs, device=ops.device)
        self._attended: dict[tuple[int, int], torch.Tensor] = {}
        self._lora_tables: StepTables | None = None
        self._written: list[TableRows] | None = None
        groups = len(step.space.directory.groups) if step.space is not None else 0
        self._present = np.zeros(groups, dtype=np.bool_)  # whether any adapter so far has changed the group
        self._vectors_seen = np.zeros(groups, dtype=np.bool_)  # whether any so far has a factor or a shift in it
        self._has_vectors = False  # whether this step has any
        self._adapted = b""  # the groups of this step's graph, and those with vectors, as part of its key
        self._every = np.repeat(np.array([True, False]), groups).tobytes()  # that of the graph of all groups
        self._num_wide: Counter[int] = Counter()  # replays of the graph of all groups, by bucket
        self.narrow_after = NARROW_AFTER

    def run(self, sequences: Sequence[PlannedSequence], segments: Sequence[LoraSegment]) -> torch.Tensor | None:
        """Run a step; return logits ``[n, vocab]``, valid until the next step, or ``None`` if no graph can run it."""
        num_rows = len(sequences)
        if self._is_broken or num_rows > self._buckets[-1]:
            return None
        if not all(sequence.num_tokens == 1 and sequence.is_sampled for sequence in sequences):
            return None
        rows = self._table_rows(segments)
        if rows is None:
            return None
        bucket = next(size for size in self._buckets if size >= num_rows)
        if rows:
            self._write_adapters(rows)
        self._write_inputs(sequences, bucket)
        self._run(bucket, has_adapters=bool(rows))
        return self._logits[:num_rows]

    def _run(self, bucket: int, *, has_adapters: bool) -> None:
        """Replay the narrowest graph there is, or capture it."""
        key = (bucket, self._adapted if has_adapters else b"")
        wide = self._graphs.get((bucket, self._every)) if has_adapters and not self._has_vectors else None
        if key not in self._graphs and wide is not None and self._num_wide[bucket] < self.narrow_after:
            self._num_wide[bucket] += 1
            wide()
        elif key in self._graphs:
            self._graphs[key]()
        else:
            self._record(key)

    @torch.inference_mode()
    def warm(self) -> None:
        """Capture every bucket's graph of the base and that of all groups, so that no request waits for them later."""
        if self._space is not None and self._lora_tables is None:
            self._make_room([])
        for bucket in reversed(self._buckets):  # the largest first: smaller ones fit in the memory it leaves
            self._write_inputs((), bucket)
            self._record((bucket, b""))
            if self._space is not None and not self._is_broken:
                self._record((bucket, self._every))
        self._ops.wait()

    def _table_rows(self, segments: Sequence[LoraSegment]) -> list[TableRows] | None:
        """Return the rows of each adapter, ``None`` if an adapter changes modules that tables do not cover."""
        rows: list[TableRows] = []
        for segment in segments:
            table = segment.adapter.table
            if self._space is None or table is None or not table.template.is_complete:
                return None
            rows.append((segment.start, segment.stop, table))
        return rows

    def _write_adapters(self, rows: list[TableRows]) -> None:
        """Bring the adapters' tables up to date."""
        if rows == self._written:
            return
        if self._lora_tables is None or not self._lora_tables.write(rows):
            self._make_room(rows)
        self._written = rows
        templates = [table.template for _, _, table in rows]
        present = np.logical_or.reduce([self._present, *(template.present for template in templates)])
        vectors = np.logical_or.reduce([self._vectors_seen, *(template.has_vectors for template in templates)])
        plain, shifted = (present.tobytes() + each.tobytes() for each in (np.zeros_like(vectors), vectors))
        self._has_vectors = any(template.has_vectors.any() for template in templates)
        self._adapted = shifted if self._has_vectors else plain
        if (present != self._present).any() or (vectors != self._vectors_seen).any():
            kept = (b"", self._every, plain, shifted)
            self._graphs = {key: graph for key, graph in self._graphs.items() if key[1] in kept}
            self._num_wide.clear()
            self._present, self._vectors_seen = present, vectors

    def _make_room(self, rows: list[TableRows]) -> None:
        assert self._space is not None
        most = self._buckets[-1]
        tiles = max([ROOM_TILES, *(table.template.max_tiles for _, _, table in rows)])
        room = TableSizes(num_blocks=most, num_items=most * tiles, num_rows=most, max_rank=ROOM_RANK, max_planes=1)
        if rows:
            room = room.union(measure(rows, self._space.blocks.decode))
        if self._lora_tables is not None:
            room = room.union(self._lora_tables.room)
            logger.info("graphs_dropped reason=larger_adapter max_rank=%d", room.max_rank)
        self._graphs = {key: graph for key, graph in self._graphs.items() if not key[1]}
        self._lora_tables = StepTables(self._space, room, self._space.blocks.decode)
        is_written = not rows or self._lora_tables.write(rows)
        assert is_written, "the room was made for these rows"

    def _write_inputs(self, sequences: Sequence[PlannedSequence], bucket: int) -> None:
        block_size = self._kv.block_size
        numbers = self._numbers
        numbers[:, :bucket] = 0
        numbers[2, :bucket] = -1
        lines = self._page_tables.place(sequences)
        for row, (sequence, line) in enumerate(zip(sequences, lines, strict=True)):
            position = sequence.start
            slot = self._kv.slot(sequence.pages[position // block_size], position)
            numbers[:, row] = sequence.tokens[position], position, slot, row, 1, position, line
        self._inputs.copy_(self._host, non_blocking=True)

    def _record(self, key: tuple[int, bytes]) -> None:
        """Run the step eagerly, then capture it."""
        bucket, adapted = key
        lora = None
        if adapted:
            assert self._lora_tables is not None and self._space is not None
            present, with_vectors = np.frombuffer(adapted, dtype=np.bool_).reshape(2, -1)
            lora = _StaticLora(self._lora_tables, self._space, present, with_vectors)
        tokens, positions, slots = (self._inputs[i, :bucket] for i in range(3))
        blocks = self._blocks[:bucket]
        attention = TritonAttention(
            kv=self._kv,
            positions=positions,
            slots=slots,
            tables=self._page_tables.table,
            blocks=lambda _: blocks,
            is_decode=True,
            outputs=self._attended,
            most_rows=self._buckets[-1],
        )
        arguments: dict[str, Any] = {
            "input_ids": tokens[None],
            "position_ids": positions[None],
            "use_cache": False,
            "logits_to_keep": self._rows[:bucket],
        }

        def work() -> None:
            blocks.copy_(self._inputs[3:, :bucket].t())
            if lora is not None:
                assert self._lora_tables is not None
                self._lora_tables.plan()
            self._step.lora, self._step.token_ids = lora, tokens
            try:
                with attending(attention):
                    self._logits[:bucket].copy_(self._model(**arguments).logits[0])
            finally:
                self._step.lora = self._step.token_ids = None

        work()
        try:
            self._graphs[key] = self._ops.capture(work)
        except RuntimeError as error:
            # A model that chooses its launches on the host (which experts have tokens) cannot be captured.
            self._is_broken = True
            logger.warning("graphs_off reason=%s", str(error).splitlines()[0])
        else:
            logger.info("graph_captured rows=%d adapters=%s", bucket, lora is not None)
