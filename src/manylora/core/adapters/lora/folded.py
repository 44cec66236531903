"""Methods whose arithmetic is LoRA's in other words: A, B and vectors follow exactly from the stored tensors.

::

    AdaLoRA  scale * B diag(E) A            rank: rows that were kept     A' = A                B' = B diag(E)
    VeRA     diag(b) B diag(d) A            rank r, A and B shared        A' = diag(d) A        B' = diag(b) B
    LoHa     scale * (W1b W1a) o (W2b W2a)  rank r^2                      rows: products of pairs of rows
    LoKr     scale * kron(W1, W2)           rank of W1 times rank of W2   A' = kron(A1, A2)     B' = kron(B1, B2)
    (IA)3    output times l, or input times l of a linear by itself       a factor there, and no pair

They are folded by the reader, once, and are plain LoRA from then on. The rank in memory is the rank above: a LoHa of
rank 8 takes the pages of a LoRA of rank 64.

Source: PEFT 0.21, ``tuners/{adalora,vera,loha,lokr,ia3}/layer.py``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from manylora.core.adapters.folder import CONFIG_FILE, shown
from manylora.core.adapters.lora.plain import NamedSettings, check_missing, locate_modules
from manylora.core.adapters.lora.settings import MAX_RANK, parse_lora
from manylora.core.adapters.lora.targeting import Targeting
from manylora.core.adapters.shape import INPUT, BaseShape, ModuleKind
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
from manylora.core.errors import AdapterError

__all__ = ["FOLDED", "FoldedMethod"]

Matrix = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class _Case:
    """One module to be folded, with all that folding it depends on."""

    name: str  # the adapter, for messages
    one: Located  # the module and its tensors
    shared: Parts  # tensors of the whole adapter
    targeting: Targeting  # ranks and scales by the settings
    config: Mapping[str, Any]  # the content of ``adapter_config.json``
    base: BaseShape

    def tensor(self, part: str, *shape: int) -> StoredTensor:
        """Return a tensor of the module that must have this shape."""
        tensor = self.one.parts.get(part)
        if tensor is None:
            self.fail(f"has no {part}")
        return check_tensor(self.name, f"{part} of module {self.one.stored_name!r}", tensor, shape)

    def length(self, part: str, axis: int) -> int:
        """Return a size of a matrix, at least 1; the rest is checked by ``tensor``."""
        tensor = self.one.parts.get(part)
        if tensor is None:
            self.fail(f"has no {part}")
        if len(tensor.shape) != 2 or tensor.shape[axis] < 1:
            self.fail(f"has {part} of shape {list(tensor.shape)}, expected a matrix")
        return tensor.shape[axis]

    def fail(self, reason: str) -> NoReturn:
        """Refuse the adapter for this module."""
        raise AdapterError(self.name, f"module {self.one.stored_name!r} {reason}")


@dataclass(frozen=True, slots=True)
class FoldedMethod:
    """A kind of adapter that is folded; an ``AdapterMethod``."""

    parts: tuple[str, ...]  # names of a module's tensors, as in their keys
    shared: tuple[str, ...]  # names of tensors of the whole adapter
    as_lora: Callable[[str, dict[str, Any]], dict[str, Any]]  # returns the settings in LoRA's names
    fold: Callable[[_Case], ModuleWeights | None]  # returns the weights of a module; ``None`` if nothing is left of it

    def parse(self, name: str, config: Mapping[str, Any]) -> FoldedSettings:
        """Check the content of ``adapter_config.json``.

        ``AdapterError`` if the configuration is malformed or unsupported; names the adapter ``name``.
        """
        settings = parse_lora(name, self.as_lora(name, {**config, "peft_type": "LORA"}))
        keys = ("use_dora", "lora_bias", "trainable_token_indices", "modules_to_save", "alora_invocation_tokens")
        for key in (*keys, "target_parameters"):
            if config.get(key):
                _refuse(name, f"{key} is set, which is not supported beside {config['peft_type']}")
        if settings.bias != "none":
            _refuse(name, f"bias is {settings.bias!r}, which is not supported beside {config['peft_type']}")
        return FoldedSettings(name, settings, self, config)


@dataclass(frozen=True, slots=True)
class FoldedSettings(NamedSettings):
    """The settings of an adapter that is folded; an ``AdapterSettings``."""

    method: FoldedMethod
    config: Mapping[str, Any]

    def stored_modules(self, tensors: Mapping[str, StoredTensor]) -> tuple[StoredModule, ...]:
        """Return the modules in a weight file, with the rank of the settings."""
        modules, _ = self._gather(tensors)
        targeting = Targeting(self.name, self.settings, ())
        return tuple(
            StoredModule(
                name=module,
                rank=targeting.rank(module),
                scale=targeting.scale(module),
                dtype=parts[min(parts)].dtype,
                num_elements=sum(math.prod(tensor.shape) for tensor in parts.values()),
            )
            for module, parts in sorted(modules.items())
        )

    def match(self, tensors: Mapping[str, StoredTensor], base: BaseShape) -> tuple[ModuleWeights, ...]:
        """Return A and B of the base's modules, in the base's order; at least one.

        Raises:
            AdapterError: A tensor would not be applied, a tensor that the settings name is missing, or sizes disagree.
        """
        modules, shared = self._gather(tensors)
        targeting, located, missing = locate_modules(self.name, self.settings, modules, base)
        weights = []
        for one in located:
            case = _Case(self.name, one, shared, targeting, self.config, base)
            if one.module.kind in (ModuleKind.EMBEDDING, ModuleKind.EXPERTS, ModuleKind.ROUTER):
                case.fail(f"is of the kind {one.module.kind.value}, which {self.config['peft_type']} does not adapt")
            folded = self.method.fold(case)
            if folded is None:
                continue
            if folded.rank > MAX_RANK:
                case.fail(f"has rank {folded.rank} as LoRA, expected at most {MAX_RANK}")
            weights.append(folded)
        check_missing(self.name, missing)
        if not weights:
            raise AdapterError(self.name, "none of its modules has a rank above 0")
        return tuple(weights)

    def _gather(self, tensors: Mapping[str, StoredTensor]) -> tuple[dict[str, Parts], Parts]:
        """Return a file's tensors by module, and those of the whole adapter."""
        keys = {f"{prefix}{part}": part for part in self.method.shared for prefix in ("base_model.", PREFIX)}
        shared = {part: tensors[key] for key, part in keys.items() if key in tensors}
        forms = "|".join(rf"(?P<{part}>{part}(?:\.[^.]+)?(?:\.weight)?)" for part in self.method.parts)
        of_modules = {key: tensor for key, tensor in tensors.items() if key not in keys}
        return gather_parts(
            self.name, of_modules, re.compile(rf"base_model\.model\.(?P<module>.+?)\.(?:{forms})")
        ), shared


