"""LoRA as PEFT's ``LoraConfig`` has it: the tensors of a weight file, matched with the base's modules.

Beside A and B a module may have vectors: DoRA's magnitude, the bias of ``lora_B``, and a trained bias in place of the
base's. ``VectorKind`` says what each does. Trained tokens are rows of the embedding that take the place of the base's,
and of the output head where it is tied: a pair of the rank of their number, whose other half picks them.

Source: PEFT 0.21, ``tuners/lora/layer.py``, ``tuners/lora/dora.py``, ``tuners_utils._get_learnable_bias_state_dict``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from manylora.core.adapters.folder import shown
from manylora.core.adapters.lora.experts import (
    MOVED,
    container_of,
    expert_weights,
    guess_parameter,
    name_parameters,
    parameter_of,
)
from manylora.core.adapters.lora.replaced import (
    check_replaced,
    of_every_head,
    token_ids,
    trained_tokens,
    trained_weight,
)
from manylora.core.adapters.lora.settings import LoraSettings, parse_lora
from manylora.core.adapters.lora.targeting import Targeting
from manylora.core.adapters.shape import BaseShape, ModuleKind
from manylora.core.adapters.tensors import (
    PREFIX,
    FoldedTensor,
    Located,
    ModuleWeights,
    Parts,
    StoredModule,
    StoredTensor,
    Tensor,
    VectorKind,
    check_tensor,
    gather_parts,
    only_vectors,
)
from manylora.core.errors import AdapterError, WeightsMissing

__all__ = ["NamedSettings", "PlainSettings", "check_missing", "locate_modules", "parse_plain"]

# Some trainers leave the adapter's name in: ``lora_A.default.weight``.
_NAMED = r"(?:\.[^.]+)?"
_PAIR = (
    rf"(?P<lora_A>lora_A{_NAMED}\.weight)|(?P<lora_B>lora_B{_NAMED}\.weight)"
    rf"|(?P<lora_embedding_A>lora_embedding_A{_NAMED})|(?P<lora_embedding_B>lora_embedding_B{_NAMED})"
)
_DORA = rf"|(?P<magnitude>lora_magnitude_vector{_NAMED}(?:\.weight)?)"
_LORA_BIAS = rf"|(?P<lora_bias>lora_B{_NAMED}\.bias)"
_BIAS = rf"|(?P<bias>(?:base_layer\.|modules_to_save{_NAMED}\.)?bias)"
# Of a base's own weight, which PEFT stores beside LoRA of it, the key ends in ``base_layer.weight``.
_SAVED = rf"|(?P<saved>(?:modules_to_save{_NAMED}\.)?(?<!\.base_layer\.)weight)"
# With ``bias: all`` PEFT stores the biases of a module that was trained whole again, and the one of the base's module.
_OWN_BIAS = re.compile(rf"(?P<module>.+)\.(?:original_module|modules_to_save{_NAMED})\.bias")
_TOKENS = rf"|(?P<tokens>token_adapter\.trainable_tokens_delta{_NAMED})"


_WRAPPERS = (("model.language_model.", "model."), ("language_model.", ""))
"""Prefixes of module names of a language model trained inside a multi-modal one, and the base's prefixes."""


@dataclass(frozen=True, slots=True)
class NamedSettings:
    """The settings and the name of one adapter, which every kind of LoRA has."""

    name: str
    settings: LoraSettings

    @property
    def invocation(self) -> tuple[int, ...]:
        """The tokens that activate the adapter; empty if it is always active."""
        return self.settings.invocation


