"""Plain LoRA, ``x W^T + scale * (x A^T) B^T``: the tensors of a weight file, matched with the base's modules.

Every tensor is understood, or the adapter is refused. PEFT warns about unknown keys and missing weights, and continues
with the base's output. A server's user never sees the warning, so here each such case is an error that names the
tensor.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from manylora.core.adapters.folder import shown
from manylora.core.adapters.lora.settings import LoraSettings, parse_lora
from manylora.core.adapters.lora.targeting import Targeting
from manylora.core.adapters.shape import BaseShape, ModuleKind, TargetModule
from manylora.core.adapters.tensors import FLOAT_DTYPES, ModuleWeights, StoredModule, StoredTensor
from manylora.core.errors import AdapterError

__all__ = ["PlainSettings", "parse_plain"]

_KEY = re.compile(
    r"base_model\.model\.(?P<module>.+?)\."
    # Some trainers leave the adapter's name in: ``lora_A.default.weight``.
    r"(?:lora_(?P<linear>[AB])(?:\.[^.]+)?\.weight|lora_embedding_(?P<embedding>[AB])(?:\.[^.]+)?)"
)
# With LoRA on the embedding or the head PEFT also stores the frozen matrix of the base.
_BASE_COPY = re.compile(r"base_model\.model\.(?P<module>.+)\.base_layer\.weight")

_FOREIGN_KEYS = (
    ("lora_magnitude_vector", "a DoRA magnitude vector"),
    ("modules_to_save", "a fully trained module (modules_to_save)"),
    ("original_module", "a fully trained module (modules_to_save)"),
    ("trainable_tokens", "trained token embeddings"),
    (".bias", "a trained bias"),
    ("embed_tokens.weight", "a full embedding matrix (a resized or trained vocabulary)"),
    ("lm_head.weight", "a full output head (a resized or trained vocabulary)"),
)

_WRAPPERS = (("model.language_model.", "model."), ("language_model.", ""))
"""Prefixes of module names of a language model trained inside a multi-modal one, and the base's prefixes."""

MAX_TENSORS = 200_000


@dataclass(slots=True)
class _LoraPair:
    """The two tensors stored for one module, of the kind that the keys name."""

    kind: ModuleKind  # linear or embedding
    a: StoredTensor | None = None  # ``[rank, in_features]``, or ``None`` before it is found
    b: StoredTensor | None = None  # ``[out_features, rank]``, likewise

    def both(self) -> tuple[StoredTensor, StoredTensor]:
        """Return A and B of a complete pair, as returned by ``_pair_tensors``."""
        assert self.a is not None and self.b is not None, "the pair is complete"
        return self.a, self.b


@dataclass(frozen=True, slots=True)
class PlainSettings:
    """The settings and the name of one adapter; an ``AdapterSettings``."""

    name: str
    settings: LoraSettings

    @property
    def base_model(self) -> str | None:
        """The base that the adapter was trained on."""
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
        for module, pair in sorted(_pair_tensors(self.name, tensors).items()):
            a, b = pair.both()
            rank, num_elements = a.shape[0] if a.shape else 0, math.prod(a.shape) + math.prod(b.shape)
            scale = targeting.scale(module)
            modules.append(StoredModule(name=module, rank=rank, scale=scale, dtype=a.dtype, num_elements=num_elements))
        return tuple(modules)

    def match(self, tensors: Mapping[str, StoredTensor], base: BaseShape) -> tuple[ModuleWeights, ...]:
        """Return the pairs of the base's modules, in the base's order; at least one.

        Raises:
            AdapterError: A tensor would not be applied, a tensor that the settings name is missing, or sizes disagree.
        """
        name, pairs = self.name, _pair_tensors(self.name, tensors)
        wrapper = _find_wrapper(pairs, base)
        by_module = _find_modules(name, pairs, wrapper, base)
        targeting = Targeting(name, self.settings, [_as_stored(m, wrapper) for m in base.all_linear])
        weights, missing = [], []
        for module in base.modules:
            stored_name = _as_stored(module.name, wrapper)
            if module.name in by_module:
                if not targeting.is_target(stored_name):
                    raise AdapterError(
                        name,
                        f"module {stored_name!r} has weights, but is no target by target_modules and its companions",
                    )
                weights.append(_check_pair(name, module, by_module[module.name], targeting, stored_name))
                copy = tensors.get(f"base_model.model.{stored_name}.base_layer.weight")
                if copy is not None:
                    _check_copy(name, module, copy)
            elif targeting.is_target(stored_name):
                missing.append(stored_name)
        if missing:
            raise AdapterError(
                name,
                f"target_modules include {missing[0]!r}, but its weight file holds no weights for it"
                + (f" and {len(missing) - 1} more" if len(missing) > 1 else ""),
            )
        return tuple(weights)


def parse_plain(name: str, config: Mapping[str, Any]) -> PlainSettings:
    """Check a configuration of plain LoRA; settings beyond it are refused by name.

    Raises:
        AdapterError: The configuration is malformed or unsupported; names the adapter ``name``.
    """
    return PlainSettings(name, parse_lora(name, config))


