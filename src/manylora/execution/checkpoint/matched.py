"""Weights in safetensors files, matched with the parameters of transformers' model.

Names are those that transformers gives tensors while it loads them. A parameter is a tensor, or the codes of a module
in the files, or is made of several of either by a conversion of transformers (``Merge``): those are widened first::

    experts.0.up_proj.weight, experts.1.up_proj.weight, ...  -->  experts.gate_up_proj
    experts.0.gate_proj.weight, ...                               [experts, 2 inner, hidden]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.base import HfQuantizer

from manylora.core.errors import ConfigError, ManyloraError
from manylora.execution.checkpoint.codes import Codes, find_problem
from manylora.execution.checkpoint.stored import FLOATS, Method, StoredTensors, check_names, one_line

__all__ = ["StoredWeights"]

_EXPERT = nn.Linear(1, 1, device="meta")
"""What the linear of an expert is to a configuration; the merged model has no module for it."""


@dataclass(frozen=True, slots=True)
class Merge:
    """A conversion of tensors: transformers' own (``conversion_mapping``), run for one parameter when that is read.

    So a mixture takes no more memory while it is loaded than another model.
    """

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


class StoredWeights:
    """Weights in safetensors files, which were matched with the model; ``names`` are its own, in its order."""

    def __init__(
        self, stored: StoredTensors, method: Method | None, skeleton: Any, converters: Sequence[WeightConverter] = ()
    ) -> None:
        self.plain: dict[str, str] = {}  # the tensor that is a parameter or buffer, by the model's name
        self.coded: dict[str, str] = {}  # the module in the files whose tensors are the codes of a parameter, likewise
        self.merged: dict[str, Merge] = {}  # the conversion that makes a parameter, likewise
        self.paths = stored.paths
        self._stored = stored
        self._method = method
        self._skeleton = skeleton
        self._own: dict[str, torch.Tensor] = skeleton.state_dict()
        marks = () if method is None else method.marks
        self._modules = {_owner(tensor, leaf) for tensor in stored.files.files for leaf in marks} - {None}
        # The parameters that the files hold as ``[in, out]`` (GPT-2), which the model has as linears.
        self.transposed = {f"{name}.weight" for name, one in skeleton.named_modules() if isinstance(one, Conv1D)}
        merges, unexpected = self._match(converters)
        for merge in merges:
            self._check_merge(merge)
        self.names = {
            name: None for name in self._own if name in self.plain or name in self.coded or name in self.merged
        }.keys()
        numbers = {*self.plain.values(), *unexpected}
        numbers.update(place for merge in merges if merge.converter not in converters for place in merge.places())
        dtypes = {tensor: dtype for tensor, dtype in stored.files.dtypes.items() if tensor in numbers}
        shapes = {name: stored.shape(tensor) for name, tensor in self.plain.items()}
        shapes |= {name: tuple(self._own[name].shape) for name in chain(self.coded, self.merged)}
        check_names(skeleton, replace(stored.files, dtypes=dtypes), shapes, unexpected)
        self._check_ties()
        if method is not None:
            self._check_announced(method, merges)

    def read(self, name: str) -> Codes | torch.Tensor:
        """Return a parameter or buffer, by the model's name of it."""
        if (merge := self.merged.get(name)) is not None:
            return self._convert(merge)[name]
        if (coded := self.coded.get(name)) is None:
            weight = self._read_tensor(self.plain[name])
            return weight.t() if name in self.transposed else weight
        module = self._skeleton.get_submodule(name.removesuffix(".weight"))
        return self._read_codes(coded, module, tuple(self._own[name].shape))

    def place(self, name: str) -> str:
        """Return the name of the file that holds it; of several tensors, the index or the only file."""
        return self._stored.files.place(self.plain.get(name, name))

    def close(self) -> None:
        """Drop the files; views of them that were returned stay valid."""
        self._stored.close()

    def _read_tensor(self, tensor: str) -> torch.Tensor:
        return self._stored.read(tensor, (self._stored.files.dtypes[tensor],))

    def _read_codes(self, coded: str, module: nn.Module, shape: tuple[int, ...]) -> Codes:
        num_out, num_in = shape
        assert self._method is not None
        codes = self._method.read(self._stored, coded, module, (num_out, num_in))
        if (problem := find_problem(codes)) is not None:
            raise self._stored.refuse(self._mark(self._method, coded), f"of a weight with {problem}")
        return codes

    def _convert(self, merge: Merge, *, is_empty: bool = False) -> dict[str, torch.Tensor]:
        """Return what a conversion makes; of tensors without numbers if ``is_empty``.

        ``ConfigError`` if a tensor is missing, or of a type or shape that the others do not have.
        """
        dtype = self._own[merge.first].dtype

        def read(shapes: Mapping[str, tuple[int, ...]], pattern: str, place: str) -> torch.Tensor:
            if place in self._modules:
                if is_empty:
                    return torch.empty(shapes[pattern], dtype=dtype, device="meta")
                return self._read_codes(place, _EXPERT, shapes[pattern]).dequantise().to(dtype)
            if is_empty:
                kept = torch.uint8 if self._stored.files.dtypes[place] == "U8" else dtype
                return torch.empty(self._stored.shape(place), dtype=kept, device="meta")
            tensor = self._read_tensor(place)
            return tensor.to(dtype) if tensor.is_floating_point() else tensor

        try:
            has_codes = not self._modules.isdisjoint(merge.places())
            num_tensors, (num_experts, *sizes) = len(self._stored.files.files), self._own[merge.first].shape
            if has_codes and len(sizes) == 2 and num_experts > num_tensors:  # before each of them gets a shape
                raise ValueError(f"{num_experts} experts by config.json, of {num_tensors} tensors")
            shapes = merge.shapes(self._skeleton) if has_codes else {}
            return merge.convert(self._skeleton, partial(read, shapes))
        except ManyloraError:
            raise
        except Exception as error:  # of operations of transformers, on tensors that do not suit them
            raise self._refuse(merge, one_line(error)) from error

    def _refuse(self, merge: Merge, reason: str) -> ConfigError:
        held = f"{self._stored.files.source} has {merge.describe()} for {merge.first!r}"
        return ConfigError(f"{self._stored.got}: {held}, which do not merge: {reason}")

    def _match(self, further: Sequence[WeightConverter]) -> tuple[list[Merge], list[str]]:
        """Match tensors, under the names that transformers gives them while it loads.

        Returns:
            The conversions, of ``further`` ones too, and the tensors without a match.
        """
        transforms = [*further, *get_model_conversion_mapping(self._skeleton)]
        renamings = [entry for entry in transforms if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in transforms if isinstance(entry, WeightConverter)]
        of_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
        own, prefix = self._own, self._skeleton.base_model_prefix

        def rename(tensor: str) -> tuple[str, str | None]:
            name, pattern = rename_source_key(tensor, renamings, converters, prefix, own)
            if name not in own and tensor in own:
                name, pattern = rename_source_key(tensor, [], [], prefix, own)
            return name, pattern

        method, modules = self._method, self._modules
        marks, parts, unused = ((), (), ()) if method is None else (method.marks, method.parts, method.unused)
        others = tuple(f".{leaf}" for leaf in unused)
        merges: dict[str, Merge] = {}
        unexpected: list[str] = []
        for tensor in sorted(self._stored.files.files, key=dot_natural_key):
            module = next((owner for leaf in (*marks, *parts) if (owner := _owner(tensor, leaf)) in modules), None)
            if module is None and tensor.endswith(others):
                continue
            name, pattern = rename(tensor if module is None else f"{module}.weight")
            found, place = (self.plain, tensor) if module is None else (self.coded, module)
            if name not in own:
                if _owner(tensor, "bias") not in modules or self._stored.read(tensor, FLOATS).any():
                    unexpected.append(tensor)  # AutoGPTQ stored biases of zeros where a model has none
            elif pattern is not None:
                merge = merges.setdefault(name, Merge(name, of_pattern[pattern]))
                merge.sources.setdefault(pattern, {})[place] = None
            elif found.setdefault(name, place) != place or (name in self.plain and name in self.coded):
                raise self._stored.refuse(tensor, f"for {name!r}, which another tensor is as well")
        return list(merges.values()), unexpected

    def _check_merge(self, merge: Merge) -> None:
        """Take over what a conversion makes, if the model has parameters of these names and shapes.

        ``ConfigError`` if it has not, or other tensors make one of them as well.
        """
        for name, made in self._convert(merge, is_empty=True).items():
            expected = self._own.get(name)
            if expected is None or expected.shape != made.shape:
                shape = None if expected is None else list(expected.shape)
                raise self._refuse(merge, f"{name!r} of shape {list(made.shape)}, expected {shape} by config.json")
            if name in self.plain or name in self.coded or name in self.merged:
                raise self._refuse(merge, f"{name!r}, which another tensor is as well")
            self.merged[name] = merge

    def _check_ties(self) -> None:
        """Refuse a weight that the configuration ties to another of other numbers: transformers would not tie them."""
        for target, source in self._skeleton.all_tied_weights_keys.items():
            if target not in self.names or source not in self.names:
                continue
            one, other = self.read(target), self.read(source)
            if isinstance(one, Codes) or isinstance(other, Codes) or not one.to(other.dtype).equal(other):
                raise self._stored.refuse(
                    self.plain.get(target, target),
                    f"of other numbers than {source!r}, to which tie_word_embeddings of config.json ties it",
                )

    def _check_announced(self, method: Method, merges: Sequence[Merge]) -> None:
        """Refuse codes that the configuration does not announce, and numbers where it announces codes.

        The output layer, and others that quantisers leave out by default, may be either unless the configuration
        lists them.
        """
        loose = HfQuantizer.get_modules_to_not_convert(self._skeleton, None, self._skeleton._keep_in_fp32_modules)
        places: list[tuple[nn.Module, str]] = []
        for path, module in self._skeleton.named_modules():
            plain = None if path in loose else self.plain.get(f"{path}.weight")
            if (place := self.coded.get(f"{path}.weight", plain)) is not None:
                places.append((module, place))
        for place in chain.from_iterable(merge.places() for merge in merges):
            if place in self._modules or (place.endswith(".weight") and len(self._stored.shape(place)) == 2):
                places.append((_EXPERT, place))
        for module, place in places:
            if place in self._modules:
                if method.announces(place, module) is False or module.weight.ndim != 2:
                    reason = "of codes, where quantization_config announces numbers"
                    raise self._stored.refuse(self._mark(method, place), reason)
            elif method.announces(place.removesuffix(".weight"), module):
                marks = " or ".join(method.marks)
                raise self._stored.refuse(place, f"without {marks}, which quantization_config announces")

    def _mark(self, method: Method, module: str) -> str:
        """Return a tensor that shows that a module's weight is in codes."""
        return next(tensor for leaf in method.marks if (tensor := f"{module}.{leaf}") in self._stored)


def _owner(tensor: str, leaf: str) -> str | None:
    """Return the module that a tensor of such a name is of, ``None`` if it has another name."""
    return tensor.removesuffix(f".{leaf}") if tensor.endswith(f".{leaf}") else None
