"""Settle what an adapter says in terms of the base, in its image, before any step may read it.

::

    magnitude m   (DoRA)             factor = m / |W + scale B A|, by row of the weight
    gain          (a norm's weight)  factor = the norm's output with it / with the base's
    bias b        (in its place)     shift  = b - the base's, times the factor if the base added it before that (norms)
    factor of the bias f             shift  = (f - 1) times the base's
    rows, or all of a weight         theirs - the base's

A reader process has no weights of the base, so it leaves what the file says in the image. The engine's process has the
weights that it serves, of whatever format, and finishes the image as its layers come: once for each read of an adapter,
in one pass over the weights that the adapter changes.

Source:
    DoRA (arXiv:2402.09353), section 4.1; PEFT 0.21, ``tuners/lora/dora.py``, which computes the norms anew in each
    forward pass. There the rows of an embedding are the dimensions of its vectors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import chain
from typing import cast

import torch
from torch import nn

from manylora.core.adapters.layout import AdapterLayout, GroupLayout
from manylora.core.adapters.shape import ModuleKind, TargetModule
from manylora.core.adapters.tensors import Replaced, VectorKind
from manylora.core.errors import AdapterError
from manylora.execution.kernels.linear import Weight, rows_at, rows_of
from manylora.execution.storage.resident import ResidentGroup, ResidentModule, WeightPiece, read_in_place

__all__ = ["BaseGroup", "BaseNorm", "Settling"]

CHUNK_ELEMENTS = 1 << 25
"""Weights of the base that are looked at together: 128 MB in float32. A packed weight is unpacked for each part."""


@dataclass(frozen=True, slots=True)
class BaseGroup:
    """The base's own weights of a group, one above the other, and its bias ``[out]`` if it has one.

    Those of an embedding are its table ``[vocab, hidden]``.
    """

    weights: Sequence[Weight]
    bias: torch.Tensor | None

    def rows(self, first: int, last: int) -> torch.Tensor:
        """Return rows ``[first, last)`` of the weights, float32."""
        found = []
        for weight in self.weights:
            num_rows = weight.shape[0]
            if first < num_rows and last > 0:
                found.append(rows_of(weight, max(first, 0), min(last, num_rows)))
            first, last = first - num_rows, last - num_rows
        return found[0] if len(found) == 1 else torch.cat(found)

    def at(self, places: torch.Tensor) -> torch.Tensor:
        """Return the rows at some places ``[n]``, float32, on the CPU."""
        if len(self.weights) == 1:
            return rows_at(self.weights[0], places).cpu()
        return torch.cat([self.rows(place, place + 1) for place in places.tolist()]).cpu()


@dataclass(frozen=True, slots=True)
class BaseNorm:
    """A norm of the base, which no step runs."""

    module: nn.Module

    @classmethod
    def of(cls, norm: nn.Module) -> BaseNorm:
        """Return a copy of a norm, in float32 on the CPU."""
        return cls(deepcopy(norm).cpu().float())

    @property
    def bias(self) -> torch.Tensor | None:
        """The number that it adds to each."""
        return cast("torch.Tensor | None", getattr(self.module, "bias", None))

    def ratio(self, weight: torch.Tensor) -> torch.Tensor:
        """Return its output with another weight ``[width]`` over that with its own, without biases.

        It is whatever the module's own code makes of a weight: Gemma adds 1 to it.
        """
        return self._gain(weight) / self._gain(cast(torch.Tensor, self.module.weight))

    def _gain(self, weight: torch.Tensor) -> torch.Tensor:
        norm = deepcopy(self.module)  # settlings run beside one another
        norm.weight = nn.Parameter(weight, requires_grad=False)
        x = (1.0 - 2.0 * (torch.arange(len(weight)) % 2))[None]
        gain: torch.Tensor = norm(x) - norm(-x)
        return gain[0]


@dataclass(slots=True, eq=False)
class Settling:
    """The groups of an image that wait to be settled; called as its pages come (``host_tier.Settle``)."""

    name: str  # the adapter, for messages
    base: Mapping[str, BaseGroup | BaseNorm]
    # Groups that have something to settle, in the order in which they come, and their views.
    pending: list[tuple[GroupLayout, ResidentGroup]] = field(default_factory=list)

    @classmethod
    def of(
        cls, base: Mapping[str, BaseGroup | BaseNorm], name: str, layout: AdapterLayout, image: torch.Tensor
    ) -> Settling:
        """Return what is to be settled in an image."""
        pending = [group for group in layout.groups.values() if any(part.needs_base for part in group.modules)]
        views = read_in_place(layout, image).groups
        return cls(name, base, [(group, views[group.group]) for group in pending])

    def __call__(self, num_pages: int) -> int:
        """Settle the groups that lie in the first ``num_pages``; return how many of these are final.

        ``AdapterError`` if a vector does not go with the base.
        """
        waiting = []
        for group, weights in self.pending:
            if group.num_pages_needed <= num_pages:
                self._settle(group, weights)
            else:
                waiting.append((group, weights))
        self.pending = waiting
        return min([num_pages, *(_first_page(group) for group, _ in waiting)])

    @torch.inference_mode()
    def _settle(self, layout: GroupLayout, weights: ResidentGroup) -> None:
        base = self.base[layout.group]
        for part, module in zip(layout.modules, weights.modules, strict=True):
            kinds = [kind for kind, _ in part.vectors]
            if isinstance(base, BaseNorm):
                _settle_norm(base, part.module, module, kinds)
            else:
                _settle_vectors(base, part.module, weights, module, kinds)
                if part.replaces is Replaced.ROWS:
                    _subtract_rows(base, part.module, weights, module)
                elif part.replaces is Replaced.WEIGHT:
                    _subtract_weight(base, part.module, weights, module)
            if not all(piece.weight.isfinite().all() for piece in (*module.factor, *module.shift)):
                raise AdapterError(
                    self.name,
                    f"module {part.module.name!r} cancels a row of the base, or its numbers are too large"
                    if not isinstance(base, BaseNorm)
                    else f"module {part.module.name!r} has a number where the base's weight is 0, or it is too large",
                )


def _settle_vectors(
    base: BaseGroup, target: TargetModule, weights: ResidentGroup, module: ResidentModule, kinds: Sequence[VectorKind]
) -> None:
    if VectorKind.MAGNITUDE in kinds:
        measure = _column_norms if target.kind is ModuleKind.EMBEDDING else _row_norms
        norms = measure(base, target, *_pair(weights, module)).cpu()
        for piece, columns in _columns(module.factor):
            piece.copy_(piece / norms[columns])
    if base.bias is None:
        return
    bias = base.bias[module.offset : module.offset + target.out_features].float().cpu()
    for piece, columns in _columns(module.shift):
        if VectorKind.BIAS in kinds:
            piece.sub_(bias[columns])
        elif VectorKind.BIAS_FACTOR in kinds:
            piece.sub_(1).mul_(bias[columns])


def _settle_norm(base: BaseNorm, target: TargetModule, module: ResidentModule, kinds: Sequence[VectorKind]) -> None:
    """Settle the vectors of a norm, which is repeated for each head if it has a multiple of its weight's outputs."""
    heads, factor = target.out_features // target.in_features, torch.ones(target.out_features)
    if VectorKind.GAIN in kinds:
        factor = base.ratio(_whole(module.factor, 1, target.out_features)[0, : target.in_features]).repeat(heads)
        for piece, columns in _columns(module.factor):
            piece.copy_(factor[columns])
    if base.bias is not None:
        bias = base.bias.repeat(heads) * factor
        for piece, columns in _columns(module.shift):
            piece.sub_(bias[columns])


