"""Module surgery: the model keeps its own code, its linears become ours.

Transformers' decoder layers call ``q_proj(x)``, ``k_proj(x)``, ``v_proj(x)`` one after another. We replace
the three modules by *parts* of one fused product: the first part that is called computes all of them, with
the LoRA of the whole group beside it, and the others hand out their columns. Works for every architecture
that has such siblings, without model code of ours. Other linears, the embedding and the head are wrapped.
Weights are moved, not copied: a fused weight replaces its parts, and a packed one (``linear``) the original; only a
head that shares its weight with the embedding keeps it plain.
"""

from __future__ import annotations

from collections import defaultdict
from typing import cast

import torch
from torch import nn

from manylora.adapters.shape import BaseShape, ModuleKind, TargetModule
from manylora.execution.kernels.linear import pack
from manylora.execution.lora.batch import StepContext, add_embedding
from manylora.execution.lora.product import adapted_product, apply_epilogue

__all__ = ["AdaptedEmbedding", "AdaptedLinear", "FusedLinear", "FusedPart", "adapt_modules"]


class AdaptedLinear(nn.Module):
    """A linear with LoRA beside it.

    Args:
        linear: The original; its parameters are taken over.
        group: Its group.
        step: What the running step brings.
        is_head: Whether it sees the sampled rows only.
        is_shared: Whether another module reads its weight.
    """

    def __init__(
        self, linear: nn.Linear, group: str, step: StepContext, *, is_head: bool = False, is_shared: bool = False
    ) -> None:
        super().__init__()
        self.weight = linear.weight if is_shared else nn.Parameter(pack(linear.weight.data), requires_grad=False)
        self.bias = linear.bias
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self._group = group
        self._step = step
        self._is_head = is_head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x W^T + b`` plus every row's own adapter."""
        return adapted_product(x, self.weight, self.bias, self._step, self._group, is_sampled=self._is_head)


class AdaptedEmbedding(nn.Module):
    """An embedding with LoRA beside it.

    Args:
        embedding: The original, kept whole (subclasses scale their output).
        group: Its group.
        step: What the running step brings.
    """

    def __init__(self, embedding: nn.Embedding, group: str, step: StepContext) -> None:
        super().__init__()
        self.base = embedding
        self._group = group
        self._step = step
        self._scale = getattr(embedding, "embed_scale", None)

    @property
    def weight(self) -> torch.Tensor:
        """The table: a tied head shares it."""
        return self.base.weight

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return the tokens' vectors plus every row's own adapter."""
        out = cast(torch.Tensor, self.base(token_ids))
        lora = self._step.lora
        parts = lora.parts(self._group) if lora is not None else None
        if parts is not None:
            assert self._step.token_ids is not None
            rows = out.view(-1, out.shape[-1])
            add_embedding(parts, self._step.token_ids, rows, self._scale)
            apply_epilogue(rows, None, parts)
        return out


class FusedLinear(nn.Module):
    """Linears that share one input, as one product.

    The parts may be called in any order; the product is kept until all of them have been handed out for the
    same input tensor, or another input comes.

    Args:
        linears: The originals, in the order of their columns.
        group: Name of the group.
        step: What the running step brings.
    """

    def __init__(self, linears: list[nn.Linear], group: str, step: StepContext) -> None:
        super().__init__()
        weight = torch.cat([linear.weight.data for linear in linears])
        self.weight = nn.Parameter(pack(weight), requires_grad=False)
        biases = [linear.bias for linear in linears]
        self.bias: nn.Parameter | None = None
        if any(bias is not None for bias in biases):
            columns = [
                bias.data if bias is not None else weight.new_zeros(linear.out_features)
                for linear, bias in zip(linears, biases, strict=True)
            ]
            self.bias = nn.Parameter(torch.cat(columns), requires_grad=False)
        self.sizes = [linear.out_features for linear in linears]
        self._group = group
        self._step = step
        self._input: torch.Tensor | None = None
        self._outputs: dict[int, torch.Tensor] = {}

    def part(self, index: int, x: torch.Tensor) -> torch.Tensor:
        """Return the columns of part ``index`` for ``x``."""
        if self._input is not x or index not in self._outputs:
            self._outputs = dict(enumerate(torch.split(self._compute(x), self.sizes, dim=-1)))
            self._input = x
        output = self._outputs.pop(index)
        if not self._outputs:
            self._input = None
        return output

    def _compute(self, x: torch.Tensor) -> torch.Tensor:
        return adapted_product(x, self.weight, self.bias, self._step, self._group)


class FusedPart(nn.Module):
    """Stands where one of the fused linears stood.

    Args:
        fused: The product it is a part of.
        index: Which part.
        is_owner: Whether the product is registered below this part (one of them must, for ``.to`` and counting).
    """

    def __init__(self, fused: FusedLinear, index: int, *, is_owner: bool) -> None:
        super().__init__()
        if is_owner:
            self.fused = fused
        self._part = fused.part
        self._index = index

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return this part's columns."""
        return self._part(self._index, x)


def adapt_modules(model: nn.Module, shape: BaseShape, step: StepContext) -> None:
    """Replace every module of ``shape`` in ``model`` by one that adds LoRA.

    Args:
        model: The causal language model; changed in place.
        shape: Its shape: which modules, in which groups.
        step: Shared by all of them.
    """
    head = cast(nn.Module | None, model.get_output_embeddings())  # type: ignore[operator]
    embedded = model.get_input_embeddings().weight  # type: ignore[operator]
    groups: dict[str, list[TargetModule]] = defaultdict(list)
    for module in shape.modules:
        groups[module.group].append(module)
    for group, members in groups.items():
        originals = [model.get_submodule(member.name) for member in members]
        if len(members) > 1:
            fused = FusedLinear(cast(list[nn.Linear], originals), group, step)
            for index, member in enumerate(members):
                model.set_submodule(member.name, FusedPart(fused, index, is_owner=index == 0))
        elif members[0].kind is ModuleKind.EMBEDDING:
            embedding = cast(nn.Embedding, originals[0])
            model.set_submodule(members[0].name, AdaptedEmbedding(embedding, group, step))
        else:
            linear = cast(nn.Linear, originals[0])
            adapted = AdaptedLinear(linear, group, step, is_head=linear is head, is_shared=linear.weight is embedded)
            model.set_submodule(members[0].name, adapted)
