"""One worker's share of a model that several devices serve: its heads, and its part of every inner width.

The share is a model of its own: transformers builds it from a configuration with this worker's heads, inner width and
vocabulary, so its code runs as it is. The difference to the whole model says how each weight is divided::

    whole [out, in] -> share [out/N, in]     by outputs (q, k, v, gate, up): no exchange
                       share [out, in/N]     by inputs (o, down): a partial sum, added up over the workers
    embedding, head    [vocab/N, hidden]     zeros for other workers' tokens, added up; logits are gathered

transformers' plan for the family must say the same, or the model is refused. Where there are fewer heads of keys than
workers, several hold a copy of one. LoRA is divided so that each holds 1/N of it (S-LoRA, section 5): A by inputs, B by
outputs, and ``x A^T``, which is small, is added up between the two (``lora.kernels.SharedKernel``).

Source:
    Megatron-LM (arXiv:1909.08053), section 3, for the base; S-LoRA (arXiv:2311.03285), section 5, for adapters. There A
    of the first linear is divided by ranks; by inputs it needs no rank that is a multiple of N, and one sum for both.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from manylora.core.adapters.shape import BaseShape, ModuleKind, ModuleShare, TargetModule
from manylora.core.errors import ConfigError
from manylora.execution.checkpoint.codes import Codes
from manylora.execution.collectives import Collectives
from manylora.execution.model.modules import AdaptedEmbedding, AdaptedLinear

__all__ = ["ModelShare", "WeightCut", "divide_modules", "share_config", "share_shape"]

_DIVIDED = ("num_attention_heads", "intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")
"""Sizes of a configuration that the workers divide."""

_ADAPTED = (ModuleKind.LINEAR, ModuleKind.EMBEDDING, ModuleKind.ROUTER)

Runs = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class WeightCut:
    """How one weight is divided."""

    whole: tuple[int, ...]  # its shape in the whole model
    axis: int  # the axis that is divided
    runs: Runs  # this worker's part of it, (first, one past the last); a run beyond the end is zeros there

    def of(self, name: str, weight: torch.Tensor | Codes) -> torch.Tensor | Codes:
        """Return this worker's part of a weight.

        Raises:
            ConfigError: It is stored as codes whose groups the workers cannot divide.
        """
        if isinstance(weight, torch.Tensor):
            return _take(weight, self.axis, self.runs)
        runs, group = self.runs, weight.group
        if self.axis == 1 and group < weight.codes.shape[1]:
            if weight.order is not None or any(edge % group for run in runs for edge in run):
                why = "in activation order" if weight.order is not None else f"in groups of {group}"
                raise ConfigError(f"Got {name!r} in codes {why}, which workers cannot divide by inputs {runs}")
            runs = tuple((first // group, stop // group) for first, stop in runs)
        elif self.axis == 1:
            runs = ((0, weight.scales.shape[1]),)
            group = sum(stop - first for first, stop in self.runs)
        return replace(
            weight,
            codes=_take(weight.codes, self.axis, self.runs),
            scales=_take(weight.scales, self.axis, runs),
            shifts=None if weight.shifts is None else _take(weight.shifts, self.axis, runs),
            group=group,
        )


@dataclass(frozen=True, slots=True)
class ModelShare:
    """A worker's share."""

    rank: int
    size: int  # workers
    vocab_size: int  # of the whole model
    cuts: Mapping[str, WeightCut]  # by parameter of the share

    @classmethod
    def of(cls, whole: nn.Module, share: nn.Module, rank: int, size: int) -> ModelShare:
        """Compare the shapes of a model and of its share, which was built from ``share_config``.

        Raises:
            ConfigError: transformers plans another division for the family.
        """
        configs = [cast(Any, model).config.get_text_config() for model in (whole, share)]
        ends = {id(cast(Any, whole).get_input_embeddings()), id(cast(Any, whole).get_output_embeddings())}
        modules, own = dict(whole.named_modules()), dict(share.named_parameters(remove_duplicate=False))
        cuts: dict[str, WeightCut] = {}
        for name, parameter in whole.named_parameters(remove_duplicate=False):
            shape, module = tuple(parameter.shape), modules[name.rpartition(".")[0]]
            axis = next((axis for axis, length in enumerate(shape) if length != own[name].shape[axis]), None)
            if axis is None:
                if len(shape) == 2 and "rowwise" in _planned(configs[0], name) and id(module) not in ends:
                    why = "configuration has no size that divides it"
                    raise ConfigError(f"Got {name!r}, which transformers plans to divide, but the {why}")
                continue
            if id(module) in ends:
                num_rows = own[name].shape[axis]
                cuts[name] = WeightCut(shape, axis, ((rank * num_rows, (rank + 1) * num_rows),))
                continue
            _check_plan(configs[0], name, module, len(shape), axis)
            runs, first = [], 0
            lengths = shape[axis], own[name].shape[axis]
            for width, part in zip(*map(partial(_widths, name), configs, lengths), strict=True):
                num_copies = part * size // width  # of each part, where workers share keys
                start = first + rank // num_copies * part
                runs.append((start, start + part))
                first += width
            cuts[name] = WeightCut(shape, axis, tuple(runs))
        return cls(rank, size, int(configs[0].vocab_size), cuts)

    def cut(self, name: str, weight: torch.Tensor | Codes) -> torch.Tensor | Codes:
        """Return this worker's part of a whole weight."""
        cut = self.cuts.get(name)
        return weight if cut is None else cut.of(name, weight)


