"""Replace the model's linears, embedding and head by modules that add LoRA; the model keeps its own code.

Transformers' decoder layers call ``q_proj(x)``, ``k_proj(x)``, ``v_proj(x)`` one after another. We replace them by
*parts* of one fused product: the first part called computes all of them, with the LoRA of the whole group beside it,
and the others return their columns. That works for every architecture with such siblings, without model code of ours.
Weights are fused and packed already (``base_weights``).

A module's output is the base product, LoRA, and an epilogue where an adapter has a factor or a shift::

    neither in the step     out = x W^T + bias      += LoRA
    one or more             out = x W^T             += LoRA      *= factor, += shift of row's adapter     += bias

Plain LoRA takes the first line: no launch and no memory for vectors. A norm keeps its module; its output, and the input
of the last linear of a layer, are ``AdaptedNumbers``, which an adapter may multiply and shift. The inputs of assisted
rows leave for the CPU before the base product is launched, and their LoRA is added behind it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import count, takewhile
from typing import cast

import torch
from torch import nn

from manylora.core.adapters.shape import INPUT, BaseShape, ModuleKind, TargetModule
from manylora.core.errors import ConfigError
from manylora.execution.collectives import Collectives
from manylora.execution.kernels.linear import BaseLinear, Weight
from manylora.execution.lora.batch import StepContext
from manylora.execution.lora.kernels import add_embedding
from manylora.execution.lora.vectors import AdaptedNumbers, apply_epilogue
from manylora.execution.model.experts import adapt_mixture
from manylora.execution.model.settle import BaseGroup, BaseNorm

__all__ = ["AdaptedEmbedding", "AdaptedLinear", "FusedLinear", "FusedPart", "adapt_modules"]


class AdaptedLinear(nn.Module):
    """A linear, or several that share one input, with LoRA beside it.

    The input of the output head is the sampled rows only. ``numbers`` are the input, if adapters may change that.
    """

    def __init__(
        self,
        base: BaseLinear,
        group: str,
        step: StepContext,
        *,
        is_head: bool = False,
        numbers: AdaptedNumbers | None = None,
    ) -> None:
        super().__init__()
        self.base = base
        self._numbers = numbers
        self._product = base.product
        self._group = group
        self._step = step
        self._is_head = is_head

    @property
    def weight(self) -> Weight:
        """The weight of the base: some models ask for its type."""
        return self.base.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x W^T + b`` with each row's adapter, for ``x`` ``[..., in]``."""
        step, group, is_sampled = self._step, self._group, self._is_head
        if self._numbers is not None:
            x = self._numbers.apply(x, is_shared=True)
        parts = step.lora.parts(group, is_sampled=is_sampled) if step.lora is not None else None
        reply = step.assist.send(group, x, is_sampled=is_sampled) if step.assist is not None else None
        if parts is None and reply is None:
            return self._product(x)
        has_vectors = (parts is not None and parts.has_vectors) or (reply is not None and reply.has_vectors)
        out = self._product(x, has_bias=not has_vectors)
        rows = out.view(-1, out.shape[-1])
        if parts is not None:
            if parts.wait is not None:
                parts.wait()
            step.kernel(x.reshape(-1, x.shape[-1]), rows, parts)
        if reply is not None:
            reply.add_to(rows)
        if has_vectors:
            apply_epilogue(rows, self.base.bias, parts, reply)
        return out


