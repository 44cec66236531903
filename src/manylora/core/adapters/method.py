"""The interface of an adapter method: plain LoRA and methods beyond it.

Every method ends in the same arithmetic, so kernels, pages and schedulers are independent of the method. A row of a
module's output is::

    out = (x W^T  +  scale * (x A^T) B^T) * column_scale  +  bias

A method finds A, B and the column scale of each module in a checkpoint (``parse``, then ``match``), lays them out in
pages (``lay_out``, which also gives their size), and defines the result in plain numpy (``reference``, for tests).
Plain LoRA has no column scale and pays nothing for methods that have one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from manylora.core.adapters.layout import AdapterLayout
from manylora.core.adapters.shape import BaseShape, TargetModule
from manylora.core.adapters.tensors import StoredTensor

__all__ = ["AdapterMethod", "AdapterSettings", "ModuleWeights", "StoredModule"]


@dataclass(frozen=True, slots=True)
class ModuleWeights:
    """The weights of one module, checked against the base.

    Args:
        module: The base's module.
        rank: Rank of the pair.
        scale: Factor of ``B A``; folded into B when packed.
        a: ``[rank, in_features]``.
        b: ``[out_features, rank]``, without the scale.
        column_scale: ``[out_features]``, multiplies the output of base and LoRA together; ``None`` for no factor.
    """

    module: TargetModule
    rank: int
    scale: float
    a: StoredTensor
    b: StoredTensor
    column_scale: StoredTensor | None = None

    @property
    def tensors(self) -> tuple[StoredTensor, ...]:
        """A, B, and the column scale if there is one."""
        return (self.a, self.b) if self.column_scale is None else (self.a, self.b, self.column_scale)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredModule:
    """One adapted module of a weight file, before any base is known.

    Args:
        name: As in the file.
        rank: Rows of A in the file.
        scale: Factor of ``B A``.
        dtype: Stored type of A, by safetensors' name.
        num_elements: Elements of all its tensors.
    """

    name: str
    rank: int
    scale: float
    dtype: str
    num_elements: int


class AdapterSettings(Protocol):
    """The checked configuration of one adapter, which interprets its tensors."""

    @property
    def base_model(self) -> str | None:
        """The base it was trained on, as its author called it."""
        ...

    @property
    def task_type(self) -> str | None:
        """PEFT's name of the task."""
        ...

    @property
    def use_rslora(self) -> bool:
        """Whether scales divide by the root of the rank."""
        ...

    def stored_modules(self, tensors: Mapping[str, StoredTensor]) -> tuple[StoredModule, ...]:
        """Return the modules in a weight file, sorted by name.

        Raises:
            AdapterError: A tensor is not understood.
        """
        ...

    def match(self, tensors: Mapping[str, StoredTensor], base: BaseShape) -> tuple[ModuleWeights, ...]:
        """Return the weights of every module, in the base's module order; at least one.

        Types and shapes decide: the bytes of a tensor may not have been read yet.

        Raises:
            AdapterError: A tensor would not be applied, a tensor that the settings name is missing, or sizes disagree.
        """
        ...


class AdapterMethod(Protocol):
    """Reads, stores and defines adapters of one kind; stateless."""

    def accepts(self, config: Mapping[str, Any]) -> bool:
        """Return whether a configuration asks for this method."""
        ...

    def parse(self, name: str, config: Mapping[str, Any]) -> AdapterSettings:
        """Check the content of ``adapter_config.json``; ``name`` is the adapter, for messages.

        Raises:
            AdapterError: The configuration is malformed or unsupported.
        """
        ...

    def lay_out(self, ranks: Mapping[str, int], base: BaseShape, dtype: str | None = None) -> AdapterLayout:
        """Return the places of an adapter's tiles, which also give its pages and bytes.

        Args:
            ranks: Rank of each adapted module, by module name.
            base: The base model.
            dtype: Type of the packed weights; the page's own when ``None``.
        """
        ...

    def reference(
        self, x: NDArray[np.float64], product: NDArray[np.float64], weights: ModuleWeights
    ) -> NDArray[np.float64]:
        """Return a module's output before its bias, by the method's definition; slow, for tests.

        Args:
            x: Inputs ``[rows, in_features]``; one-hot tokens for an embedding.
            product: The base's own ``x W^T`` ``[rows, out_features]``.
            weights: The module's weights.
        """
        ...
