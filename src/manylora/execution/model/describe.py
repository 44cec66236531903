"""Describe a loaded model as a ``BaseShape``: the modules that an adapter may change, and those that share an input."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from hashlib import blake2b
from typing import Any, cast

import torch
from torch import nn

from manylora.core.adapters.shape import INPUT, BaseShape, ModuleKind, PageShape, TargetModule
from manylora.execution.device import dtype_name
from manylora.execution.model.experts import expert_sizes
from manylora.execution.model.load import LoadedModel
from manylora.execution.model.probe import ModelProbe

__all__ = ["describe_model", "describe_modules", "siblings"]

# Siblings that are computed as one product, if the probe saw them called with the same input.
_FAMILIES = {"qkv": ("q_proj", "k_proj", "v_proj"), "gate_up": ("gate_proj", "up_proj")}

# A checkpoint's path and author do not decide which adapters fit it.
_VOLATILE = ("_name_or_path", "transformers_version", "use_cache", "torch_dtype", "dtype", "architectures")


def describe_model(
    loaded: LoadedModel,
    probe: ModelProbe,
    *,
    block_size: int,
    max_model_len: int,
    kv_dtype: torch.dtype,
    adapts_experts: bool = True,
) -> BaseShape:
    """Describe a model whose modules are not replaced yet, without its weights; contexts have ``max_model_len`` tokens.

    ``adapts_experts`` is whether the LoRA kernel takes rows that are known only when experts have been chosen.
    """
    model, config = loaded.model, loaded.text_config
    page = PageShape(
        block_size=block_size,
        num_layers=len(probe.kv_layers),
        num_kv_heads=probe.num_kv_heads,
        head_dim=probe.head_dim,
        value_dim=None if probe.value_dim == probe.head_dim else probe.value_dim,
        element_bytes=kv_dtype.itemsize,
        dtype=dtype_name(kv_dtype),
    )
    if not adapts_experts:
        probe = replace(probe, experts=())
    modules = describe_modules(model, probe)
    embedding = model.get_input_embeddings()  # type: ignore[operator]
    return BaseShape(
        name=loaded.name,
        architecture=str(config.model_type),
        fingerprint=_fingerprint(config.to_dict(), modules, page),
        vocab_size=int(embedding.weight.shape[0]),
        hidden_size=int(config.hidden_size),
        num_layers=probe.num_layers,
        max_model_len=max_model_len,
        page=page,
        modules=modules,
        all_linear=_all_linear(model),
        eos_token_ids=_eos_token_ids(model),
        unsupported=tuple(_unsupported(model, probe, modules, adapts_experts=adapts_experts)),
        tied_head=probe.head if getattr(config, "tie_word_embeddings", False) else None,
        state_bytes=sum(mixer.num_bytes for mixer in probe.mixers),
    )


def describe_modules(model: nn.Module, probe: ModelProbe) -> tuple[TargetModule, ...]:
    """Return the modules that an adapter may change; those of one group are computed as one product.

    The last linear of each layer, which ends its feed-forward, is followed by its input, which (IA)3 scales.
    """
    groups = _groups(model, probe)
    embedding = model.get_input_embeddings()  # type: ignore[operator]
    modules: list[TargetModule] = []
    for name, module in model.named_modules():
        match = re.search(r"\.(\d+)\.", name)
        layer = int(match.group(1)) if match else None
        has_bias = getattr(module, "bias", None) is not None
        for leaf, kind, sizes in _targets(name, module, probe, embedding):
            path = name + leaf
            group, offset = groups.get(path, (path, 0))
            modules.append(
                TargetModule(name=path, kind=kind, layer=layer, group=group, offset=offset, has_bias=has_bias, **sizes)
            )
    last = {one.layer: one.name for one in modules if one.kind is ModuleKind.LINEAR and one.group == one.name}
    return tuple(
        part
        for one in modules
        for part in ((one, _input_of(one)) if one.layer is not None and last.get(one.layer) == one.name else (one,))
    )


def _input_of(linear: TargetModule) -> TargetModule:
    name, width = linear.name + INPUT, linear.in_features
    return replace(linear, name=name, group=name, kind=ModuleKind.NUMBERS, out_features=width, offset=0, has_bias=False)


def _targets(
    name: str, module: nn.Module, probe: ModelProbe, embedding: nn.Module
) -> Iterator[tuple[str, ModuleKind, dict[str, Any]]]:
    """Yield the targets that a module is or has: the rest of their names, their kinds and sizes."""

    def sizes(inputs: int, outputs: int, **more: int) -> dict[str, Any]:
        return {"in_features": inputs, "out_features": outputs, **more}

    if name in probe.experts and (found := expert_sizes(module)) is not None:
        num, hidden, inner = found
        yield ".gate_up_proj", ModuleKind.EXPERTS, sizes(hidden, 2 * inner, num_experts=num)
        yield ".down_proj", ModuleKind.EXPERTS, sizes(inner, hidden, num_experts=num)
    elif name in probe.routers:
        num_out, hidden = cast(torch.Tensor, module.weight).shape
        yield "", ModuleKind.ROUTER, sizes(hidden, num_out)
    elif name in probe.norms:
        num_out, axis = probe.norms[name]
        yield "", ModuleKind.NUMBERS, sizes(cast(torch.Tensor, module.weight).shape[0], num_out, token_axis=axis)
    elif name not in probe.inputs and name != probe.head:
        return
    elif type(module) is nn.Linear:
        is_transposed = getattr(module, "is_transposed", False)
        yield "", ModuleKind.LINEAR, sizes(module.in_features, module.out_features, is_transposed=is_transposed)
    elif module is embedding and isinstance(module, nn.Embedding):
        yield "", ModuleKind.EMBEDDING, sizes(module.num_embeddings, module.embedding_dim)


def siblings(model: nn.Module) -> dict[str, list[str]]:
    """Return the names of linears that may share an input, by the name of their group, in the model's own order."""
    groups: dict[str, list[str]] = {}
    modules = dict(model.named_modules(remove_duplicate=False))
    places = {name: place for place, name in enumerate(modules)}
    for parent, _ in model.named_modules():
        for family, children in _FAMILIES.items():
            names = [f"{parent}.{child}" for child in children]
            if all(type(modules.get(name)) is nn.Linear for name in names):
                groups[f"{parent}.{family}"] = sorted(names, key=places.__getitem__)
    return groups


