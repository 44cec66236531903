"""LoRA of a mixture's experts, whose linears are one parameter: its tensors in a file, and each expert's pair of them.

PEFT wraps the module that holds the parameters once for each that is a target, in the module's own order, the first one
innermost. The key of a tensor tells how deep it lies, and the settings tell what lies there::

    experts.base_layer.lora_A.weight    [experts * r, hidden]      of gate_up_proj, if down_proj is a target as well
    experts.lora_A.weight               [experts * r, inner]       rows of expert 0, then of expert 1 ...
    experts.lora_B.weight               [hidden, r * experts]      the first column of each expert, then the second ...

Files from before transformers 5 hold a pair for each linear of each expert. PEFT stacks them, and makes one pair of the
two linears that are one weight now::

    experts.3.w1, experts.3.w3    ->    A = | A1 |     B = | B1    |     of expert 3, of rank 2 r
                                            | A3 |         |    B3 |

In memory the columns of B are in the order of the rows of A, so an expert is a stretch of ranks.

Source: PEFT 0.21, ``tuners/lora/layer.py`` (``ParamWrapper``), ``tuners_utils.BaseTuner._inject_parameters``,
``utils/transformers_weight_conversion.py``.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from manylora.core.adapters.folder import shown
from manylora.core.adapters.lora.settings import LoraSettings
from manylora.core.adapters.lora.targeting import Targeting
from manylora.core.adapters.shape import ModuleKind, TargetModule
from manylora.core.adapters.tensors import FoldedTensor, Located, ModuleWeights, Parts, StoredTensor, check_tensor
from manylora.core.errors import AdapterError, WeightsMissing

__all__ = ["MOVED", "container_of", "expert_weights", "guess_parameter", "name_parameters", "parameter_of"]

_LINEARS = {"gate_up_proj": (("w1", "w3"), ("gate_proj", "up_proj")), "down_proj": (("w2",), ("down_proj",))}
"""The linears that became one parameter, in order, by its name: in Mixtral's names, and in those of all others."""

_PARAMETERS = {one: name for name, families in _LINEARS.items() for linears in families for one in linears}

_ONE = re.compile(rf"(?P<container>.+)\.(?P<expert>0|[1-9]\d{{0,5}})\.(?P<linear>{'|'.join(_PARAMETERS)})")
"""The name of a linear of one expert."""

MOVED = (".block_sparse_moe.", ".mlp.")
"""Mixtral's name of the module around the experts before transformers 5, and since."""

_WRAPPED = ".base_layer"


def parameter_of(settings: LoraSettings, module: TargetModule, stored_name: str) -> str | None:
    """Return the name of a module's weight if ``target_parameters`` names it; ``None`` if not."""
    if module.kind in (ModuleKind.EMBEDDING, ModuleKind.NUMBERS):
        return None  # its weight is transposed, or a vector
    name = stored_name if module.kind is ModuleKind.EXPERTS else f"{stored_name}.weight"
    return name if any(name == at or name.endswith(f".{at}") for at in settings.target_parameters) else None


def container_of(stored_name: str) -> str:
    """Return the name of the module of experts that a name in a file is of; another module's is unchanged."""
    return _place(stored_name)[0]


def _place(stored_name: str) -> tuple[str, int]:
    """Return the name of a module without its wrappers, or of the module around an expert, and the wrappers."""
    one = _ONE.fullmatch(stored_name)
    path = stored_name if one is None else one["container"]
    container = path
    while container.endswith(_WRAPPED):
        container = container.removesuffix(_WRAPPED)
    return container, (len(path) - len(container)) // len(_WRAPPED)


def guess_parameter(settings: LoraSettings, stored_name: str) -> str:
    """Return the name of the parameter that a module's tensors are of, as far as it shows without a base."""
    container, depth = _place(stored_name)
    if not container.endswith("experts"):
        return stored_name
    paths = [f"{container}.{leaf}" for leaf in _LINEARS]
    targets = [path for path in paths if any(path.endswith(f".{at}") for at in settings.target_parameters)]
    return targets[-1 - depth] if depth < len(targets) else stored_name


def name_parameters(
    name: str, settings: LoraSettings, modules: Mapping[str, Parts], experts: Sequence[TargetModule]
) -> dict[str, Parts]:
    """Return tensors by module, with those of ``experts``, the base's in the file's names, by parameter.

    The pairs of single experts become parts of their parameter, by the names of their linears. ``AdapterError`` if
    tensors of experts belong to no target, are no pair, or are stored twice.
    """
    if not experts:
        return dict(modules)
    parameters: dict[str, list[TargetModule]] = defaultdict(list)
    for module in experts:
        parameters[module.name.rpartition(".")[0]].append(module)
    is_moved = not any(MOVED[0] in container for container in parameters)
    found: dict[str, Parts] = {}
    for stored_name, parts in modules.items():
        name_today = stored_name.replace(*MOVED) if is_moved else stored_name
        container, depth = _place(name_today)
        one = _ONE.fullmatch(stored_name)
        if container not in parameters:
            key, own = name_today, parts
        elif parts.keys() != {"lora_A", "lora_B"}:
            given = ", ".join(sorted(parts))
            raise AdapterError(
                name, f"module {shown(stored_name)} is of experts and has {given}, not lora_A and lora_B"
            )
        elif one is not None:
            key = f"{container}.{_PARAMETERS[one['linear']]}"
            own = {f"{stored_name}.{part}": tensor for part, tensor in parts.items()}
        else:
            targets = [module for module in parameters[container] if parameter_of(settings, module, module.name)]
            if depth >= len(targets):
                raise AdapterError(
                    name,
                    f"module {shown(stored_name)} has weights, but target_parameters name {len(targets)} of its own",
                )
            key, own = targets[-1 - depth].name, parts
        whole = found.setdefault(key, {})
        if whole and (one is None or "lora_A" in whole or whole.keys() & own.keys()):
            raise AdapterError(name, f"module {shown(stored_name)}: the weights of this module are stored twice")
        whole |= own
    return found


