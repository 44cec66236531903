"""Adapters of one shape: what their configuration and header say is worked out once for all that share both.

The adapters of a service come from few trainers, and many differ in their numbers alone. To parse both files, match
them with the base and lay the weights out is most of the work of reading a small adapter again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from manylora.adapters.config import parse_config
from manylora.adapters.content import by_layer
from manylora.adapters.layout import AdapterLayout
from manylora.adapters.method import AdapterMethod, ModuleWeights
from manylora.adapters.methods import find_method
from manylora.adapters.shape import BaseShape
from manylora.adapters.weight_file import WeightFile

__all__ = ["MatchedShapes", "MatchedWeights"]

MAX_SHAPES = 32


@dataclass(frozen=True, slots=True, eq=False)
class MatchedWeights:
    """The weights of a file, matched with the base and without their bytes.

    Args:
        method: The adapter's.
        weights: Of every module, in the base's order.
        layers: The same by layer, in the order of the layers in a layout.
    """

    method: AdapterMethod
    weights: Sequence[ModuleWeights]
    layers: Sequence[Sequence[ModuleWeights]]
    _layouts: dict[str, AdapterLayout] = field(default_factory=dict, init=False)

    def lay_out(self, base: BaseShape, dtype: str) -> AdapterLayout:
        """Return the layout in a type, the same one every time."""
        layout = self._layouts.get(dtype)
        if layout is None:
            layout = self.method.lay_out({w.module.name: w.rank for w in self.weights}, base, dtype)
            self._layouts[dtype] = layout
        return layout


class MatchedShapes:
    """Matches files with one base; remembers some by configuration, header and size. For one thread at a time."""

    def __init__(self, base: BaseShape) -> None:
        self._base = base
        self._known: dict[tuple[bytes, bytes, int], MatchedWeights] = {}

    def match(self, name: str, config: bytes, file: WeightFile) -> MatchedWeights:
        """Return the weights of an open file.

        Args:
            name: The adapter, for messages.
            config: Content of its configuration.
            file: Its weights.

        Raises:
            AdapterError: They cannot be served on this base, as far as configuration and header show.
        """
        if file.header is None:
            return self._match(name, config, file)
        shape = (_digest(config), _digest(file.header), file.num_bytes)
        matched = self._known.get(shape)
        if matched is None:
            matched = self._match(name, config, file)
            if len(self._known) >= MAX_SHAPES:
                self._known.clear()
            self._known[shape] = matched
        return matched

    def _match(self, name: str, written: bytes, file: WeightFile) -> MatchedWeights:
        config = parse_config(name, written)
        method = find_method(config)
        weights = method.parse(name, config).match(file.tensors, self._base)
        return MatchedWeights(method, weights, by_layer(weights))


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).digest()