def _groups(model: nn.Module, probe: ModelProbe) -> dict[str, tuple[str, int]]:
    """Return (group, first column) of every module that is computed together with siblings."""
    groups: dict[str, tuple[str, int]] = {}
    for group, names in siblings(model).items():
        if not all(name in probe.inputs for name in names) or len({probe.inputs[name] for name in names}) != 1:
            continue
        offset = 0
        for name in names:
            groups[name] = (group, offset)
            offset += int(model.get_submodule(name).out_features)  # type: ignore[arg-type]
    return groups


def _all_linear(model: nn.Module) -> tuple[str, ...]:
    """Return the targets of PEFT's ``all-linear``: every linear but the output head."""
    head = model.get_output_embeddings()  # type: ignore[operator]
    return tuple(name for name, module in model.named_modules() if isinstance(module, nn.Linear) and module is not head)


def _unsupported(
    model: nn.Module, probe: ModelProbe, modules: Iterable[TargetModule], *, adapts_experts: bool
) -> Iterable[tuple[str, str]]:
    adaptable = {module.name for module in modules}.union(probe.experts)
    for name, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        if not own or name in adaptable:
            continue
        if any(parameter.ndim == 3 for parameter in own.values()) and not isinstance(module, nn.Conv1d):
            if not adapts_experts and expert_sizes(module) is not None:
                why = "its rows are known only once they have chosen it, and on a GPU only kernels in Triton find them"
            else:
                why = "its experts are of another form than gate and up in one weight, and down, without biases"
            yield name, why
        elif isinstance(module, nn.Embedding):
            yield name, "it is an embedding of other things than the tokens of the vocabulary (positions, mostly)"
        elif isinstance(module, nn.Linear):
            yield name, "it is not called once on every token (an expert, or a part that text does not use)"
        elif "norm" in type(module).__name__.lower():
            yield name, "it is a norm that is not called once on every token"
        else:
            yield name, f"it is a {type(module).__name__}, not a linear"


def _eos_token_ids(model: nn.Module) -> tuple[int, ...]:
    ids: list[int] = []
    for config in (getattr(model, "generation_config", None), model.config):
        value = getattr(config, "eos_token_id", None)
        if value is not None:
            ids.extend([value] if isinstance(value, int) else value)
    return tuple(sorted(set(ids)))


def _fingerprint(config: dict[str, Any], modules: Iterable[TargetModule], page: PageShape) -> str:
    content = {
        "config": {key: value for key, value in config.items() if key not in _VOLATILE},
        "modules": [(m.name, m.kind.value, m.in_features, m.out_features, m.group, m.offset) for m in modules],
        "page": [page.num_elements, page.dtype],
    }
    text = json.dumps(content, sort_keys=True, default=str)
    return blake2b(text.encode(), digest_size=16).hexdigest()
