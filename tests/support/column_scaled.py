"""An adapter method beside plain LoRA, as one would be added: LoRA with a trained factor for each output column."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from manylora.core.adapters.lora.plain import PlainSettings, parse_plain
from manylora.core.adapters.shape import BaseShape
from manylora.core.adapters.tensors import ModuleWeights, StoredModule, StoredTensor, VectorKind
from manylora.core.errors import AdapterError

PEFT_TYPE = "COLUMN_SCALED_LORA"
_SUFFIX = ".lora_column_scale"


class ColumnScaledSettings(PlainSettings):
    """Plain LoRA's settings; one vector more for each module."""

    def stored_modules(self, tensors: Mapping[str, StoredTensor]) -> tuple[StoredModule, ...]:
        return PlainSettings.stored_modules(self, {k: v for k, v in tensors.items() if not k.endswith(_SUFFIX)})

    def match(self, tensors: Mapping[str, StoredTensor], base: BaseShape) -> tuple[ModuleWeights, ...]:
        pairs = {key: tensor for key, tensor in tensors.items() if not key.endswith(_SUFFIX)}
        matched = []
        for weights in PlainSettings.match(self, pairs, base):
            scale = tensors.get(f"base_model.model.{weights.module.name}{_SUFFIX}")
            if scale is None or scale.shape != (weights.module.out_features,):
                raise AdapterError(self.name, f"module {weights.module.name!r} has no factor for each column")
            matched.append(replace(weights, vectors={VectorKind.FACTOR: scale}))
        return tuple(matched)


class ColumnScaledLora:
    """``(x W^T + scale * (x A^T) B^T) * factor``."""

    def parse(self, name: str, config: Mapping[str, Any]) -> ColumnScaledSettings:
        return ColumnScaledSettings(name, parse_plain(name, {**config, "peft_type": "LORA"}).settings)
