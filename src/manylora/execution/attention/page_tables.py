"""Block tables on the device: a line per sequence, rewritten only where it changed.

A sequence keeps its line while it runs, wherever it is in the batch, and gains a page every ``block_size`` tokens. So a
step of many sequences with long contexts uploads a few numbers instead of all tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from manylora.core.plan import PlannedSequence
from manylora.execution.device import DeviceOps

__all__ = ["PageTables"]


@dataclass(slots=True)
class _Line:
    index: int
    pages: tuple[int, ...]


class PageTables:
    """The tables of sequences that ran lately: ``num_lines``, at least the most in one step, of ``width`` pages."""

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
            pages = tuple(sequence.pages)
            line = self._lines.get(sequence.seq_id)
            if line is None:
                line = self._lines[sequence.seq_id] = _Line(self._free.pop(), ())
            if line.pages != pages:
                self._write(line, pages)
            lines.append(line.index)
        return lines

    def release(self, seq_ids: Sequence[int]) -> None:
        """Free the lines of sequences that have left the engine."""
        for seq_id in seq_ids:
            if (line := self._lines.pop(seq_id, None)) is not None:
                self._free.append(line.index)

    def _write(self, line: _Line, pages: tuple[int, ...]) -> None:
        old = line.pages
        first = len(old) if pages[: len(old)] == old else 0
        self._rows[line.index, first : len(pages)] = np.asarray(pages[first:], dtype=np.int32)
        line.pages = pages
        target = self.table[line.index, first : len(pages)]
        target.copy_(self._host[line.index, first : len(pages)], non_blocking=True)
