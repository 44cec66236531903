"""Attention of a step in torch, with a compiled kernel for decoding on a CPU.

All index tensors are made once per step and used by every layer::

    flat batch   | seq 3: chunk of 5 | seq 7: 1 | seq 1: 1 | ...        T rows
    decode       rows of one token: the compiled kernel, or one padded gather of pages and one masked product
    prompts      longer chunks: one product per sequence, over its own history and itself
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional

from manylora.core.plan import PlannedSequence
from manylora.execution.attention.call import AttentionCall
from manylora.execution.attention.kv import KvPages
from manylora.execution.storage.page_tensor import PageTensor

__all__ = ["PagedBatch", "TorchAttentionKernel"]


class TorchAttentionKernel:
    """Prepares ``PagedBatch``; keeps nothing between steps."""

    def __init__(self, pages: PageTensor, dtype: torch.dtype) -> None:
        self._kv = KvPages(pages, dtype)

    def prepare(self, sequences: Sequence[PlannedSequence]) -> PagedBatch:
        """Return the step's attention."""
        return PagedBatch(self._kv, sequences)

    def release(self, seq_ids: Sequence[int]) -> None:
        """Do nothing."""


@dataclass(frozen=True, slots=True)
class _Prompt:
    """A chunk of more than one token: rows ``[row, row + num_tokens)``, positions from ``start`` on."""

    row: int
    num_tokens: int
    start: int
    pages: torch.Tensor