@dataclass(frozen=True, slots=True)
class PlainSettings(NamedSettings):
    """The settings of plain LoRA; an ``AdapterSettings``."""

    def stored_modules(self, tensors: Mapping[str, StoredTensor]) -> tuple[StoredModule, ...]:
        """Return the modules in a weight file."""
        targeting = Targeting(self.name, self.settings, ())
        modules = []
        for module, parts in sorted(self._gather(tensors).items()):
            first = parts[min(parts)]
            a = parts.get("lora_A", parts.get("lora_embedding_A"))
            rank = a.shape[0] if a is not None and a.shape else 0
            num_elements = sum(math.prod(tensor.shape) for tensor in parts.values())
            if (parameter := guess_parameter(self.settings, module)) != module:
                module, rank = parameter, targeting.rank(parameter)
            scale = targeting.scale(module)
            dtype = (a or first).dtype
            modules.append(StoredModule(name=module, rank=rank, scale=scale, dtype=dtype, num_elements=num_elements))
        return tuple(modules)

    def match(self, tensors: Mapping[str, StoredTensor], base: BaseShape) -> tuple[ModuleWeights, ...]:
        """Return the weights of the base's modules, in the base's order; at least one.

        Raises:
            AdapterError: A tensor would not be applied, a tensor that the settings name is missing, or sizes disagree.
        """
        targeting, located, missing = locate_modules(self.name, self.settings, self._gather(tensors), base, _ALONE)
        weights = []
        for one in located:
            is_tied = one.module.name == base.tied_head and token_ids(one, self.settings) is None
            if is_tied and one.parts.keys() == {"tokens"}:  # the embedding's, stored again
                continue
            weights.append(self._weights(one, targeting))
            for wrapper in ("", ".token_adapter"):
                copy = tensors.get(f"{PREFIX}{one.stored_name}{wrapper}.base_layer.weight")
                if copy is not None:
                    _check_copy(self.name, one, copy)
        check_missing(self.name, missing)
        if (last := max(self.invocation, default=0)) >= base.vocab_size:
            raise AdapterError(
                self.name, f"alora_invocation_tokens has token id {last} outside the base's [0, {base.vocab_size})"
            )
        if self.settings.tokens or self.settings.saved:
            weights = check_replaced(self.name, self.settings, located, weights, base)
        return tuple(weights)

    def _gather(self, tensors: Mapping[str, StoredTensor]) -> dict[str, Parts]:
        """Return a file's tensors by module, each with both halves of a pair or with a bias alone."""
        settings = self.settings
        forms = _PAIR + _DORA * settings.use_dora + _LORA_BIAS * settings.lora_bias
        forms += _BIAS * (settings.bias != "none" or bool(settings.saved)) + _TOKENS * bool(settings.tokens)
        forms += _SAVED * bool(settings.saved)
        if settings.saved and settings.bias != "none":
            twice = {key for key in tensors if (of := _OWN_BIAS.fullmatch(key)) and f"{of['module']}.bias" in tensors}
            tensors = {key: tensor for key, tensor in tensors.items() if key not in twice}
        modules = gather_parts(self.name, tensors, re.compile(rf"base_model\.model\.(?P<module>.+?)\.(?:{forms})"))
        for module, parts in modules.items():
            halves = {part for part in parts if part not in (*_ALONE, "lora_bias", "magnitude")}
            if len({"embedding" in half for half in halves}) > 1:
                raise AdapterError(self.name, f"module {shown(module)}: the weights of this module are stored twice")
            for a, b in (("lora_A", "lora_B"), ("lora_embedding_A", "lora_embedding_B")):
                if len(halves & {a, b}) == 1:
                    present, absent = (a, b) if a in halves else (b, a)
                    raise AdapterError(self.name, f"module {shown(module)} has {present} but no {absent}")
            if "saved" in parts and parts.keys() - {"saved", "bias"}:
                raise AdapterError(self.name, f"module {shown(module)} has a whole weight and LoRA")
            if "bias" in parts and "saved" not in parts and settings.bias == "none":
                raise AdapterError(self.name, f"module {shown(module)} has a trained bias, but bias is 'none'")
            if "tokens" in parts and len(parts) > 1:
                raise AdapterError(
                    self.name, f"module {shown(module)} has trained tokens and LoRA, of which one may be"
                )
            if not halves and parts.keys() - set(_ALONE):
                raise AdapterError(self.name, f"module {shown(module)} has {min(parts)} but no lora_A")
            if halves and settings.use_dora and "magnitude" not in parts:
                raise AdapterError(
                    self.name, f"module {shown(module)} has no lora_magnitude_vector, but use_dora is set"
                )
        return modules

    def _weights(self, one: Located, targeting: Targeting) -> ModuleWeights:
        parts, module = one.parts, one.module
        if module.kind is ModuleKind.EXPERTS:
            return expert_weights(self.name, one, self.settings, targeting)
        if module.kind is ModuleKind.ROUTER and (extra := parts.keys() - {"lora_A", "lora_B"}):
            raise AdapterError(self.name, f"module {one.stored_name!r} is a router and has {min(extra)}")
        if "tokens" in parts:
            return trained_tokens(self.name, one, self.settings)
        if "saved" in parts:
            weights = trained_weight(self.name, one, self.settings)
        elif one.is_target:
            weights = self._pair(one, targeting)
        else:
            weights = only_vectors(module, {})
        return replace(weights, vectors={**weights.vectors, **self._vectors(one, weights.scale)})

    def _vectors(self, one: Located, scale: float) -> dict[VectorKind, Tensor]:
        name, module, where = self.name, one.module, f"module {one.stored_name!r}"
        vectors: dict[VectorKind, Tensor] = {}
        is_norm = module.kind is ModuleKind.NUMBERS
        shape = (module.in_features if is_norm else module.out_features,)
        given = {part: one.parts[part] for part in _SPOKEN if part in one.parts}
        for part, tensor in given.items():
            check_tensor(name, f"the {_SPOKEN[part]} of {where}", tensor, shape)
        if "magnitude" in given:
            vectors[VectorKind.MAGNITUDE] = given["magnitude"]
        if "bias" in given:
            if not module.has_bias:
                raise AdapterError(name, f"{where} has a trained bias, but none in the base")
            bias: Tensor = given["bias"]
            if "lora_bias" in given:
                both = given["bias"], given["lora_bias"]
                bias = FoldedTensor(shape, both, lambda own, lora: own + _times(scale, lora))
            vectors[VectorKind.BIAS] = of_every_head(module, given["bias"]) if is_norm else bias
        elif "lora_bias" in given:
            vectors[VectorKind.SHIFT] = FoldedTensor(shape, (given["lora_bias"],), partial(_times, scale))
        return vectors

    def _pair(self, one: Located, targeting: Targeting) -> ModuleWeights:
        name, module, parts, where = self.name, one.module, one.parts, f"module {one.stored_name!r}"
        is_embedding = module.kind is ModuleKind.EMBEDDING
        if ("lora_embedding_A" in parts) is not is_embedding:
            kind = ModuleKind.LINEAR if is_embedding else ModuleKind.EMBEDDING
            raise AdapterError(name, f"{where} has {kind.value} weights, but is a {module.kind.value} module")
        a, b = (parts[f"lora_embedding_{side}" if is_embedding else f"lora_{side}"] for side in "AB")
        rank = targeting.rank(one.parameter or one.stored_name)
        stored_rank = a.shape[0] if len(a.shape) == 2 and a.shape[1] == module.in_features else rank
        if stored_rank != rank:
            raise AdapterError(
                name, f"{where} has rank {stored_rank} in the weight file, but rank {rank} by r and rank_pattern"
            )
        check_tensor(name, f"lora_A of {where}", a, (rank, module.in_features))
        check_tensor(name, f"lora_B of {where}", b, (module.out_features, rank))
        return ModuleWeights(module, rank, targeting.scale(one.parameter or one.stored_name), a, b)


