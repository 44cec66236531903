"""One way of adapting a base: the seam by which adapters beyond plain LoRA come in.

Every method ends in the same arithmetic, so that kernels, pages and schedulers know no method by name. A row of a
module's output is::

    out = (x W^T  +  scale * (x A^T) B^T) * column_scale  +  bias

A method says which tensors of a folder are A, B and the column scale of each module (``parse``, then ``match``), how
they lie in pages (``lay_out``, which is also their size), and how its own definition reads in plain numpy
(``reference``, the oracle of tests). Plain LoRA has no column scale and pays nothing for methods that have one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from manylora.adapters.layout import AdapterLayout
from manylora.adapters.shape import BaseShape, TargetModule
from manylora.adapters.tensors import StoredTensor

__all__ = ["AdapterMethod", "AdapterSettings", "ModuleWeights", "StoredModule"]


@dataclass(frozen=True, slots=True)
class ModuleWeights:
    """The weights of one module, checked against the base.

    Args:
        module: The module.
        rank: Rank of its pair.
        scale: Factor of ``B A``; folded into B when packed.
        a: ``[rank, in_features]``.
        b: ``[out_features, rank]``, without the scale.
        column_scale: ``[out_features]``, multiplies the output with LoRA in it; ``None`` where nothing does.
    """

    module: TargetModule
    rank: int
    scale: float
    a: StoredTensor
    b: StoredTensor
    column_scale: StoredTensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredModule:
    """One adapted module as a weight file has it, before any base is known.

    Args:
        name: As in the file.
        rank: Rows of its A, by the file.
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
    """The configuration of one adapter, checked; understands the tensors beside it."""

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

        Raises:
            AdapterError: A tensor would not be applied, one that the settings promise is missing, or sizes disagree.
        """
        ...


class AdapterMethod(Protocol):
    """How adapters of one kind are read, stored and applied; stateless."""

    def accepts(self, config: Mapping[str, Any]) -> bool:
        """Return whether a configuration asks for this method."""
        ...

    def parse(self, name: str, config: Mapping[str, Any]) -> AdapterSettings:
        """Check a configuration.

        Args:
            name: The adapter, for messages.
            config: Content of ``adapter_config.json``.

        Raises:
            AdapterError: It is malformed, or asks for something that is not supported.
        """
        ...

    def lay_out(self, ranks: Mapping[str, int], base: BaseShape, dtype: str | None = None) -> AdapterLayout:
        """Return where an adapter's tiles lie, and by that its pages and bytes.

        Args:
            ranks: Rank of each adapted module, by module name.
            base: The base model.
            dtype: Type the weights are kept in; the page's own when ``None``.
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