def _renamed(config: dict[str, Any], names: Mapping[str, str], without_effect: tuple[str, ...]) -> dict[str, Any]:
    """Return settings in LoRA's names, without those that have no effect on the arithmetic."""
    return {names.get(key, key): value for key, value in config.items() if key not in without_effect}


def _refuse(name: str, reason: str) -> NoReturn:
    raise AdapterError(name, f"{CONFIG_FILE}: {reason}")


_TRAINING = ("rank_dropout", "module_dropout", "rank_dropout_scale", "init_weights")


# --- AdaLoRA


def _adalora_settings(name: str, config: dict[str, Any]) -> dict[str, Any]:
    schedule = ("target_r", "tinit", "tfinal", "deltaT", "beta1", "beta2", "orth_reg_weight", "total_step")
    # The rank of a module is that of its tensors: ``rank_pattern`` lists the rows that were kept of ``init_r``.
    start = config.get("init_r")
    if type(start) is not int or not 1 <= start <= MAX_RANK:
        _refuse(name, f"init_r is {shown(start)}, expected an integer from 1 to {MAX_RANK}")
    return {**_renamed(config, {}, (*schedule, "init_r", "rank_pattern")), "r": start}


def _fold_adalora(case: _Case) -> ModuleWeights | None:
    module, tensor = case.one.module, case.one.parts.get("lora_E")
    if tensor is None or len(tensor.shape) != 2:
        case.fail("has no lora_E with a row for each row of lora_A")
    rank = tensor.shape[0]
    a, b = case.tensor("lora_A", rank, module.in_features), case.tensor("lora_B", module.out_features, rank)
    e = case.tensor("lora_E", rank, 1)
    if rank == 0:
        return None
    # PEFT divides by the rank at the start of training, whatever was kept, plus a hundred-thousandth, in float32.
    start, alpha = case.config["init_r"], case.config["lora_alpha"]
    scale = float(np.float32(alpha if alpha > 0 else start) / (np.float32(start) + np.float32(1e-5)))
    return ModuleWeights(module, rank, scale, a, FoldedTensor(b.shape, (b, e), lambda b, e: b * e.reshape(1, -1)))


