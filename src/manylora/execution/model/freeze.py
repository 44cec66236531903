"""From a loaded model to ``BaseWeights``: fuse siblings, pack for the CPU's kernels, and write all into one buffer.

On the CPU each weight is fused, packed, written and released in turn, so the process holds the model once, and one
weight twice. On a GPU the weights move into the buffer first, siblings side by side; a fused weight is then a view over
its parts, without a second copy.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import cast

import torch
from torch import nn

from manylora.core.adapters.shape import ModuleKind, TargetModule
from manylora.core.config import ModelConfig
from manylora.core.errors import ConfigError
from manylora.execution.kernels.linear import side_by_side, write_weight
from manylora.execution.model.base_weights import BaseWeights, WeightsManifest
from manylora.execution.model.describe import describe_modules, siblings
from manylora.execution.model.device_memory import DeviceMemory
from manylora.execution.model.load import LoadedModel
from manylora.execution.model.probe import probe_model
from manylora.execution.model.sealed_memory import ALIGNMENT, MemoryWriter, SealedMemory

__all__ = ["freeze", "gather", "load_weights"]


def load_weights(config: ModelConfig, load: Callable[[ModelConfig], LoadedModel]) -> tuple[LoadedModel, BaseWeights]:
    """Load a checkpoint with ``load``, into main memory; return the module tree without weights, and the weights.

    Raises:
        ConfigError: The model cannot be served.
    """
    loaded = load(config)
    return loaded, freeze(loaded) if loaded.device.type == "cpu" else freeze(
        loaded, *gather(loaded.model, loaded.device)
    )


def gather(model: nn.Module, device: torch.device) -> tuple[torch.Tensor, DeviceMemory | None]:
    """Move the weights of ``model`` to ``device``, with siblings side by side.

    Returns:
        Their buffer, ``[num_bytes]``, uint8, and its memory where other processes can map it.
    """
    _complete_biases(model)
    tensors = {id(tensor): tensor for _, tensor in _tensors(model)}
    stretches = [
        [getattr(linear, leaf) for linear in linears]
        for linears in map(partial(_linears, model), siblings(model).values())
        for leaf in ("weight", "bias")
        if getattr(linears[0], leaf) is not None
    ]
    placed = {id(tensor) for stretch in stretches for tensor in stretch}
    stretches += [[tensor] for key, tensor in tensors.items() if key not in placed]
    sizes = [sum(tensor.nbytes for tensor in stretch) for stretch in stretches]
    offsets = list(accumulate((-(-size // ALIGNMENT) * ALIGNMENT for size in sizes), initial=0))
    memory = DeviceMemory.make(device, offsets[-1])
    buffer = torch.empty(offsets[-1], dtype=torch.uint8, device=device) if memory is None else memory.buffer
    for stretch, offset in zip(stretches, offsets[:-1], strict=True):
        for tensor in stretch:
            place = buffer[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            tensor.data = place.copy_(tensor)
            offset += tensor.nbytes
    return buffer, memory


def freeze(
    loaded: LoadedModel, buffer: torch.Tensor | None = None, device_memory: DeviceMemory | None = None
) -> BaseWeights:
    """Probe a model, then fuse, pack and freeze its weights; the model has none afterwards.

    Args:
        loaded: The model.
        buffer: From ``gather``, with the weights in it; by default a new one on the CPU.
        device_memory: Its memory, from ``gather`` too.

    Raises:
        ConfigError: The model cannot be served, or a weight is not finite.
    """
    if buffer is None:
        _complete_biases(loaded.model)
    config = loaded.text_config
    probe = probe_model(loaded.model, architecture=str(config.model_type), num_layers=int(config.num_hidden_layers))
    pieces = _pieces(loaded.model, describe_modules(loaded.model, probe))
    uses = Counter(id(part) for piece in pieces for part in piece.parts)
    writer = MemoryWriter()
    entries = []
    names = {id(tensor): name for name, tensor in reversed(loaded.model.state_dict(keep_vars=True).items())}
    for piece in pieces:
        for part in piece.parts:
            if id(part) in names:
                _check_finite(loaded, names[id(part)], part)
        if buffer is None:
            weight = torch.cat(piece.parts) if len(piece.parts) > 1 else piece.parts[0]
            entries.append(write_weight(piece.names, weight, writer.append, is_linear=piece.is_linear))
            del weight
        else:
            entries.append(side_by_side(piece.names, piece.parts, buffer))
        for part in piece.parts:
            uses[id(part)] -= 1
            if not uses[id(part)]:
                _release(part)
    memory: SealedMemory | DeviceMemory | None = device_memory
    if buffer is None:
        memory = writer.seal()
        buffer = memory.map()
    elif device_memory is not None:
        device_memory.seal()
    manifest = WeightsManifest(model=loaded.name, probe=probe, entries=tuple(entries), num_bytes=buffer.numel())
    return BaseWeights(manifest, buffer, memory)


@dataclass(frozen=True, slots=True)
class _UnwrittenEntry:
    """An entry before it is written: tensors that follow one another in the buffer, more than one for fused linears.

    An entry that only products read (``is_linear``) may be packed.
    """

    names: tuple[str, ...]
    parts: tuple[torch.Tensor, ...]
    is_linear: bool


def _pieces(model: nn.Module, modules: Sequence[TargetModule]) -> list[_UnwrittenEntry]:
    """Return the entries: fused linears first, then every other tensor once."""
    groups: dict[str, list[str]] = defaultdict(list)
    for module in modules:
        groups[module.group].append(module.name)
    pieces = []
    fused: set[str] = set()
    for group, names in groups.items():
        if len(names) == 1:
            continue
        linears = _linears(model, names)
        for leaf in ("weight", "bias"):
            if getattr(linears[0], leaf) is not None:
                parts = tuple(getattr(linear, leaf) for linear in linears)
                pieces.append(_UnwrittenEntry((f"{group}.{leaf}",), parts, is_linear=leaf == "weight"))
                fused.update(f"{name}.{leaf}" for name in names)
    products = {f"{module.name}.weight" for module in modules if module.kind is ModuleKind.LINEAR}
    names_of: dict[int, list[str]] = defaultdict(list)
    tensors: dict[int, torch.Tensor] = {}
    for name, tensor in _tensors(model):
        if name not in fused:
            names_of[id(tensor)].append(name)
            tensors[id(tensor)] = tensor
    for key, own in names_of.items():
        # A head that shares its weight with the embedding keeps it plain.
        pieces.append(_UnwrittenEntry(tuple(own), (tensors[key],), is_linear=products.issuperset(own)))
    return pieces


def _check_finite(loaded: LoadedModel, name: str, tensor: torch.Tensor) -> None:
    """Refuse a weight that holds NaN or infinity: one pass, over numbers that are copied next."""
    if not tensor.is_floating_point() or not tensor.numel():
        return
    least, most = torch.aminmax(tensor.detach())  # both NaN if one number is
    if not (torch.isfinite(least) and torch.isfinite(most)):
        place = "" if loaded.files is None else f"{loaded.files.place(name)} has "
        found = "NaN" if torch.isnan(least) else "infinity"
        raise ConfigError(f"Got model = {loaded.name!r}: {place}tensor {name!r} with {found} in it")


def _release(tensor: torch.Tensor) -> None:
    """Free a tensor's memory; its shape stays, for the description of the model."""
    tensor.data = torch.zeros((), dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)


def _complete_biases(model: nn.Module) -> None:
    """Add a bias of zeros to linears without one whose siblings have one, so that they can be fused."""
    for names in siblings(model).values():
        linears = _linears(model, names)
        if any(linear.bias is not None for linear in linears):
            for linear in linears:
                if linear.bias is None:
                    linear.bias = nn.Parameter(linear.weight.new_zeros(linear.out_features), requires_grad=False)


def _linears(model: nn.Module, names: Sequence[str]) -> list[nn.Linear]:
    return [cast(nn.Linear, model.get_submodule(name)) for name in names]


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every parameter and buffer, tied ones under each of their names."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)
