"""Mixtures of experts: LoRA of the experts' linears, and of routers, beside transformers' own code.

A layer's router chooses some experts for each row. transformers keeps the linears of all experts as two parameters,
``gate_up_proj`` ``[experts, 2 inner, hidden]`` and ``down_proj`` ``[experts, hidden, inner]``. In steps in which no
adapter changes them, its own code runs. In others the choices are sorted by expert, and so, since rows of a step are in
the order of their adapters, by adapter within an expert::

    sorted     | expert 0: base, base, adapter A, A, B | expert 2: A | expert 3: B, B, B | ...
    base                      one product                  another          another
    LoRA                          | A of 0 | B of 0 |      | A of 2 |     | B of 3 |         one call for all

Each stretch of one expert and one adapter is a part of a LoRA kernel's input as any other. On a GPU nothing of this is
known to the host: the base's product is one call, and the LoRA kernels find stretches and weights on the device.

A router is one product by a weight of its own, and code that differs from model to model. That product is found while
the router runs (``ProductWatch``), and LoRA is added to its result: so an adapter changes which experts are chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from manylora.core.adapters.shape import ModuleKind, TargetModule
from manylora.execution.kernels.linear import linear
from manylora.execution.lora.batch import StepContext
from manylora.execution.lora.kernels import LoraKernel
from manylora.execution.lora.parts import GroupParts, Part
from manylora.execution.lora.tables import Choices
from manylora.execution.storage.resident import ResidentExpert

__all__ = [
    "AdaptedExperts",
    "AdaptedRouter",
    "ProductWatch",
    "adapt_mixture",
    "expert_sizes",
    "is_bare_product",
    "is_expert_call",
]

_PLAIN_EXPERTS = {"has_gate": True, "has_bias": False, "is_transposed": False, "has_post_expert_norm": False}
"""What transformers says of experts' forward (``use_experts_implementation``), of the form that is computed here."""