_ALONE = ("bias", "saved", "tokens")  # parts that a module may have without being a target

_SPOKEN = {"magnitude": "lora_magnitude_vector", "lora_bias": "bias of lora_B", "bias": "bias"}


def parse_plain(name: str, config: Mapping[str, Any]) -> PlainSettings:
    """Check a configuration of LoRA; settings that are not supported are refused by name.

    ``AdapterError`` if the configuration is malformed or unsupported; names the adapter ``name``.
    """
    return PlainSettings(name, parse_lora(name, config))


def _times(scale: float, vector: NDArray[np.float32]) -> NDArray[np.float32]:
    return vector * np.float32(scale)


def _check_copy(name: str, one: Located, copy: StoredTensor) -> None:
    # It was frozen in training, so it is the base's own matrix unless its size differs.
    module = one.module
    expected = (module.out_features, module.in_features)
    if module.kind is ModuleKind.EMBEDDING:
        expected = (module.in_features, module.out_features)
    if copy.shape != expected:
        raise AdapterError(
            name,
            f"it was trained beside a {module.name!r} of shape {list(copy.shape)}, the base's has {list(expected)}"
            " (a resized vocabulary)",
        )


def locate_modules(
    name: str, settings: LoraSettings, modules: Mapping[str, Parts], base: BaseShape, extra: Sequence[str] = ()
) -> tuple[Targeting, list[Located], list[str]]:
    """Return ranks and scales, the base's modules that the file has tensors of, and the targets that it has none of.

    Modules are in the base's order. ``modules`` are the tensors as in the file; of a module that is no target there may
    be the parts ``extra`` alone. ``AdapterError`` if a module does not exist in the base, or tensors belong to no
    target.
    """
    wrapper = _find_wrapper(modules, base)
    experts = [replace(m, name=_as_stored(m.name, wrapper)) for m in base.modules if m.kind is ModuleKind.EXPERTS]
    found = _find_modules(name, name_parameters(name, settings, modules, experts), wrapper, base)
    targeting = Targeting(name, settings, [_as_stored(m, wrapper) for m in base.all_linear])
    located, missing = [], []
    has_parameters = not settings.target_parameters
    for module in base.modules:
        stored_name = _as_stored(module.name, wrapper)
        parts = found.get(module.name, {})
        parameter = parameter_of(settings, module, stored_name)
        has_parameters = has_parameters or parameter is not None
        is_named = module.kind is not ModuleKind.NUMBERS and targeting.is_target(stored_name)
        is_target = parameter is not None or is_named
        if parameter is None and module.kind in (ModuleKind.EXPERTS, ModuleKind.ROUTER):
            # PEFT makes targets of their former names into parameters, and leaves those without tensors as they are.
            is_target = bool(parts) and (is_target or module.kind is ModuleKind.EXPERTS)
        if parts.keys() - set(extra):
            if not is_target:
                raise AdapterError(
                    name, f"module {stored_name!r} has weights, but is no target by target_modules and its companions"
                )
        elif is_target:
            missing.append(stored_name)
        if parts:
            located.append(Located(module, stored_name, parts, is_target, parameter))
    if not has_parameters:
        raise AdapterError(
            name, f"target_parameters names {shown(settings.target_parameters[0])}, which the base has not"
        )
    return targeting, located, missing


