"""Parameters that transformers makes of other tensors than a checkpoint holds: experts that it merges, mostly.

::

    experts.0.up_proj.weight, experts.1.up_proj.weight, ...  -->  experts.gate_up_proj
    experts.0.gate_proj.weight, ...                               [experts, 2 inner, hidden]

The conversion is transformers' own (``conversion_mapping``), run for one parameter when that is read, so that a mixture
takes no more memory while it is loaded than another model. Its sources are numbers: codes are widened first.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from transformers.core_model_loading import WeightConverter

__all__ = ["Merge"]


@dataclass(frozen=True, slots=True)
class Merge:
    """A conversion of some tensors."""

    first: str  # the parameter that it makes, or the first of several
    converter: WeightConverter
    # What it takes in the files, tensors or modules in codes, in their order, by the converter's pattern.
    sources: dict[str, dict[str, None]] = field(default_factory=dict)

    def places(self) -> list[str]:
        """Return what it takes in the files."""
        return [place for places in self.sources.values() for place in places]

    def convert(self, model: Any, read: Callable[[str, str], torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the parameters by name.

        Args:
            model: The model, which may have no weights.
            read: Returns the numbers of a place, by pattern and place.
        """
        converter = deepcopy(self.converter)  # it collects tensors
        for pattern, places in self.sources.items():
            for place in places:
                converter.add_tensor(self.first, place, pattern, partial(read, pattern, place))
        made = converter.convert(self.first, model=model, config=model.config)
        return {name: made[0] if isinstance(made, list) else made for name, made in made.items()}

    def shapes(self, model: Any) -> dict[str, tuple[int, ...]]:
        """Return the shape that each place of a pattern must have, by the shapes of the parameters."""
        back, patterns = self.converter.reverse_transform(), self.converter.target_patterns
        first, _ = back.rename_source_key(self.first)
        for target, pattern in zip(patterns, back.source_patterns, strict=True):
            name = self.first.replace(patterns[0], target)
            back.add_tensor(first, name, pattern, torch.empty_like(model.get_parameter(name), device="meta"))
        made = back.convert(first, model=model, config=model.config)
        return {self.converter.rename_source_key(name)[1]: tuple(tensor.shape) for name, tensor in made.items()}

    def describe(self) -> str:
        """Return what the files hold for it, in words."""
        counts = {pattern: len(self.sources.get(pattern, ())) for pattern in self.converter.source_patterns}
        return ", ".join(f"{count} x {pattern!r}" for pattern, count in counts.items())