def expert_sizes(module: nn.Module) -> tuple[int, int, int] | None:
    """Return the number of experts, their inputs and their inner width; ``None`` if a module is of another form."""
    own = dict(module.named_parameters(recurse=False))
    if list(own) != ["gate_up_proj", "down_proj"]:
        return None
    num, double, hidden = own["gate_up_proj"].shape if own["gate_up_proj"].ndim == 3 else (0, 0, 0)
    is_plain = all(getattr(module, name, None) is value for name, value in _PLAIN_EXPERTS.items())
    if not is_plain or own["down_proj"].shape != (num, hidden, double // 2) or not num:
        return None
    return num, hidden, double // 2


def is_expert_call(args: tuple[Any, ...], num_rows: int) -> bool:
    """Return whether experts were called with all rows, the experts chosen for each, and their weights."""
    if len(args) != 3 or not all(isinstance(one, torch.Tensor) and one.ndim == 2 for one in args):
        return False
    hidden, chosen, weights = args
    return len(hidden) == num_rows == len(chosen) and chosen.shape == weights.shape and chosen.dtype is torch.int64


def is_bare_product(module: nn.Module) -> bool:
    """Return whether a module has a matrix of its own, and is no linear or embedding: the form of a router."""
    weight = module._parameters.get("weight")
    return weight is not None and weight.ndim == 2 and not isinstance(module, nn.Linear | nn.Embedding)


class ProductWatch(TorchFunctionMode):
    """Calls a function with input and result of each product by a weight of ``shape``, while it is entered."""

    def __init__(self, shape: torch.Size, note: Callable[[torch.Tensor, torch.Tensor], object]) -> None:
        super().__init__()
        self._shape = shape
        self._note = note

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is functional.linear and args[1].shape == self._shape:
            self._note(args[0], result)
        return result


def adapt_mixture(model: nn.Module, target: TargetModule, step: StepContext) -> None:
    """Let adapters change a router of ``model``, or experts when their last parameter comes."""
    if target.kind is ModuleKind.ROUTER:
        router = model.get_submodule(target.name)
        router.forward = AdaptedRouter(router, target.group, step)
    elif target.name.endswith(".down_proj"):
        container = target.name.removesuffix(".down_proj")
        experts = model.get_submodule(container)
        groups = f"{container}.gate_up_proj", target.group
        experts.forward = AdaptedExperts(experts, groups, step)


class AdaptedRouter:
    """The forward of a router, of weight ``[experts, hidden]``, with LoRA beside its product."""

    def __init__(self, router: nn.Module, group: str, step: StepContext) -> None:
        self._forward = router.forward
        self._shape = cast(torch.Tensor, router.weight).shape
        self._group = group
        self._step = step

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the router's result, with each row's adapter."""
        step = self._step
        if step.assist is None and (step.lora is None or step.lora.parts(self._group) is None):
            return self._forward(*args, **kwargs)
        with ProductWatch(self._shape, self._add):
            return self._forward(*args, **kwargs)

    def _add(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Add LoRA of ``x`` ``[..., hidden]`` into ``out`` ``[..., experts]``."""
        step = self._step
        parts = step.lora.parts(self._group) if step.lora is not None else None
        reply = step.assist.send(self._group, x) if step.assist is not None else None
        rows = out.view(-1, out.shape[-1])
        if parts is not None:
            if parts.wait is not None:
                parts.wait()
            x = x.reshape(-1, x.shape[-1])
            dtype = x.dtype if step.space is None else step.space.pool.dtype
            if x.dtype is dtype:
                step.kernel(x, rows, parts)
            else:  # a router computes in float32 what came in 16 bits
                added = torch.zeros_like(rows, dtype=dtype)
                step.kernel(x.to(dtype), added, parts)
                rows += added
        if reply is not None:
            reply.add_to(rows)


class AdaptedExperts:
    """The forward of a mixture's experts (``expert_sizes``) with LoRA beside the products of their two parameters."""

    def __init__(self, experts: nn.Module, groups: tuple[str, str], step: StepContext) -> None:
        self._experts = experts
        self._forward = experts.forward
        self._groups = groups
        self._step = step

    def __call__(self, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of each row's experts: ``chosen`` and ``weights`` are ``[rows, experts per row]``."""
        lora, assist = self._step.lora, self._step.assist
        if assist is not None and any(assist.send(group, hidden) is not None for group in self._groups):
            raise AssertionError("workers take no rows of experts: a mixture has no assistant")
        parts = [lora.parts(group) if lora is not None else None for group in self._groups]
        if not any(parts):
            return cast(torch.Tensor, self._forward(hidden, chosen, weights))
        experts: Any = self._experts
        numbers, order = torch.sort(chosen.reshape(-1), stable=True)
        rows = order // chosen.shape[1]
        places: _Places | _PlacesOnDevice
        if self._step.space is None:
            places = _Places(numbers, rows, len(hidden), self._step.kernel)
        else:
            places = _PlacesOnDevice(numbers, rows, len(experts.down_proj), parts)
        inner = experts._apply_gate(self._product(hidden[rows], experts.gate_up_proj, places, parts[0]))
        out = self._product(inner, experts.down_proj, places, parts[1])
        own = torch.empty_like(out)
        own[order] = out  # by row again: a sum over what lies behind a row is the same every time
        return (own.view(*chosen.shape, -1) * weights.unsqueeze(-1)).sum(dim=1).to(hidden.dtype)

    def _product(
        self, x: torch.Tensor, weight: torch.Tensor, places: _Places | _PlacesOnDevice, parts: GroupParts | None
    ) -> torch.Tensor:
        """Return the sorted choices' ``x`` ``[n, in]`` times the weights ``[experts, out, in]`` of their experts."""
        out = places.product(x, weight)
        if parts is not None:
            if parts.wait is not None:
                parts.wait()
            places.add_lora(x.contiguous(), out, parts)
        return out


class _Places:
    """The stretches of choices ``[n]`` that are sorted by expert, then by row, for kernels that are told them."""

    def __init__(self, numbers: torch.Tensor, rows: torch.Tensor, num_rows: int, kernel: LoraKernel) -> None:
        experts = numbers.numpy()
        self._keys = experts * num_rows + rows.numpy()
        self._num_rows = num_rows
        self._kernel = kernel
        self._experts, firsts = np.unique(experts, return_index=True)
        ends = [*firsts.tolist()[1:], len(experts)]
        # Each expert that was chosen, its first choice, and one past its last.
        self._of_experts = list(zip(self._experts.tolist(), firsts.tolist(), ends, strict=True))

    def product(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.cat([linear(x[first:last], weight[expert]) for expert, first, last in self._of_experts])

    def add_lora(self, x: torch.Tensor, out: torch.Tensor, parts: GroupParts) -> None:
        own = self.parts(parts)
        if own.parts:
            self._kernel(x, out, own)

    def parts(self, parts: GroupParts) -> GroupParts:
        """Return the parts by expert and adapter, in order, of those by adapter."""
        front = self._experts * self._num_rows
        own: list[Part] = []
        for part in parts.parts:
            firsts, lasts = (np.searchsorted(self._keys, front + at) for at in (part.start, part.stop))
            for at in np.flatnonzero(lasts > firsts).tolist():
                expert = ResidentExpert(part.weights, int(self._experts[at]))
                own.append(Part(int(firsts[at]), int(lasts[at]), expert))
        own.sort(key=lambda one: one.start)
        return replace(parts, parts=tuple(own), step=None)


class _PlacesOnDevice:
    """Such choices for kernels that find weights by table: the host does not learn them, so steps can be captured."""

    def __init__(
        self, numbers: torch.Tensor, rows: torch.Tensor, num_experts: int, parts: Iterable[GroupParts | None]
    ) -> None:
        self._numbers, self._rows = numbers, rows
        self._spans = [part.span for part in parts if part is not None and part.span is not None]
        self._choices: Choices | None = None
        experts = torch.arange(num_experts, device=numbers.device)
        self._ends = torch.searchsorted(numbers, experts, right=True).to(torch.int32)

    def product(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return the base's product, for all experts in one call."""
        return functional.grouped_mm(x, weight.transpose(-2, -1), offs=self._ends)

    def add_lora(self, x: torch.Tensor, out: torch.Tensor, parts: GroupParts) -> None:
        assert parts.tables is not None and parts.span is not None, "the step was made without tables"
        tables = parts.tables()
        if self._choices is None:  # only now that the adapters' tables have arrived
            self._choices = tables.find_experts(self._numbers, self._rows, self._spans[0], self._spans[-1])
        tables.apply_experts(x, out, parts.span, self._choices)