def _columns(pieces: Sequence[WeightPiece]) -> Iterator[tuple[torch.Tensor, slice]]:
    """Yield each piece of a vector, and the outputs that it is of."""
    for piece in pieces:
        yield piece.weight, slice(piece.col, piece.col + piece.weight.shape[1])


def _first_page(group: GroupLayout) -> int:
    tiles = chain(group.a, *(part.b for part in group.modules), *(t for part in group.modules for _, t in part.vectors))
    return min(tile.page for tile in tiles)


def _subtract_rows(base: BaseGroup, target: TargetModule, weights: ResidentGroup, module: ResidentModule) -> None:
    """Subtract the base's rows from those that take their place; the other half of the pair says which they are."""
    a, b = _pair(weights, module)
    if target.kind is ModuleKind.EMBEDDING:
        rows, pieces, first = base.at(a.argmax(dim=1)), module.b, 0
    else:
        rows, pieces, first = base.at(module.offset + b.argmax(dim=1)), weights.a, module.row
    for piece in pieces:
        num_rows, num_cols = piece.weight.shape
        own = slice(max(piece.row - first, 0), min(piece.row - first + num_rows, module.rank))
        if own.start < own.stop:
            target_rows = piece.weight[own.start + first - piece.row : own.stop + first - piece.row]
            target_rows -= rows[own, piece.col : piece.col + num_cols].to(piece.weight.dtype)