def expert_weights(name: str, one: Located, settings: LoraSettings, targeting: Targeting) -> ModuleWeights:
    """Return the pairs of the experts of a parameter, checked, one behind the other.

    ``WeightsMissing`` if some of the experts have none; ``AdapterError`` if a tensor has another type or shape, or
    would be applied otherwise than by PEFT.
    """
    if "lora_A" not in one.parts:
        return _stacked(name, one, settings, targeting)
    module, where = one.module, f"parameter {one.stored_name!r}"
    if one.parameter is None:
        raise AdapterError(name, f"{where} has weights, but is not named by target_parameters")
    rank, num = targeting.rank(one.parameter), module.num_experts
    a = check_tensor(name, f"lora_A of {where}", one.parts["lora_A"], (num * rank, module.in_features))
    b = check_tensor(name, f"lora_B of {where}", one.parts["lora_B"], (module.out_features, num * rank))
    b_in_order = FoldedTensor(b.shape, (b,), partial(_by_expert, num), b.dtype)
    return ModuleWeights(module, num * rank, targeting.scale(one.parameter), a, b_in_order)


def _by_expert(num_experts: int, b: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the columns of B in the order of the rows of A."""
    return b.reshape(len(b), -1, num_experts).swapaxes(1, 2).reshape(b.shape)


def _stacked(name: str, one: Located, settings: LoraSettings, targeting: Targeting) -> ModuleWeights:
    """Return the pairs of a parameter's experts, of which the file has each linear by itself."""
    module = one.module
    where = f"parameter {one.stored_name!r}"

    def fail(reason: str) -> NoReturn:
        raise AdapterError(name, f"{where}: {reason}")

    if settings.use_rslora:
        fail("use_rslora with weights of single experts, whose scale PEFT changes as it stacks them")
    a: list[StoredTensor] = []
    b: list[StoredTensor] = []
    settled = Counter[tuple[int, float]]()
    linears = list(_linears(name, one))
    sizes = module.out_features // (len(linears) // module.num_experts)
    is_uniform = not settings.rank_pattern and not settings.alpha_pattern
    for linear in linears:
        if not targeting.is_target(linear):
            fail(f"{linear!r} has weights, but is no target by target_modules and its companions")
        if not settled or not is_uniform:
            rank, scale = targeting.rank(linear), targeting.scale(linear)
        settled[rank, scale] += 1
        half = one.parts[f"{linear}.lora_A"]
        a.append(check_tensor(name, f"lora_A of {linear!r}", half, (rank, module.in_features)))
        half = one.parts[f"{linear}.lora_B"]
        b.append(check_tensor(name, f"lora_B of {linear!r}", half, (sizes, rank)))
    if len(settled) > 1:
        fail(f"its experts have {len(settled)} pairs of rank and scale, expected one")
    total, types = rank * len(linears), {half.dtype for half in (*a, *b)}
    dtype = types.pop() if len(types) == 1 else "F32"
    folded_a = FoldedTensor((total, module.in_features), tuple(a), lambda *parts: np.concatenate(parts), dtype)
    folded_b = FoldedTensor((module.out_features, total), tuple(b), partial(_diagonal, module.out_features), dtype)
    return ModuleWeights(module, total, scale, folded_a, folded_b)


def _linears(name: str, one: Located) -> Iterator[str]:
    """Yield the names of a parameter's linears in the file, expert by expert; all are there, with both halves."""
    places: dict[tuple[int, str], str] = {}
    for part in one.parts:
        linear = part.rpartition(".")[0]
        match = _ONE.fullmatch(linear)
        assert match is not None, "parts of single experts are named by their linears"
        if places.setdefault((int(match["expert"]), match["linear"]), linear) != linear:
            raise AdapterError(name, f"the weights of {linear!r} are stored twice, under different names")
    kinds = {linear for _, linear in places}
    families = _LINEARS[one.module.name.rpartition(".")[2]]
    family = max(families, key=lambda linears: len(kinds & set(linears)))
    for expert in range(one.module.num_experts):
        for linear in family:
            stored = places.pop((expert, linear), None)
            if stored is None:
                raise WeightsMissing(
                    name, f"parameter {one.stored_name!r}: its weight file holds no {linear} of expert {expert}"
                )
            yield stored
    if places:
        extra = next(iter(places.values()))
        raise AdapterError(name, f"module {shown(extra)} does not exist in the base")


def _diagonal(num_out: int, *parts: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return B of all experts: of each, the halves of its linears on a diagonal."""
    rows, rank = parts[0].shape
    whole = np.zeros((num_out, rank * len(parts)), np.float32)
    for number, part in enumerate(parts):
        row = number * rows % num_out
        whole[row : row + rows, number * rank : (number + 1) * rank] = part
    return whole
