"""Replace the model's linears, embedding and head by modules that add LoRA; the model keeps its own code.

Transformers' decoder layers call ``q_proj(x)``, ``k_proj(x)``, ``v_proj(x)`` one after another. We replace them by
*parts* of one fused product: the first part called computes all of them, with the LoRA of the whole group beside it,
and the others return their columns. That works for every architecture with such siblings, without model code of ours.
Weights are fused and packed already (``base_weights``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import nn

from manylora.core.adapters.shape import BaseShape, ModuleKind, TargetModule
from manylora.execution.lora.batch import StepContext, add_embedding
from manylora.execution.lora.product import adapted_product, apply_epilogue

__all__ = ["AdaptedEmbedding", "AdaptedLinear", "FusedLinear", "FusedPart", "adapt_modules"]


class AdaptedLinear(nn.Module):
    """A linear with LoRA beside it; the output head's input (``is_head``) is the sampled rows only."""

    def __init__(self, linear: nn.Linear, group: str, step: StepContext, *, is_head: bool = False) -> None:
        super().__init__()
        self.weight = linear.weight
        self.bias = linear.bias
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self._group = group
        self._step = step
        self._is_head = is_head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x W^T + b`` plus each row's adapter."""
        return adapted_product(x, self.weight, self.bias, self._step, self._group, is_sampled=self._is_head)


class AdaptedEmbedding(nn.Module):
    """An embedding with LoRA beside it; the original is called, since subclasses scale their output."""

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
        """Return the tokens' vectors plus each row's adapter."""
        step = self._step
        reply = step.assist.send(self._group, token_ids) if step.assist is not None else None
        out = cast(torch.Tensor, self.base(token_ids))
        parts = step.lora.parts(self._group) if step.lora is not None else None
        rows = out.view(-1, out.shape[-1])
        if parts is not None:
            if parts.wait is not None:
                parts.wait()
            assert step.token_ids is not None
            add_embedding(parts, step.token_ids, rows, self._scale)
        if reply is not None:
            reply.add_to(rows, self._scale)
        if parts is not None or reply is not None:
            apply_epilogue(rows, None, parts, reply)
        return out


class FusedLinear(nn.Module):
    """Linears that share one input, as one product.

    The parts may be called in any order. The product is kept until every part was returned for the same input tensor,
    or another input comes.
    ``weight`` ``[out, in]`` and ``bias`` ``[out]`` have the parts' rows one behind the other, ``sizes`` of each.
    """

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, sizes: Sequence[int], group: str, step: StepContext
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = nn.Parameter(bias, requires_grad=False) if bias is not None else None
        self.sizes = list(sizes)
        self._group = group
        self._step = step
        self._input: torch.Tensor | None = None
        self._outputs: dict[int, torch.Tensor] = {}

    def part(self, index: int, x: torch.Tensor) -> torch.Tensor:
        """Return the columns of part ``index`` for ``x``."""
        if self._input is not x or index not in self._outputs:
            product = adapted_product(x, self.weight, self.bias, self._step, self._group)
            self._outputs = dict(enumerate(torch.split(product, self.sizes, dim=-1)))
            self._input = x
        output = self._outputs.pop(index)
        if not self._outputs:
            self._input = None
        return output


class FusedPart(nn.Module):
    """One of the fused linears, in its place in the model.

    The product is registered as a child of one part (``is_owner``), for ``.to`` and counting.
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


def adapt_modules(model: nn.Module, weights: Mapping[str, torch.Tensor], shape: BaseShape, step: StepContext) -> None:
    """Replace every module of ``shape`` in ``model`` by one that adds LoRA, in place.

    ``weights`` has fused weights and biases, as ``<group>.weight`` and ``<group>.bias``.
    """
    head = cast(nn.Module | None, model.get_output_embeddings())  # type: ignore[operator]
    groups: dict[str, list[TargetModule]] = defaultdict(list)
    for module in shape.modules:
        groups[module.group].append(module)
    for group, members in groups.items():
        if len(members) > 1:
            sizes = [member.out_features for member in members]
            fused = FusedLinear(weights[f"{group}.weight"], weights.get(f"{group}.bias"), sizes, group, step)
            for index, member in enumerate(members):
                model.set_submodule(member.name, FusedPart(fused, index, is_owner=index == 0))
            continue
        name = members[0].name
        original = model.get_submodule(name)
        if members[0].kind is ModuleKind.EMBEDDING:
            model.set_submodule(name, AdaptedEmbedding(cast(nn.Embedding, original), group, step))
        else:
            is_head = original is head
            model.set_submodule(name, AdaptedLinear(cast(nn.Linear, original), group, step, is_head=is_head))
