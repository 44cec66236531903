"""Adapters of one shape: what their configuration and header say is worked out once for all that share both.

The adapters of a service come from few trainers, and many differ in their numbers alone. To parse both files, match
them with the base and lay the weights out is a large part of reading a small adapter again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from manylora.core.adapters.config import parse_config
from manylora.core.adapters.content import by_layer, digest_text
from manylora.core.adapters.layout import AdapterLayout
from manylora.core.adapters.method import AdapterMethod, ModuleWeights
from manylora.core.adapters.methods import find_method
from manylora.core.adapters.shape import BaseShape
from manylora.core.adapters.weight_file import WeightFile

__all__ = ["MatchedShapes", "MatchedWeights"]

MAX_SHAPES = 16
"""Shapes that are remembered: a few hundred kilobytes each, in a process whose memory is bounded."""


Shape: TypeAlias = tuple[bytes, bytes, int]
"""Digests of configuration and header, and the size of the file."""


@dataclass(frozen=True, slots=True, eq=False)
class MatchedWeights:
    """The weights of a file, matched with the base and without their bytes.

    Args:
        method: The adapter's.
        weights: Of every module, in the base's order.
        layers: The same by layer, in the order of the layers in a layout.
        shape: Its key in ``MatchedShapes``; ``None`` if the file has no header.
    """

    method: AdapterMethod
    weights: Sequence[ModuleWeights]
    layers: Sequence[Sequence[ModuleWeights]]
    shape: Shape | None
    _layouts: dict[str, AdapterLayout] = field(default_factory=dict, init=False)

    def lay_out(self, base: BaseShape, dtype: str) -> AdapterLayout:
        """Return the layout in a type, the same one every time."""
        layout = self._layouts.get(dtype)
        if layout is None:
            layout = self.method.lay_out({w.module.name: w.rank for w in self.weights}, base, dtype)
            self._layouts[dtype] = layout
        return layout


class MatchedShapes:
    """Matches files with one base, and remembers the shapes of some. For one reader at a time."""

    def __init__(self, base: BaseShape) -> None:
        self._base = base
        self._known: dict[Shape, MatchedWeights] = {}

    def match(self, name: str, config: bytes, file: WeightFile) -> MatchedWeights:
        """Return the weights of an open file; it may be of another version than the one that is registered.

        Args:
            name: The adapter, for messages.
            config: Content of its configuration.
            file: Its weights.

        Raises:
            AdapterError: They cannot be served on this base, as far as configuration and header show.
        """
        shape = None if file.header is None else (digest_text(config), digest_text(file.header), file.num_bytes)
        known = None if shape is None else self._known.get(shape)
        if known is not None:
            return known
        fields = parse_config(name, config)
        method = find_method(fields)
        weights = method.parse(name, fields).match(file.tensors, self._base)
        return MatchedWeights(method, weights, by_layer(weights), shape)

    def remember(self, matched: MatchedWeights) -> None:
        """Keep what was found of an adapter that is served; the one that was kept first makes room."""
        if matched.shape is None or matched.shape in self._known:
            return
        if len(self._known) >= MAX_SHAPES:
            del self._known[next(iter(self._known))]
        self._known[matched.shape] = matched