# --- VeRA


def _vera_settings(name: str, config: dict[str, Any]) -> dict[str, Any]:
    if config.get("save_projection") is False:
        _refuse(
            name,
            "save_projection is false: its shared matrices are made anew by a generator of random numbers that differs "
            "between devices; save it with save_projection",
        )
    renamed = _renamed(
        config, {}, ("projection_prng_key", "save_projection", "vera_dropout", "d_initial", "init_weights")
    )
    return {**renamed, "lora_alpha": config.get("r")}  # no scale


def _fold_vera(case: _Case) -> ModuleWeights:
    module, rank = case.one.module, case.targeting.rank(case.one.stored_name)
    for part, axis, least in (("vera_A", 1, module.in_features), ("vera_B", 0, module.out_features)):
        shared = case.shared.get(part)
        if shared is None:
            raise AdapterError(case.name, f"its weight file holds no {part}, the matrix that its modules share")
        shape = (rank, max(least, _size(shared, 1))) if axis else (max(least, _size(shared, 0)), rank)
        check_tensor(case.name, part, shared, shape)
    d, b = case.tensor("vera_lambda_d", rank), case.tensor("vera_lambda_b", module.out_features)
    num_in, num_out = module.in_features, module.out_features
    folded_a = FoldedTensor((rank, num_in), (case.shared["vera_A"], d), lambda a, d: a[:, :num_in] * d[:, None])
    folded_b = FoldedTensor((num_out, rank), (case.shared["vera_B"], b), lambda b, own: b[:num_out] * own[:, None])
    return ModuleWeights(module, rank, 1.0, folded_a, folded_b)


def _size(tensor: StoredTensor, axis: int) -> int:
    return tensor.shape[axis] if len(tensor.shape) == 2 else 0


# --- LoHa


def _lycoris_settings(name: str, config: dict[str, Any]) -> dict[str, Any]:
    without_effect = (*_TRAINING, "use_effective_conv2d", "decompose_both", "decompose_factor")
    return _renamed(config, {"alpha": "lora_alpha"}, without_effect)


def _fold_loha(case: _Case) -> ModuleWeights:
    module, r = case.one.module, case.targeting.rank(case.one.stored_name)
    left = tuple(case.tensor(f"hada_w{number}_a", module.out_features, r) for number in (1, 2))
    right = tuple(case.tensor(f"hada_w{number}_b", r, module.in_features) for number in (1, 2))
    a = FoldedTensor((r * r, module.in_features), right, _row_products)
    b = FoldedTensor((module.out_features, r * r), left, lambda w1, w2: _row_products(w1.T, w2.T).T)
    return ModuleWeights(module, r * r, case.targeting.scale(case.one.stored_name), a, b)


def _row_products(w1: Matrix, w2: Matrix) -> Matrix:
    """Return the products of each row of one matrix with each row of the other ``[rows1 * rows2, columns]``."""
    products: Matrix = (w1[:, None, :] * w2[None, :, :]).reshape(-1, w1.shape[1])
    return products


# --- LoKr


def _fold_lokr(case: _Case) -> ModuleWeights:
    module = case.one.module
    sides = [_lokr_side(case, number) for number in (1, 2)]
    for axis, wanted in ((0, module.out_features), (1, module.in_features)):
        found = sides[0].shape[axis] * sides[1].shape[axis]
        if found != wanted:
            case.fail(f"has a Kronecker product of {found} {('rows', 'columns')[axis]}, expected {wanted}")
    ranks = [side.rank for side in sides]
    rank = ranks[0] * ranks[1]
    a_sources = tuple(source for side in sides for source in side.a_sources)
    b_sources = tuple(source for side in sides for source in side.b_sources)
    a = FoldedTensor((rank, module.in_features), a_sources, partial(_kron, [side.a for side in sides]))
    b = FoldedTensor((module.out_features, rank), b_sources, partial(_kron, [side.b for side in sides]))
    return ModuleWeights(module, rank, case.targeting.scale(case.one.stored_name), a, b)