def share_config(config: Any, size: int) -> Any:
    """Return the configuration of a share: heads, inner width and vocabulary of one of ``size`` workers.

    Raises:
        ConfigError: transformers has no plan for the family, its layers differ, or a size cannot be divided.
    """
    share = deepcopy(config)
    text = share.get_text_config()
    got = f"Got tensor_parallel_size = {size}"
    if not getattr(text, "base_model_tp_plan", None):
        raise ConfigError(f"{got}, but transformers has no tensor-parallel plan for models of type {text.model_type!r}")
    try:
        num_keys = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        text.head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    except RuntimeError as error:  # of transformers: there is none for the whole model
        why = f"layers of models of type {text.model_type!r} differ in their heads"
        raise ConfigError(f"{got}, but {why}, which workers cannot divide") from error
    for field in ("hidden_size", *_DIVIDED):
        if (value := getattr(text, field, None)) and value % size:
            raise ConfigError(f"{got}, but {field} = {value} is not a multiple of it")
    if num_keys % size and size % num_keys:
        raise ConfigError(f"{got}, but num_key_value_heads = {num_keys} is neither a multiple nor a divisor of it")
    text.num_key_value_heads = max(1, num_keys // size)
    for field in _DIVIDED:
        if value := getattr(text, field, None):
            setattr(text, field, value // size)
    text.vocab_size = -(-text.vocab_size // size)
    text.pad_token_id = None  # the row of an embedding that training leaves alone; it may be another worker's
    return share


def share_shape(base: BaseShape, share: ModelShare) -> BaseShape:
    """Return the shape of the whole model with this worker's part of adapters, from the shape of its share.

    Adapters of experts, and those that multiply or replace numbers of the base, are not divided: they are refused.
    """
    kept = [module for module in base.modules if module.kind in _ADAPTED]
    left = {
        module.name.rpartition(".")[0] if module.kind is ModuleKind.EXPERTS else module.name
        for module in base.modules
        if module.kind not in _ADAPTED
    }
    why = "with --tensor-parallel-size its adapters are not divided among the devices"
    return replace(
        base,
        vocab_size=share.vocab_size,
        modules=tuple(_share_module(module, base.hidden_size, share) for module in kept),
        unsupported=(*base.unsupported, *((name, why) for name in sorted(left))),
    )


def _share_module(module: TargetModule, hidden_size: int, share: ModelShare) -> TargetModule:
    cut, rank, size = share.cuts.get(f"{module.name}.weight"), share.rank, share.size

    def own(width: int) -> Runs:
        part = width // size
        return ((rank * part, (rank + 1) * part),)

    num_in, num_out, offset = module.in_features, module.out_features, module.offset
    columns: Runs
    rows: Runs
    if cut is None:  # whole on every worker, and so is its input
        columns, rows = own(num_in), ((0, num_out),)
    elif module.kind is ModuleKind.EMBEDDING or cut.axis == 1:  # a partial sum, of which each adds its columns
        columns, rows = cut.runs, own(num_out)
        offset = rows[0][0]
    else:
        columns, rows = own(num_in), cut.runs
    if cut is not None:
        num_out, num_in = cut.whole if module.kind is not ModuleKind.EMBEDDING else cut.whole[::-1]
    return replace(
        module, in_features=num_in, out_features=num_out, offset=offset, share=ModuleShare(tuple(columns), tuple(rows))
    )


def divide_modules(model: nn.Module, share: ModelShare, group: Collectives) -> None:
    """Let the modules of a share, which were adapted, exchange what makes it the whole model; in place."""
    modules = dict(model.named_modules())
    for name, cut in share.cuts.items():
        path, _, leaf = name.rpartition(".")
        module = modules[path]
        if isinstance(module, AdaptedEmbedding):
            module.divide(cut.runs[0][0], group)
        elif len(cut.whole) == 1 and leaf == "weight":
            module.register_forward_hook(partial(_renormalise, group))
        elif cut.axis and cut.axis == len(cut.whole) - 1:
            if not group.is_first:  # the bias is added once
                linear = module.base if isinstance(module, AdaptedLinear) else module
                linear.bias = None
            module.register_forward_hook(lambda module, args, out: group.sum(out.contiguous()))


def _renormalise(
    group: Collectives, norm: nn.Module, args: tuple[torch.Tensor, ...], out: torch.Tensor
) -> torch.Tensor:
    """Return the output of a root-mean-square norm over the widths of all workers, from that over this worker's."""
    eps = float(getattr(norm, "variance_epsilon", None) or norm.eps)  # type: ignore[arg-type]
    own = args[0].float().square().mean(-1, keepdim=True)
    mean = group.sum(own.clone()) / group.size
    return (out.float() * ((own + eps) / (mean + eps)).sqrt()).to(out.dtype)


def _check_plan(config: Any, name: str, module: nn.Module, num_axes: int, axis: int) -> None:
    """Refuse a division that transformers does not plan.

    Raises:
        ConfigError: The plan divides the parameter otherwise.
    """
    if num_axes == 1:  # a bias goes with its weight; so does a norm of q or k, whose sum is over the workers
        if name.endswith(".weight") and not type(module).__name__.endswith("RMSNorm"):
            raise ConfigError(f"Got {name!r} of a {type(module).__name__}, which workers cannot divide")
        return
    planned = _planned(config, name)
    if ("rowwise" if axis == num_axes - 1 else "colwise") not in planned:
        raise ConfigError(f"Got {name!r} of axis {axis} to divide, for which transformers plans {planned!r}")


def _planned(config: Any, name: str) -> str:
    """Return how transformers plans to divide a parameter."""
    path = re.sub(r"\.\d+\.", ".*.", name.removesuffix(".weight"))
    return next((how for key, how in config.base_model_tp_plan.items() if path.endswith(f".{key}")), "nothing")


def _widths(name: str, config: Any, length: int) -> tuple[int, ...]:
    """Return the widths of the parts that lie one behind the other in a weight, fused or not, of that length."""
    if ".qkv_proj." in name:
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        num_keys = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        return config.num_attention_heads * size, num_keys * size, num_keys * size
    return (length // 2,) * 2 if name.endswith(("gate_up_proj", "gate_up_proj.weight")) else (length,)


def _take(weight: torch.Tensor, axis: int, runs: Runs) -> torch.Tensor:
    """Return runs of a tensor along an axis; zeros beyond its end."""
    end = weight.shape[axis]
    parts = [weight.narrow(axis, first, min(stop, end) - first) for first, stop in runs if first < end]
    missing = sum(stop - first for first, stop in runs) - sum(part.shape[axis] for part in parts)
    if missing:
        shape = (*weight.shape[:axis], missing, *weight.shape[axis + 1 :])
        parts.append(weight.new_zeros(shape))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=axis)