class PagedBatch:
    """One step's attention: the slots of K and V, and the positions that each row of ``sequences`` attends to."""

    def __init__(self, kv: KvPages, sequences: Sequence[PlannedSequence]) -> None:
        self._kv = kv
        self._prompts: list[_Prompt] = []
        self._decode: list[PlannedSequence] = []
        decode_rows: list[int] = []
        unfilled: list[int] = []
        row = 0
        for sequence in sequences:
            stop = sequence.start + sequence.num_tokens
            last_block = (stop - 1) // kv.block_size
            if sequence.start <= last_block * kv.block_size and stop % kv.block_size:
                unfilled.append(sequence.pages[last_block])
            if sequence.num_tokens == 1:
                decode_rows.append(row)
                self._decode.append(sequence)
            else:
                pages = self._index(np.asarray(sequence.pages[: last_block + 1]))
                self._prompts.append(_Prompt(row, sequence.num_tokens, sequence.start, pages))
            row += sequence.num_tokens
        self.num_rows = row
        positions, slots = kv.places(sequences)
        self.positions = self._index(positions)
        keys, values = kv.rows(slots)
        self._rows = self._index(keys), self._index(values)
        self._decode_rows = self._index(np.asarray(decode_rows, dtype=np.int64))
        self._decode_indices: dict[int | None, tuple[np.ndarray, np.ndarray]] = {}  # by window, as are the next
        self._decode_gathers: dict[int | None, tuple[torch.Tensor, torch.Tensor]] = {}
        self._prompt_masks: dict[tuple[int, int | None], torch.Tensor | None] = {}
        if unfilled and kv.compiled is None:
            kv.clear(unfilled)  # the torch path reads whole pages, and 0 * NaN is NaN

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Store the layer's K and V, then attend every row to its own sequence; ``[T, heads, value_dim]``."""
        assert call.rotation is None, "only the Triton kernels rotate"
        layer = int(call.module.layer_idx)  # type: ignore[arg-type]
        self._kv.store(layer, self._rows, call.key, call.value)
        if not self._prompts:
            return self._attend_decode(layer, call, call.query.transpose(0, 1))
        out = call.query.new_empty(self.num_rows, call.query.shape[0], call.value.shape[2])
        for prompt in self._prompts:
            out[prompt.row : prompt.row + prompt.num_tokens] = self._attend_prompt(layer, call, prompt)
        if self._decode:
            query = call.query.index_select(1, self._decode_rows).transpose(0, 1)
            out.index_copy_(0, self._decode_rows, self._attend_decode(layer, call, query))
        return out

    def _attend_prompt(self, layer: int, call: AttentionCall, prompt: _Prompt) -> torch.Tensor:
        rows = slice(prompt.row, prompt.row + prompt.num_tokens)
        query = call.query[:, rows]
        total = prompt.start + prompt.num_tokens
        if prompt.start == 0:
            key, value = call.key[:, rows], call.value[:, rows]
        else:
            key, value = (x.flatten(0, 1)[:total].transpose(0, 1) for x in self._kv.gather(layer, prompt.pages))
        mask = self._prompt_mask(prompt, call.window)
        return _attend(call, query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0), mask)[0].transpose(0, 1)

    def _prompt_mask(self, prompt: _Prompt, window: int | None) -> torch.Tensor | None:
        """Return a mask of the positions that each row sees ``[num_tokens, total]``; ``None`` for all before it."""
        total = prompt.start + prompt.num_tokens
        if window is not None and window >= total:
            window = None
        if prompt.start == 0 and window is None:
            return None
        if (prompt.row, window) not in self._prompt_masks:
            device = self._kv.device
            query = torch.arange(prompt.start, total, device=device)[:, None]
            key = torch.arange(total, device=device)[None, :]
            mask = key <= query
            if window is not None:
                mask &= key > query - window
            self._prompt_masks[prompt.row, window] = mask
        return self._prompt_masks[prompt.row, window]

    def _attend_decode(self, layer: int, call: AttentionCall, query: torch.Tensor) -> torch.Tensor:
        """Attend rows of one token, ``query`` ``[rows, heads, head_dim]``."""
        if self._kv.compiled is not None:
            tables, bounds = self._decode_index(call.window)
            pool = self._kv.pages
            return self._kv.compiled.attend(
                *(query.contiguous(), pool.flat, pool.shape, layer, tables, bounds),
                scaling=call.scaling,
                softcap=call.softcap,
                sinks=call.sinks,
            )
        pages, mask = self._decode_gather(call.window)
        num_rows = query.shape[0]
        key, value = (x.view(num_rows, -1, *x.shape[2:]).transpose(1, 2) for x in self._kv.gather(layer, pages))
        return _attend(call, query.unsqueeze(2), key, value, mask).squeeze(2)

    def _decode_index(self, window: int | None) -> tuple[np.ndarray, np.ndarray]:
        """Return tables of the decode rows' pages ``[rows, width]``, and bounds of the positions that each row sees.

        Bounds are the first and one past the last position, from the table's start ``[rows, 2]``.
        """
        if window not in self._decode_indices:
            block_size = self._kv.block_size
            bounds, tables = [], []
            for sequence in self._decode:
                length = sequence.start + 1
                first = 0 if window is None else max(0, length - window)
                first_block = first // block_size
                tables.append(sequence.pages[first_block : (length - 1) // block_size + 1])
                bounds.append((first - first_block * block_size, length - first_block * block_size))
            width = max(len(table) for table in tables)
            # Short tables are padded with the sequence's own last page: no sequence reads another's KV.
            padded = np.asarray([[*table, *([table[-1]] * (width - len(table)))] for table in tables], dtype=np.int64)
            self._decode_indices[window] = (padded, np.asarray(bounds, dtype=np.int64))
        return self._decode_indices[window]

    def _decode_gather(self, window: int | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the same on the device: flat tables, and bounds as a mask ``[rows, 1, 1, width * block_size]``."""
        if window not in self._decode_gathers:
            tables, bounds = self._decode_index(window)
            position = np.arange(tables.shape[1] * self._kv.block_size)[None, :]
            is_seen = (position >= bounds[:, :1]) & (position < bounds[:, 1:])
            mask = torch.from_numpy(is_seen).to(self._kv.device)[:, None, None, :]
            self._decode_gathers[window] = (self._index(tables.ravel()), mask)
        return self._decode_gathers[window]

    def _index(self, values: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64))
        device = self._kv.device
        return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def _attend(
    call: AttentionCall, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """Return softmax attention ``[batch, heads, rows, value_dim]``; no mask means causal from position 0 on."""
    is_grouped = query.shape[1] != key.shape[1]
    if call.softcap is None and call.sinks is None:
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, scale=call.scaling, enable_gqa=is_grouped
        )
    if is_grouped:
        repeats = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    scores = (query @ key.transpose(2, 3) * call.scaling).float()
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    if mask is None:
        num_rows, total = scores.shape[-2:]
        mask = torch.ones(num_rows, total, dtype=torch.bool, device=scores.device).tril()
    scores = scores.masked_fill(~mask, float("-inf"))
    if call.sinks is None:
        return scores.softmax(-1).to(query.dtype) @ value
    sinks = call.sinks.float()[:, None, None].expand(*scores.shape[:-1], 1)
    return torch.cat((scores, sinks), dim=-1).softmax(-1)[..., :-1].to(query.dtype) @ value