class AdaptedEmbedding(nn.Module):
    """An embedding with LoRA beside it; the original is called, since subclasses scale their output.

    A ``table`` of fewer bits than activations is read row by row: the original gets the rows of a step's tokens, in the
    type of activations, for its table.
    """

    def __init__(self, embedding: nn.Embedding, table: Weight | None, group: str, step: StepContext) -> None:
        super().__init__()
        self.base = embedding
        self._group = group
        self._step = step
        self._scale = getattr(embedding, "embed_scale", None)
        self._table = table
        self._first = 0  # the first token here, where workers divide the table
        self._workers: Collectives | None = None
        if table is not None:
            embedding.padding_idx = None  # a token's place, which concerns training alone
            nothing = torch.zeros(0, embedding.embedding_dim, device=table.device)
            embedding.weight = nn.Parameter(nothing, requires_grad=False)

    @property
    def weight(self) -> Weight:
        """The table: a tied head shares it."""
        return self.base.weight if self._table is None else self._table

    def divide(self, first: int, workers: Collectives) -> None:
        """Hold the rows from token ``first`` on; the vectors of other tokens come from the other workers."""
        self._first, self._workers = first, workers

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return the tokens' vectors plus each row's adapter."""
        step = self._step
        reply = step.assist.send(self._group, token_ids) if step.assist is not None else None
        out = self._look_up(token_ids)
        parts = step.lora.parts(self._group) if step.lora is not None else None
        rows = out.view(-1, out.shape[-1])
        if parts is not None:
            if parts.wait is not None:
                parts.wait()
            assert step.token_ids is not None
            add_embedding(parts, step.token_ids - self._first, rows, self._scale, self._workers)
        if reply is not None:
            reply.add_to(rows, self._scale)
        if parts is not None or reply is not None:
            apply_epilogue(rows, None, parts, reply)
        return out if self._workers is None else self._workers.sum(out)

    def _look_up(self, token_ids: torch.Tensor) -> torch.Tensor:
        if self._workers is None:
            return self._rows_at(token_ids)
        places = token_ids - self._first
        last = self.weight.shape[0] - 1
        is_here = (places >= 0) & (places <= last)
        return self._rows_at(places.clamp(0, last)) * is_here[..., None]

    def _rows_at(self, token_ids: torch.Tensor) -> torch.Tensor:
        if self._table is None:
            return cast(torch.Tensor, self.base(token_ids))
        tokens = token_ids.flatten()
        table = self._table
        rows = table.index_select(0, tokens).float() if isinstance(table, torch.Tensor) else table.rows(tokens)
        places = torch.arange(len(tokens), device=tokens.device).view(token_ids.shape)
        found: torch.Tensor = torch.func.functional_call(self.base, {"weight": rows}, (places,))
        return found


class FusedLinear(AdaptedLinear):
    """Linears that share one input, as one product.

    The parts may be called in any order. The product is kept until every part was returned for the same input tensor,
    or another input comes. ``base`` has the parts' rows one behind the other, ``sizes`` of each.
    """

    def __init__(self, base: BaseLinear, sizes: Sequence[int], group: str, step: StepContext) -> None:
        super().__init__(base, group, step)
        self.sizes = list(sizes)
        self._input: torch.Tensor | None = None
        self._outputs: dict[int, torch.Tensor] = {}

    def part(self, index: int, x: torch.Tensor) -> torch.Tensor:
        """Return the columns of part ``index`` for ``x``."""
        if self._input is not x or index not in self._outputs:
            self._outputs = dict(enumerate(torch.split(self.forward(x), self.sizes, dim=-1)))
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


def adapt_modules(
    model: nn.Module, weights: Mapping[str, Weight], shape: BaseShape, step: StepContext, dtype: torch.dtype
) -> dict[str, BaseGroup | BaseNorm]:
    """Replace every module of ``shape`` in ``model``, in place, by a module that adds LoRA to ``dtype`` activations.

    Returns:
        The weights and bias of each group, and the norms.

    ``weights`` has the weights and biases of groups of linears as ``<group>.weight`` (or ``<group>.weight.0``,
    ``<group>.weight.1`` ... where they could not become one) and ``<group>.bias``, others by their names.
    """
    head = cast(nn.Module | None, model.get_output_embeddings())  # type: ignore[operator]
    groups: dict[str, list[TargetModule]] = defaultdict(list)
    for module in shape.modules:
        groups[module.group].append(module)
    own: dict[str, BaseGroup | BaseNorm] = {}
    numbers = {
        group: AdaptedNumbers(members[0], step)
        for group, members in groups.items()
        if members[0].kind is ModuleKind.NUMBERS
    }
    for group, members in groups.items():
        name = members[0].name
        if group in numbers:
            if not name.endswith(INPUT):
                norm = model.get_submodule(name)
                if not norm.weight.is_meta:  # ``check_complete`` says what is missing
                    own[group] = BaseNorm.of(norm)
                norm.numbers = numbers[group]  # type: ignore[assignment]
                norm.register_forward_hook(_adapt_output)
        elif members[0].kind in (ModuleKind.EXPERTS, ModuleKind.ROUTER):
            adapt_mixture(model, members[0], step)
        elif members[0].kind is ModuleKind.EMBEDDING:
            embedding = cast(nn.Embedding, model.get_submodule(name))
            table = weights[f"{name}.weight"]
            is_narrow = not isinstance(table, torch.Tensor) or table.dtype != dtype
            model.set_submodule(name, AdaptedEmbedding(embedding, table if is_narrow else None, group, step))
            own[group] = BaseGroup((table,), None)
        elif len(members) > 1:
            base = _base_linear(weights, group)
            own[group] = BaseGroup(base.weights, base.bias)
            fused = FusedLinear(base, [member.num_rows for member in members], group, step)
            for index, member in enumerate(members):
                model.set_submodule(member.name, FusedPart(fused, index, is_owner=index == 0))
        else:
            base = _base_linear(weights, name)
            own[group] = BaseGroup(base.weights, base.bias)
            is_head, own_input = model.get_submodule(name) is head, numbers.get(name + INPUT)
            model.set_submodule(name, AdaptedLinear(base, group, step, is_head=is_head, numbers=own_input))
    return own


def _adapt_output(norm: nn.Module, args: tuple[torch.Tensor, ...], out: torch.Tensor) -> torch.Tensor:
    """Let adapters change the output of a norm."""
    return cast(AdaptedNumbers, norm.numbers).apply(out)


def _base_linear(weights: Mapping[str, Weight], name: str) -> BaseLinear:
    """Return the linear of a module or group from its weight, or from its parts' weights.

    ``ConfigError`` if there is no weight of that name: another process shared an incomplete table.
    """
    own = weights.get(f"{name}.weight")
    numbered = (weights.get(f"{name}.weight.{number}") for number in count())
    parts = [own] if own is not None else list(takewhile(lambda part: part is not None, numbered))
    if not parts:
        raise ConfigError(f"Got shared weights without {name}.weight: the table is incomplete")
    return BaseLinear(cast(list[Weight], parts), cast(torch.Tensor | None, weights.get(f"{name}.bias")))