def _pair_tensors(name: str, tensors: Mapping[str, StoredTensor]) -> dict[str, _LoraPair]:
    """Return a file's tensors as pairs, by the module names of the file.

    Raises:
        AdapterError: A key is unknown, a pair is incomplete, or there are none.
    """
    if len(tensors) > MAX_TENSORS:
        raise AdapterError(name, f"its weight file holds {len(tensors)} tensors, at most {MAX_TENSORS} are accepted")
    pairs: dict[str, _LoraPair] = {}
    copies: list[str] = []
    for key in sorted(tensors):
        match = _KEY.fullmatch(key)
        if match is None:
            copy = _BASE_COPY.fullmatch(key)
            if copy is None:
                _refuse_key(name, key)
            copies.append(copy["module"])
            continue
        kind = ModuleKind.LINEAR if match["linear"] else ModuleKind.EMBEDDING
        pair = pairs.setdefault(match["module"], _LoraPair(kind))
        side = "a" if (match["linear"] or match["embedding"]) == "A" else "b"
        if pair.kind is not kind or getattr(pair, side) is not None:
            raise AdapterError(name, f"tensor {shown(key)}: the weights of this module are stored twice")
        setattr(pair, side, tensors[key])
    if not pairs:
        raise AdapterError(name, "its weight file holds no LoRA weights")
    for module, pair in pairs.items():
        if pair.a is None or pair.b is None:
            present, absent = ("lora_B", "lora_A") if pair.a is None else ("lora_A", "lora_B")
            raise AdapterError(name, f"module {shown(module)} has {present} but no {absent}")
    for module in copies:
        if module not in pairs:
            raise AdapterError(name, f"module {shown(module)} has a full weight but no LoRA weights")
    return pairs


def _refuse_key(name: str, key: str) -> NoReturn:
    for part, meaning in _FOREIGN_KEYS:
        if part in key:
            raise AdapterError(name, f"tensor {shown(key)} is {meaning}, which is not supported")
    raise AdapterError(name, f"tensor {shown(key)} is not understood")


def _find_wrapper(pairs: Mapping[str, _LoraPair], base: BaseShape) -> tuple[str, str]:
    ours = {m.name for m in base.modules}
    for wrapper in _WRAPPERS:
        if any(module.startswith(wrapper[0]) and _as_ours(module, wrapper) in ours for module in pairs):
            return wrapper
    return ("", "")


def _as_ours(stored_name: str, wrapper: tuple[str, str]) -> str:
    stored, ours = wrapper
    return ours + stored_name.removeprefix(stored) if stored_name.startswith(stored) else stored_name


def _as_stored(our_name: str, wrapper: tuple[str, str]) -> str:
    stored, ours = wrapper
    return stored + our_name.removeprefix(ours) if our_name.startswith(ours) else our_name


def _find_modules(
    name: str, pairs: Mapping[str, _LoraPair], wrapper: tuple[str, str], base: BaseShape
) -> dict[str, _LoraPair]:
    ours = {m.name for m in base.modules}
    unsupported = dict(base.unsupported)
    found: dict[str, _LoraPair] = {}
    unknown: list[str] = []
    for stored_name, pair in pairs.items():
        module = _as_ours(stored_name, wrapper)
        if module in unsupported:
            raise AdapterError(name, f"module {shown(stored_name)} cannot be adapted: {unsupported[module]}")
        if module not in ours:
            unknown.append(stored_name)
        elif module in found:
            raise AdapterError(name, f"the weights of module {module!r} are stored twice, under different names")
        else:
            found[module] = pair
    if not found:
        raise AdapterError(
            name, f"none of the modules it adapts exists in base {base.name!r} (such as {shown(unknown[0])})"
        )
    if unknown:
        more = f" (and {len(unknown) - 1} more)" if len(unknown) > 1 else ""
        raise AdapterError(name, f"module {shown(unknown[0])}{more} does not exist in base {base.name!r}")
    return found


def _check_pair(
    name: str, module: TargetModule, pair: _LoraPair, targeting: Targeting, stored_name: str
) -> ModuleWeights:
    a, b = pair.both()
    where = f"module {stored_name!r}"
    if pair.kind is not module.kind:
        raise AdapterError(name, f"{where} has {pair.kind.value} weights, but is a {module.kind.value} module")
    for side, tensor in (("A", a), ("B", b)):
        if tensor.dtype not in FLOAT_DTYPES:
            raise AdapterError(
                name, f"lora_{side} of {where} holds {tensor.dtype}, expected one of {', '.join(FLOAT_DTYPES)}"
            )
    rank = targeting.rank(stored_name)
    stored_rank = a.shape[0] if len(a.shape) == 2 and a.shape[1] == module.in_features else rank
    if stored_rank != rank:
        raise AdapterError(
            name, f"{where} has rank {stored_rank} in the weight file, but rank {rank} by r and rank_pattern"
        )
    for side, tensor, expected in (("A", a, (rank, module.in_features)), ("B", b, (module.out_features, rank))):
        if tensor.shape != expected:
            hint = " (it is transposed)" if tensor.shape == expected[::-1] else ""
            raise AdapterError(
                name, f"lora_{side} of {where} has shape {list(tensor.shape)}, expected {list(expected)}{hint}"
            )
    return ModuleWeights(module, rank, targeting.scale(stored_name), a, b)


def _check_copy(name: str, module: TargetModule, copy: StoredTensor) -> None:
    # It was frozen in training, so it is the base's own matrix unless its size differs.
    expected = (module.out_features, module.in_features)
    if module.kind is ModuleKind.EMBEDDING:
        expected = (module.in_features, module.out_features)
    if copy.shape != expected:
        raise AdapterError(
            name,
            f"it was trained beside a {module.name!r} of shape {list(copy.shape)}, the base's has {list(expected)}"
            " (a resized vocabulary)",
        )
