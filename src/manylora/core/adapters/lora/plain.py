"""Plain LoRA, with rank-stabilised scales and with ranks and scales by pattern: ``x W^T + scale * (x A^T) B^T``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from manylora.core.adapters.layout import AdapterLayout, lay_out
from manylora.core.adapters.lora.settings import LoraSettings, parse_settings
from manylora.core.adapters.lora.targeting import Targeting
from manylora.core.adapters.lora.weights import match_weights, pair_tensors
from manylora.core.adapters.method import ModuleWeights, StoredModule
from manylora.core.adapters.shape import BaseShape
from manylora.core.adapters.tensors import StoredTensor

__all__ = ["PlainLora", "PlainSettings"]


@dataclass(frozen=True, slots=True)
class PlainSettings:
    """The settings and the name of one adapter; an ``AdapterSettings``."""

    name: str
    settings: LoraSettings

    @property
    def base_model(self) -> str | None:
        """The base it was trained on."""
        return self.settings.base_model

    @property
    def task_type(self) -> str | None:
        """PEFT's name of the task."""
        return self.settings.task_type

    @property
    def use_rslora(self) -> bool:
        """Whether scales divide by the root of the rank."""
        return self.settings.use_rslora

    def stored_modules(self, tensors: Mapping[str, StoredTensor]) -> tuple[StoredModule, ...]:
        """Return the modules in a weight file."""
        targeting = Targeting(self.name, self.settings, ())
        modules = []
        for module, pair in sorted(pair_tensors(self.name, tensors).items()):
            a, b = pair.both()
            modules.append(
                StoredModule(
                    name=module,
                    rank=a.shape[0] if a.shape else 0,
                    scale=targeting.scale(module),
                    dtype=a.dtype,
                    num_elements=math.prod(a.shape) + math.prod(b.shape),
                )
            )
        return tuple(modules)

    def match(self, tensors: Mapping[str, StoredTensor], base: BaseShape) -> tuple[ModuleWeights, ...]:
        """Return the weights of every module of the base that the adapter changes."""
        return match_weights(self.name, self.settings, tensors, base)


class PlainLora:
    """An ``AdapterMethod``: one pair of matrices per module."""

    def accepts(self, config: Mapping[str, Any]) -> bool:
        """Return whether a configuration asks for this method."""
        return config.get("peft_type") == "LORA"

    def parse(self, name: str, config: Mapping[str, Any]) -> PlainSettings:
        """Check a configuration; settings beyond plain LoRA are refused by name."""
        return PlainSettings(name, parse_settings(name, config))

    def lay_out(self, ranks: Mapping[str, int], base: BaseShape, dtype: str | None = None) -> AdapterLayout:
        """Return the places of the pairs."""
        return lay_out(ranks, base, dtype)

    def reference(
        self, x: NDArray[np.float64], product: NDArray[np.float64], weights: ModuleWeights
    ) -> NDArray[np.float64]:
        """Return ``product + scale * (x A^T) B^T``."""
        return product + weights.scale * (x @ weights.a.as_float32().T) @ weights.b.as_float32().T
