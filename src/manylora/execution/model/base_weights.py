"""The base's weights as the kernels read them: fused, packed and frozen, in one buffer that other processes can map.

::

    checkpoint -> load -> (shard) -> probe -> fuse and pack -> freeze -> BaseWeights
                                                                           |  share_weights
    another process                     map_weights -> attach() -> BaseWeights
                                                                           |  install()
                                              a module tree without weights -> a model

From ``shard`` on, a sharded model is one rank's slice of every weight. Names are those of the model's parameters and
buffers; a fused weight has the name of its group (``model.layers.0.self_attn.qkv.weight``), and tied weights are one
entry of several names. After freezing, nothing writes to a weight: LoRA is added beside products, never merged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import msgspec
import torch
from torch import nn

from manylora.core.errors import ConfigError
from manylora.core.ports import SharedBase
from manylora.execution.kernels.linear import Weight, WeightEntry, can_share_packed, map_weight, weight_kind
from manylora.execution.model.device_memory import DeviceMemory, find_gpu, gpu_identity
from manylora.execution.model.probe import ModelProbe
from manylora.execution.model.sealed_memory import SealedMemory

__all__ = ["BaseWeights", "WeightsManifest", "check_complete", "map_weights", "share_weights"]


class WeightsManifest(msgspec.Struct, frozen=True, kw_only=True):
    """The table of the buffer: with it and the checkpoint's configuration, another process builds the model.

    It includes the probe's findings, so that a process that maps the buffer does not probe the model again.
    """

    model: str
    probe: ModelProbe
    entries: tuple[WeightEntry, ...]
    num_bytes: int


class BaseWeights:
    """A frozen table of weights over one buffer.

    The buffer ``[num_bytes]``, uint8, is on the device of the weights; ``memory`` is its memory, if it can be shared.
    """

    def __init__(
        self, manifest: WeightsManifest, buffer: torch.Tensor, memory: SealedMemory | DeviceMemory | None = None
    ) -> None:
        self.manifest = manifest
        self.memory = memory
        self.buffer = buffer
        self.tensors: Mapping[str, Weight] = {
            name: weight for entry in manifest.entries for weight in [map_weight(buffer, entry)] for name in entry.names
        }

    def describe(self) -> tuple[str, ...]:
        """Return how weights are kept and multiplied: a line for each kind, the largest first."""
        num_bytes, count = Counter[str](), Counter[str]()
        for entry in self.manifest.entries:
            num_bytes[kind := weight_kind(entry)] += entry.num_bytes
            count[kind] += 1
        return tuple(f"{kind}: {count[kind]} weights, {size / 1e6:,.2f} MB" for kind, size in num_bytes.most_common())

    @classmethod
    def attach(cls, manifest: WeightsManifest, buffer: torch.Tensor, memory: DeviceMemory | None = None) -> BaseWeights:
        """Return the weights that another process exported, without a copy.

        ``buffer`` is the same memory, mapped here, perhaps read-only: by ``SealedMemory.map``, or of ``memory`` on a
        GPU. ``ConfigError`` if the buffer does not match, or this build of torch cannot read packed weights.
        """
        if buffer.dtype is not torch.uint8 or buffer.ndim != 1 or buffer.numel() != manifest.num_bytes:
            raise ConfigError(f"Got a buffer of {buffer.nbytes} bytes, expected {manifest.num_bytes}, one-dimensional")
        if any(entry.packing for entry in manifest.entries) and not can_share_packed():
            raise ConfigError("Got weights that were packed by a build of torch with oneDNN, which is missing here")
        return cls(manifest, buffer, memory)

    @property
    def is_narrow(self) -> bool:
        """Whether any weight is kept in fewer bits than the model computes with."""
        return any(entry.form is not None for entry in self.manifest.entries)

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.buffer.device

    def install(self, model: nn.Module) -> None:
        """Put the weights into a model of the manifest's architecture: tied ones as one parameter.

        Fused and narrow weights are left to ``adapt_modules``.
        """
        modules = dict(model.named_modules(remove_duplicate=False))
        for entry in self.manifest.entries:
            tensor = self.tensors[entry.names[0]]
            if not isinstance(tensor, torch.Tensor):
                continue  # read by adapted modules alone
            parameter = nn.Parameter(tensor, requires_grad=False)
            for name in entry.names:
                path, _, leaf = name.rpartition(".")
                module = modules.get(path)
                if module is None:
                    continue  # the name of a group
                if leaf in module._buffers:
                    module._buffers[leaf] = tensor
                else:
                    module._parameters[leaf] = parameter
        # Packed tensors do not keep their memory alive.
        model.base_weights = self  # type: ignore[assignment]


def share_weights(weights: BaseWeights) -> SharedBase | None:
    """Return weights for other processes to map; ``None`` if they cannot be, or are mapped themselves."""
    memory = weights.memory
    if memory is None or memory.fd is None:
        return None
    gpu = gpu_identity(memory.device) if isinstance(memory, DeviceMemory) else ""
    manifest = msgspec.msgpack.encode(weights.manifest)
    return SharedBase(file=memory.fd, num_bytes=memory.num_bytes, manifest=manifest, gpu=gpu)


def map_weights(shared: SharedBase) -> BaseWeights:
    """Map weights that another process shared; the file is closed.

    ``ConfigError`` as ``attach``; or they are on a GPU that this process does not see, or may not map.
    """
    manifest = msgspec.msgpack.decode(shared.manifest, type=WeightsManifest)
    memory = SealedMemory(shared.file, shared.num_bytes)  # closes the file
    if not shared.gpu:
        return BaseWeights.attach(manifest, memory.map())
    try:
        device_memory = DeviceMemory.open(find_gpu(shared.gpu), memory.fd, memory.num_bytes)
    except (ImportError, RuntimeError) as error:
        raise ConfigError(f"Got weights in the memory of GPU {shared.gpu}, which cannot be mapped: {error}") from error
    return BaseWeights.attach(manifest, device_memory.buffer, device_memory)


def check_complete(model: nn.Module) -> None:
    """Refuse a model whose weights' table was incomplete; the error names the missing tensors."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for path, module in model.named_modules():
        own = {f"{path}.{key}": value for key, value in vars(module).items() if isinstance(value, torch.Tensor)}
        tensors.update(own)
    missing = [name for name, tensor in tensors.items() if tensor.is_meta]
    if missing:
        raise ConfigError(f"Got shared weights without {', '.join(missing)}: the table is incomplete")