def _subtract_weight(base: BaseGroup, target: TargetModule, weights: ResidentGroup, module: ResidentModule) -> None:
    """Subtract the base's weight from the one that takes its place, which lies transposed in the pages."""
    is_embedding = target.kind is ModuleKind.EMBEDDING
    pieces, first_row = (weights.a, module.row) if is_embedding else (module.b, 0)
    num_rows, width = target.out_features, target.in_features
    if is_embedding:
        num_rows, width = width, num_rows
    step = max(1, CHUNK_ELEMENTS // width)
    for first in range(0, num_rows, step):
        last = min(first + step, num_rows)
        theirs = base.rows(module.offset + first, module.offset + last).cpu()
        for piece in pieces:
            begin, end = max(first, piece.col), min(last, piece.col + piece.weight.shape[1])
            if begin < end:
                columns = slice(piece.row - first_row, piece.row - first_row + piece.weight.shape[0])
                own = piece.weight[:, begin - piece.col : end - piece.col]
                own -= theirs[begin - first : end - first, columns].t().to(own.dtype)


def _pair(weights: ResidentGroup, module: ResidentModule) -> tuple[torch.Tensor, torch.Tensor]:
    """Return A ``[rank, in]`` and B^T ``[rank, out]`` of a module, whole and float32."""
    a = _whole(weights.a, weights.rank, weights.layout.in_features)[module.row : module.row + module.rank]
    num_out = max(piece.col + piece.weight.shape[1] for piece in module.b)
    return a, _whole(module.b, module.rank, num_out)


def _whole(pieces: Sequence[WeightPiece], num_rows: int, num_cols: int) -> torch.Tensor:
    whole = torch.zeros(num_rows, num_cols)
    for piece in pieces:
        rows, cols = piece.weight.shape
        whole[piece.row : piece.row + rows, piece.col : piece.col + cols] = piece.weight
    return whole


def _row_norms(base: BaseGroup, module: TargetModule, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the length of each row of ``W + B A`` ``[out]``."""
    norms = []
    step = max(1, CHUNK_ELEMENTS // module.in_features)
    for first in range(0, module.out_features, step):
        last = min(first + step, module.out_features)
        rows = base.rows(module.offset + first, module.offset + last)
        norms.append(
            torch.linalg.vector_norm(rows.addmm(b[:, first:last].t().to(rows.device), a.to(rows.device)), dim=1)
        )
    return torch.cat(norms)


def _column_norms(base: BaseGroup, module: TargetModule, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the length of each column of an embedding's table with LoRA ``[hidden]``."""
    squares = torch.zeros(module.out_features)
    step = max(1, CHUNK_ELEMENTS // module.out_features)
    for first in range(0, module.in_features, step):
        rows = base.rows(first, min(first + step, module.in_features))
        table = rows.addmm(a[:, first : first + step].t().to(rows.device), b.to(rows.device))
        squares += table.square().sum(dim=0).cpu()
    return squares.sqrt()
