"""Parts of the base that an adapter was trained to take the place of: rows of single tokens, and whole weights.

::

    trained tokens   embedding  A picks, B holds their rows         head  A holds their rows, B picks
    a whole weight   embedding  A holds it, B is the identity       linear  A is the identity, B holds it
    a whole norm     a factor of its output, and a shift if it has a bias

The first two are products of low rank, in other words: the number of tokens, and the width of the model. So pages and
kernels know nothing of them. The reader has no base to subtract or divide by; the engine does that (``Replaced``,
``VectorKind``).

Source: PEFT 0.21, ``tuners/trainable_tokens/layer.py``, ``utils.other.ModulesToSaveWrapper``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from manylora.core.adapters.lora.settings import LoraSettings
from manylora.core.adapters.shape import BaseShape, ModuleKind, TargetModule
from manylora.core.adapters.tensors import (
    FoldedTensor,
    Located,
    ModuleWeights,
    Replaced,
    StoredTensor,
    Tensor,
    VectorKind,
    check_tensor,
    only_vectors,
)
from manylora.core.errors import AdapterError, WeightsMissing

__all__ = ["check_replaced", "of_every_head", "token_ids", "trained_tokens", "trained_weight"]


def trained_tokens(name: str, one: Located, settings: LoraSettings) -> ModuleWeights:
    """Return the pair that puts trained tokens in the place of the base's: its rank is their number.

    ``AdapterError`` if the settings do not name the module, or the tokens do not go with it.
    """
    module, where = one.module, f"module {one.stored_name!r}"
    ids = token_ids(one, settings)
    if ids is None:
        raise AdapterError(name, f"{where} has trained tokens, but is not named by trainable_token_indices")
    vocab, hidden = module.in_features, module.out_features
    if module.kind is not ModuleKind.EMBEDDING:
        vocab, hidden = hidden, vocab
    if max(ids) >= vocab:
        raise AdapterError(name, f"trainable_token_indices has {max(ids)}, the base has {vocab} tokens")
    rows = check_tensor(name, f"trainable_tokens_delta of {where}", one.parts["tokens"], (len(ids), hidden))
    return _rows_in_place(module, ids, rows)


def token_ids(one: Located, settings: LoraSettings) -> tuple[int, ...] | None:
    """Return the trained tokens of a module, ``None`` if the settings do not name it."""
    return next((ids for at, ids in settings.tokens if _is_named(at, one)), None)


def trained_weight(name: str, one: Located, settings: LoraSettings) -> ModuleWeights:
    """Return the pair of a module that was trained whole, or the gain of a norm.

    ``AdapterError`` if the settings do not name the module, or its weight has another shape than the base's.
    """
    module, where = one.module, f"module {one.stored_name!r}"
    if not one.stored_name.endswith(settings.saved):
        raise AdapterError(name, f"{where} has a whole weight, but is not named by modules_to_save")
    weight = one.parts["saved"]
    if module.kind is ModuleKind.NUMBERS:
        check_tensor(name, f"the weight of {where}", weight, (module.in_features,))
        if module.has_bias and "bias" not in one.parts:
            raise AdapterError(name, f"{where} has a whole weight, but not the bias that the base's has")
        return only_vectors(module, {VectorKind.GAIN: of_every_head(module, weight)})
    if module.kind is ModuleKind.EMBEDDING:
        check_tensor(name, f"the weight of {where}", weight, (module.in_features, module.out_features))
        a = FoldedTensor((module.out_features, module.in_features), (weight,), np.transpose)
        b = _identity(module.out_features)
        return ModuleWeights(module, module.out_features, 1.0, a, b, replaces=Replaced.WEIGHT)
    shape = (module.out_features, module.in_features)
    check_tensor(name, f"the weight of {where}", weight, shape[::-1] if module.is_transposed else shape)
    new: Tensor = FoldedTensor(shape, (weight,), np.transpose) if module.is_transposed else weight
    return ModuleWeights(module, module.in_features, 1.0, _identity(module.in_features), new, replaces=Replaced.WEIGHT)


def check_replaced(
    name: str, settings: LoraSettings, located: Sequence[Located], weights: Sequence[ModuleWeights], base: BaseShape
) -> list[ModuleWeights]:
    """Return the weights, in the base's order, with the tokens of a tied embedding in the head too.

    ``WeightsMissing`` if the settings name what the file does not hold; ``AdapterError`` if the head has other weights.
    """
    for saved in settings.saved:
        whole = {one.module.name for one in located if "saved" in one.parts and one.stored_name.endswith(saved)}
        if not whole or any(module.name.endswith(saved) and module.name not in whole for module in base.modules):
            raise WeightsMissing(name, f"modules_to_save names {saved!r}, of which its weight file holds no weight")
    trained = [w for w in weights if w.replaces is Replaced.ROWS]
    if len(trained) != len(settings.tokens):
        reason = "trainable_token_indices names a module whose tokens are not in its weight file"
        raise WeightsMissing(name, reason)
    head = next((module for module in base.modules if module.name == base.tied_head), None)
    if not trained or head is None:
        return list(weights)
    if len(trained) > 1 or any(w.module is head for w in weights):
        raise AdapterError(name, f"it trains tokens and changes {head.name!r}, which is tied to the embedding")
    assert isinstance(trained[0].b, FoldedTensor), "the tokens are those of the embedding"
    tied = _rows_in_place(head, settings.tokens[0][1], trained[0].b.sources[0])
    places = {module.name: place for place, module in enumerate(base.modules)}
    return sorted([*weights, tied], key=lambda w: places[w.module.name])


def of_every_head(module: TargetModule, vector: StoredTensor) -> Tensor:
    """Return the weight or bias of a norm as a number per output: a norm of each head has one weight for all."""
    if module.in_features == module.out_features:
        return vector
    heads = module.out_features // module.in_features
    return FoldedTensor((module.out_features,), (vector,), partial(np.tile, reps=heads))


def _is_named(at: str | None, one: Located) -> bool:
    if at is None:
        return one.module.kind is ModuleKind.EMBEDDING
    return one.stored_name == at or one.stored_name.endswith(f".{at}")


def _rows_in_place(module: TargetModule, ids: Sequence[int], rows: StoredTensor) -> ModuleWeights:
    """Return the pair of a module some of whose rows are new."""
    if module.kind is ModuleKind.EMBEDDING:
        a = FoldedTensor((len(ids), module.in_features), (), partial(_places, ids, module.in_features))
        b = FoldedTensor((module.out_features, len(ids)), (rows,), np.transpose)
        return ModuleWeights(module, len(ids), 1.0, a, b, replaces=Replaced.ROWS)
    places = FoldedTensor((module.out_features, len(ids)), (), lambda: _places(ids, module.out_features).T)
    return ModuleWeights(module, len(ids), 1.0, rows, places, replaces=Replaced.ROWS)


def _places(ids: Sequence[int], vocab: int) -> NDArray[np.float32]:
    """Return a matrix ``[ids, vocab]`` with a one in each row."""
    places = np.zeros((len(ids), vocab), np.float32)
    places[np.arange(len(ids)), ids] = 1
    return places


def _identity(size: int) -> FoldedTensor:
    return FoldedTensor((size, size), (), lambda: np.eye(size, dtype=np.float32))