def check_missing(name: str, missing: Sequence[str]) -> None:
    """Raise ``WeightsMissing`` if targets have no tensors: last, when all that is there was checked."""
    if missing:
        raise WeightsMissing(
            name,
            f"target_modules include {missing[0]!r}, but its weight file holds no weights for it"
            + (f" and {len(missing) - 1} more" if len(missing) > 1 else ""),
        )


def _find_wrapper(modules: Mapping[str, Parts], base: BaseShape) -> tuple[str, str]:
    ours = {m.name.rpartition(".")[0] if m.kind is ModuleKind.EXPERTS else m.name for m in base.modules}
    for wrapper in _WRAPPERS:
        if any(module.startswith(wrapper[0]) and container_of(_as_ours(module, wrapper)) in ours for module in modules):
            return wrapper
    return ("", "")


def _as_ours(stored_name: str, wrapper: tuple[str, str]) -> str:
    stored, ours = wrapper
    return ours + stored_name.removeprefix(stored) if stored_name.startswith(stored) else stored_name


def _as_stored(our_name: str, wrapper: tuple[str, str]) -> str:
    stored, ours = wrapper
    return stored + our_name.removeprefix(ours) if our_name.startswith(ours) else our_name


def _find_modules(
    name: str, modules: Mapping[str, Parts], wrapper: tuple[str, str], base: BaseShape
) -> dict[str, Parts]:
    ours = {m.name for m in base.modules}
    unsupported = dict(base.unsupported)
    found: dict[str, Parts] = {}
    unknown: list[str] = []
    for stored_name, parts in modules.items():
        module = _as_ours(stored_name, wrapper)
        container = container_of(module)
        names = (module, container, container.replace(*MOVED))
        place = next((name for name in names if name in unsupported), None)
        if place is not None:
            raise AdapterError(name, f"module {shown(stored_name)} cannot be adapted: {unsupported[place]}")
        if module not in ours:
            unknown.append(stored_name)
        elif module in found:
            raise AdapterError(name, f"the weights of module {module!r} are stored twice, under different names")
        else:
            found[module] = parts
    if not found:
        raise AdapterError(
            name, f"none of the modules it adapts exists in base {base.name!r} (such as {shown(unknown[0])})"
        )
    if unknown:
        more = f" (and {len(unknown) - 1} more)" if len(unknown) > 1 else ""
        raise AdapterError(name, f"module {shown(unknown[0])}{more} does not exist in base {base.name!r}")
    return found