@dataclass(frozen=True, slots=True)
class _Side:
    """One factor of a Kronecker product as a product ``b a``: a half without a source is the identity."""

    shape: tuple[int, int]
    rank: int
    a_sources: tuple[StoredTensor, ...]
    b_sources: tuple[StoredTensor, ...]

    @property
    def a(self) -> int | None:
        """Size of the identity that A is; ``None`` if A is a tensor."""
        return None if self.a_sources else self.rank

    @property
    def b(self) -> int | None:
        """Size of the identity that B is; ``None`` if B is a tensor."""
        return None if self.b_sources else self.rank


def _lokr_side(case: _Case, number: int) -> _Side:
    whole, halves = f"lokr_w{number}", (f"lokr_w{number}_a", f"lokr_w{number}_b")
    if whole in case.one.parts:
        if any(half in case.one.parts for half in halves):
            case.fail(f"has {whole} and {halves[0]} or {halves[1]}, of which one is expected")
        rows, cols = case.length(whole, 0), case.length(whole, 1)
        tensor = case.tensor(whole, rows, cols)
        return _Side((rows, cols), min(rows, cols), (tensor,) * (rows <= cols), (tensor,) * (rows > cols))
    rows, rank, cols = case.length(halves[0], 0), case.length(halves[0], 1), case.length(halves[1], 1)
    return _Side((rows, cols), rank, (case.tensor(halves[1], rank, cols),), (case.tensor(halves[0], rows, rank),))


def _kron(identities: list[int | None], *sources: Matrix) -> Matrix:
    """Return the Kronecker product of two matrices: the next of the sources, or an identity of a size."""
    left = iter(sources)
    first, second = (next(left) if size is None else np.eye(size, dtype=np.float32) for size in identities)
    product: Matrix = np.kron(first, second)
    return product


# --- (IA)3


def _ia3_settings(name: str, config: dict[str, Any]) -> dict[str, Any]:
    return {**_renamed(config, {}, ("feedforward_modules", "init_ia3_weights")), "r": 1, "lora_alpha": 1}


def _fold_ia3(case: _Case) -> ModuleWeights:
    # PEFT stores a factor of inputs, of ``feedforward_modules``, as a row, and a factor of outputs as a column.
    module, tensor = case.one.module, case.one.parts["ia3_l"]
    if tensor.shape == (module.out_features, 1):
        factor = FoldedTensor((module.out_features,), (case.tensor("ia3_l", module.out_features, 1),), np.ravel)
        vectors: dict[VectorKind, Tensor] = {VectorKind.FACTOR: factor}
        return only_vectors(module, {**vectors, VectorKind.BIAS_FACTOR: factor} if module.has_bias else vectors)
    factor = FoldedTensor((module.in_features,), (case.tensor("ia3_l", 1, module.in_features),), np.ravel)
    place = next((one for one in case.base.modules if one.name == module.name + INPUT), None)
    if place is None:
        case.fail("scales its input, which is possible only of the last linear of each layer")
    return only_vectors(place, {VectorKind.FACTOR: factor})


FOLDED = {
    "ADALORA": FoldedMethod(("lora_A", "lora_B", "lora_E"), (), _adalora_settings, _fold_adalora),
    "VERA": FoldedMethod(("vera_lambda_d", "vera_lambda_b"), ("vera_A", "vera_B"), _vera_settings, _fold_vera),
    "LOHA": FoldedMethod(("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b"), (), _lycoris_settings, _fold_loha),
    "LOKR": FoldedMethod(
        ("lokr_w1", "lokr_w1_a", "lokr_w1_b", "lokr_w2", "lokr_w2_a", "lokr_w2_b"), (), _lycoris_settings, _fold_lokr
    ),
    "IA3": FoldedMethod(("ia3_l",), (), _ia3_settings, _fold_ia3),
}
"""The kinds, by PEFT's names of them."""
