"""Adapter methods: LoRA, and those that are added beside it.

Every method ends in the same arithmetic, so kernels, pages and schedulers are independent of the method. A row of a
module's output is::

    out = (x W^T  +  scale * (x A^T) B^T) * factor  +  bias  +  shift

A method checks a configuration (``parse``). The settings that it returns find A, B and the vectors of each module in a
weight file (``match``). Plain LoRA has no factor and no shift, and pays nothing for methods that have them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from manylora.core.adapters.lora.folded import FOLDED
from manylora.core.adapters.lora.plain import parse_plain
from manylora.core.adapters.shape import BaseShape
from manylora.core.adapters.tensors import ModuleWeights, StoredModule, StoredTensor

__all__ = ["METHODS", "AdapterMethod", "AdapterSettings", "parse_settings"]


class AdapterSettings(Protocol):
    """The checked configuration of one adapter, which interprets its tensors."""

    @property
    def invocation(self) -> tuple[int, ...]:
        """The tokens that activate the adapter; empty if it is always active."""

    def stored_modules(self, tensors: Mapping[str, StoredTensor]) -> tuple[StoredModule, ...]:
        """Return the modules in a weight file, sorted by name; ``AdapterError`` if a tensor is not understood."""

    def match(self, tensors: Mapping[str, StoredTensor], base: BaseShape) -> tuple[ModuleWeights, ...]:
        """Return the weights of every module, in the base's module order; at least one.

        Types and shapes decide: the bytes of a tensor may not have been read yet. ``AdapterError`` if a tensor would
        not be applied, a tensor that the settings name is missing, or sizes disagree.
        """


class AdapterMethod(Protocol):
    """Reads the configurations of adapters of one kind; stateless."""

    def parse(self, name: str, config: Mapping[str, Any]) -> AdapterSettings:
        """Check the content of ``adapter_config.json``; ``name`` is the adapter, for messages.

        ``AdapterError`` if the configuration is malformed or unsupported.
        """


METHODS: dict[str, AdapterMethod] = {**FOLDED}
"""Methods beside LoRA, by PEFT's name of the type; every other type is LoRA, or refused by its name."""


def parse_settings(name: str, config: Mapping[str, Any]) -> AdapterSettings:
    """Check a configuration by the method that it asks for; arguments and errors as for ``AdapterMethod.parse``."""
    peft_type = config.get("peft_type")
    method = METHODS.get(peft_type) if isinstance(peft_type, str) else None
    return parse_plain(name, config) if method is None else method.parse(name, config)
