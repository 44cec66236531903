"""From a checkpoint to ``BaseWeights``: read, fuse, round and pack weights one by one, into one buffer.

::

    checkpoint --> Stored --> Precision --> Kept --> buffer         on the CPU, several weights at a time
    (codes or numbers of one weight)

On the CPU the process holds the model once, and a few weights twice. Codes for a GPU take the same way, and the buffer
then moves there whole. Numbers for a GPU move into the buffer first, siblings side by side; a fused weight is then a
view over its parts, without a second copy.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from itertools import accumulate, islice
from pathlib import Path
from typing import cast

import torch
from torch import nn

from manylora.core.adapters.shape import ModuleKind, TargetModule
from manylora.core.config import ModelConfig
from manylora.core.errors import ConfigError
from manylora.execution.checkpoint.codes import Codes
from manylora.execution.device import find_device
from manylora.execution.kernels.linear import WeightEntry, side_by_side, write_narrow_weight, write_weight
from manylora.execution.model.base_weights import BaseWeights, WeightsManifest
from manylora.execution.model.describe import describe_modules, siblings
from manylora.execution.model.device_memory import DeviceMemory
from manylora.execution.model.load import LoadedModel, load_model, load_skeleton
from manylora.execution.model.packed_cache import PackedCache
from manylora.execution.model.precision import Kept, Precision, Stored
from manylora.execution.model.sealed_memory import ALIGNMENT, MemoryWriter, SealedMemory

__all__ = ["freeze", "gather", "load_weights"]

AHEAD = 2  # weights that are worked on, or wait to be written, beside the next
DROP_BYTES = 2**27  # bytes of weights that are read before the memory of their files is given back


def load_weights(
    config: ModelConfig, load: Callable[[ModelConfig], LoadedModel] = load_model, *, cache: Path | None = None
) -> tuple[LoadedModel, BaseWeights]:
    """Return the module tree of a checkpoint without weights, and the weights.

    ``load`` is another function for a model without a folder. In the folder ``cache`` weights on a CPU may be found
    (``PackedCache``), and are kept for the next start. ``ConfigError`` if the model cannot be served.
    """
    packed = None
    if cache is not None and load is load_model and (device := find_device(config.device)).type == "cpu":
        packed = PackedCache(cache, config, Precision.choose(config, torch.float32, device))
        if (weights := packed.find()) is not None:
            return load_skeleton(config), weights
    loaded = load(config)
    precision = Precision.choose(config, loaded.dtype, loaded.device)
    is_quantised = loaded.checkpoint is not None and loaded.checkpoint.is_quantised
    is_coded = precision.is_by_row and (is_quantised or precision.base != "stored")
    try:
        if loaded.device.type != "cpu" and not is_coded:
            return loaded, freeze(loaded, precision, *gather(loaded, loaded.device))
        weights = freeze(loaded, precision)
        if packed is not None:
            packed.store_later(weights)
        return loaded, weights if loaded.device.type == "cpu" else move(weights, loaded.device)
    finally:
        if loaded.checkpoint is not None:
            loaded.checkpoint.weights.close()


def gather(loaded: LoadedModel, device: torch.device) -> tuple[torch.Tensor, DeviceMemory | None]:
    """Move the weights of a model to ``device``, with siblings side by side; those of files are read one at a time.

    Returns:
        Their buffer, ``[num_bytes]``, uint8, and its memory where other processes can map it.
    """
    model, checkpoint = loaded.model, loaded.checkpoint
    names: dict[int, list[str]] = {}  # of each tensor, several of a tied one; files may have any of them
    if checkpoint is not None:
        loaded.probe()  # what cannot be served is refused before its weights are read
        for name, tensor in model.state_dict(keep_vars=True).items():
            names.setdefault(id(tensor), []).append(name)
    _complete_biases(model)
    tensors = {id(tensor): tensor for _, tensor in _tensors(model)}
    stretches = [
        [getattr(linear, leaf) for linear in linears]
        for linears in map(partial(_linears, model), siblings(model).values())
        for leaf in ("weight", "bias")
        if getattr(linears[0], leaf) is not None
    ]
    beside = {id(tensor) for stretch in stretches for tensor in stretch}
    stretches += [[tensor] for key, tensor in tensors.items() if key not in beside]
    sizes = [sum(tensor.nbytes for tensor in stretch) for stretch in stretches]
    offsets = list(accumulate((-(-size // ALIGNMENT) * ALIGNMENT for size in sizes), initial=0))
    buffer, memory = _allocate(device, offsets[-1])
    read: dict[str, torch.Tensor] = {}
    num_read = 0
    for stretch, offset in zip(stretches, offsets[:-1], strict=True):
        for tensor in stretch:
            place = buffer[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            offset += tensor.nbytes
            own = names.get(id(tensor), ())
            found = next((one for one in own if checkpoint is not None and one in checkpoint.names), None)
            if checkpoint is None or found is None:
                tensor.data = place.copy_(tensor)
                continue
            weight = _numbers(loaded.read(found), tensor.dtype)
            assert weight.shape == tensor.shape, f"{found} is {tuple(weight.shape)}, expected {tuple(tensor.shape)}"
            read |= dict.fromkeys(own, place.copy_(weight))
            del weight
            num_read += tensor.nbytes
            if num_read >= DROP_BYTES:
                checkpoint.drop()
                num_read = 0
    if checkpoint is not None:
        model.load_state_dict(read, strict=False, assign=True)
        model.tie_weights()  # type: ignore[operator]
        model.requires_grad_(False)
    return buffer, memory


def move(weights: BaseWeights, device: torch.device) -> BaseWeights:
    """Return weights of the CPU in the memory of ``device``, which other processes can map if its driver has such."""
    buffer, memory = _allocate(device, weights.manifest.num_bytes)
    buffer.copy_(weights.buffer)
    if memory is not None:
        memory.seal()
    return BaseWeights(weights.manifest, buffer, memory)


def _allocate(device: torch.device, num_bytes: int) -> tuple[torch.Tensor, DeviceMemory | None]:
    memory = DeviceMemory.make(device, num_bytes)
    return torch.empty(num_bytes, dtype=torch.uint8, device=device) if memory is None else memory.buffer, memory


def freeze(
    loaded: LoadedModel,
    precision: Precision,
    buffer: torch.Tensor | None = None,
    device_memory: DeviceMemory | None = None,
) -> BaseWeights:
    """Probe a model, then fuse, pack and freeze its weights; the model has none afterwards.

    ``buffer`` and ``device_memory`` are of ``gather``, with the weights in it; by default a new one on the CPU.
    ``ConfigError`` if the model cannot be served, or a weight is not finite.
    """
    model = loaded.model
    if buffer is None:
        _complete_biases(model)
    source = _Source(loaded, has_weights=buffer is not None)
    probe = loaded.probe()
    pieces = _pieces(model, describe_modules(model, probe))
    memory: SealedMemory | DeviceMemory | None = device_memory
    if buffer is None:
        writer = MemoryWriter()
        entries = _write_all(pieces, precision, writer, source)
        memory = writer.seal()
        buffer = memory.map()
    else:
        entries = [_find(piece, source, buffer) for piece in pieces]
        if device_memory is not None:
            device_memory.seal()
    manifest = WeightsManifest(model=loaded.name, probe=probe, entries=tuple(entries), num_bytes=buffer.numel())
    return BaseWeights(manifest, buffer, memory)


class _Role(Enum):
    """The use of a weight, which decides the numbers that it may be kept in."""

    LINEAR = auto()
    HEAD = auto()
    TABLE = auto()
    TIED = auto()  # an embedding that is the output head as well
    OTHER = auto()


@dataclass(frozen=True, slots=True)
class _Piece:
    """Weights that become one entry of the table."""

    names: tuple[str, ...]  # names of the entry
    # Names of each weight in the model, more than one if it is tied; more than one part if linears are fused.
    parts: tuple[tuple[str, ...], ...]
    role: _Role


def _pieces(model: nn.Module, modules: Sequence[TargetModule]) -> list[_Piece]:
    """Return the entries: fused linears first, then every other tensor once."""
    groups: dict[str, list[str]] = defaultdict(list)
    for module in modules:
        groups[module.group].append(module.name)
    pieces = []
    fused: set[str] = set()
    for group, names in groups.items():
        if len(names) == 1:
            continue
        for leaf in ("weight", "bias"):
            if getattr(_linears(model, names)[0], leaf) is not None:
                role = _Role.LINEAR if leaf == "weight" else _Role.OTHER
                parts = tuple((f"{name}.{leaf}",) for name in names)
                pieces.append(_Piece((f"{group}.{leaf}",), parts, role))
                fused.update(f"{name}.{leaf}" for name in names)
    head = model.get_output_embeddings()  # type: ignore[operator]
    roles = {
        f"{module.name}.weight": _Role.TABLE
        if module.kind is ModuleKind.EMBEDDING
        else _Role.HEAD
        if model.get_submodule(module.name) is head
        else _Role.LINEAR
        for module in modules
        if module.kind in (ModuleKind.LINEAR, ModuleKind.EMBEDDING)
    }
    names_of: dict[int, list[str]] = defaultdict(list)
    for name, tensor in _tensors(model):
        if name not in fused:
            names_of[id(tensor)].append(name)
    for own in names_of.values():
        found = {roles.get(name, _Role.OTHER) for name in own}
        role = found.pop() if len(found) == 1 else _Role.TIED if found == {_Role.TABLE, _Role.HEAD} else _Role.OTHER
        pieces.append(_Piece(tuple(own), (tuple(own),), role))
    return pieces


class _Source:
    """Where weights are read from: the model if it has them (``has_weights``), or the checkpoint's files."""

    def __init__(self, loaded: LoadedModel, *, has_weights: bool) -> None:
        self._loaded = loaded
        self._files = None if has_weights else loaded.checkpoint
        self._tensors = dict(_tensors(loaded.model))
        self._num_read = 0

    def read(self, names: Sequence[str]) -> Stored:
        """Return a weight by any of its names; refuse a weight that is not finite."""
        stored = () if self._files is None else self._files.names
        name = next((name for name in names if name in stored), names[0])
        weight: Stored = self._tensors[name].detach()
        if self._files is not None and name in stored:
            weight = self._loaded.read(name)
            self._num_read += weight.nbytes if isinstance(weight, torch.Tensor) else weight.codes.nbytes
        self._check_finite(name, weight)
        return weight

    def dtype(self, names: Sequence[str]) -> torch.dtype:
        return self._tensors[names[0]].dtype

    def drop(self) -> None:
        """Give back the memory of files, if much was read."""
        if self._files is not None and self._num_read >= DROP_BYTES:
            self._files.drop()
            self._num_read = 0

    def release(self, names: Sequence[str]) -> None:
        """Free the memory of a weight in the model; its shape stays, for the description of the model."""
        tensor = self._tensors[names[0]]
        if not tensor.is_meta:
            tensor.data = torch.zeros((), dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)

    def _check_finite(self, name: str, weight: Stored) -> None:
        """Refuse a weight that holds NaN or infinity; codes were checked as they were read."""
        if not isinstance(weight, torch.Tensor) or not weight.is_floating_point() or not weight.numel():
            return
        least, most = torch.aminmax(weight.detach())  # both NaN if one number is
        if not (torch.isfinite(least) and torch.isfinite(most)):
            checkpoint = self._loaded.checkpoint
            where = "" if checkpoint is None else f"{checkpoint.weights.place(name)} has "
            found = "NaN" if torch.isnan(least) else "infinity"
            raise ConfigError(f"Got model = {self._loaded.name!r}: {where}tensor {name!r} with {found} in it")


def _keep(precision: Precision, source: _Source, piece: _Piece) -> list[Kept]:
    """Return a piece's weights as they are kept, and release those in the model."""
    read = (source.read(names) for names in piece.parts)
    stored = [part.cpu() if isinstance(part, torch.Tensor) else part for part in read]
    if piece.role is _Role.OTHER:
        dtypes = map(source.dtype, piece.parts)  # the model's own: beside 16 bits, routers of some families have 32
        numbers = [_numbers(part, dtype) for part, dtype in zip(stored, dtypes, strict=True)]
        kept: list[Kept] = [torch.cat(numbers) if len(numbers) > 1 else numbers[0]]
    elif piece.role is _Role.TABLE:
        kept = [precision.keep_table(stored[0])]
    else:
        kept = precision.keep_linear(stored, is_head=piece.role is not _Role.LINEAR)
    for names in piece.parts:
        source.release(names)
    return kept


def _numbers(stored: Stored, dtype: torch.dtype) -> torch.Tensor:
    return (stored.dequantise() if isinstance(stored, Codes) else stored).to(dtype)


def _write_all(
    pieces: Sequence[_Piece], precision: Precision, writer: MemoryWriter, source: _Source
) -> list[WeightEntry]:
    """Write all pieces in order, on every processor."""
    entries: list[WeightEntry] = []
    threads = torch.get_num_threads()
    try:
        # Each thread works on a weight of its own. The number holds for threads that are started later as well.
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            under_way = _ahead(pool, partial(_keep, precision, source), pieces)
            for piece, kept in zip(pieces, under_way, strict=True):
                entries += _write(piece, kept, writer, is_packed=not precision.is_by_row)
                source.drop()
    finally:
        torch.set_num_threads(threads)
    return entries


def _write(piece: _Piece, kept: Sequence[Kept], writer: MemoryWriter, *, is_packed: bool) -> list[WeightEntry]:
    """Write a piece's weights, numbers packed if they can be; several that could not become one are numbered."""
    entries = []
    for number, weight in enumerate(kept):
        names = piece.names if len(kept) == 1 else tuple(f"{name}.{number}" for name in piece.names)
        if isinstance(weight, tuple):
            entries.append(write_narrow_weight(names, *weight, writer.append))
        else:
            # Of a tied weight, the embedding reads rows.
            is_linear = is_packed and piece.role in (_Role.LINEAR, _Role.HEAD)
            entries.append(write_weight(names, weight, writer.append, is_linear=is_linear))
    return entries


def _find(piece: _Piece, source: _Source, buffer: torch.Tensor) -> WeightEntry:
    """Return the entry of a piece whose parts lie side by side in ``buffer``."""
    parts = [cast(torch.Tensor, source.read(names)) for names in piece.parts]
    entry = side_by_side(piece.names, parts, buffer)
    for names in piece.parts:
        source.release(names)
    return entry


def _ahead(
    pool: ThreadPoolExecutor, work: Callable[[_Piece], list[Kept]], pieces: Sequence[_Piece]
) -> Iterator[list[Kept]]:
    """Yield the work on each piece, in order, with a few more under way: not all of them, for the sake of memory."""
    under_way: deque[Future[list[Kept]]] = deque()
    waiting = iter(pieces)
    for piece in islice(waiting, AHEAD):
        under_way.append(pool.submit(work, piece))
    while under_way:
        yield under_way.popleft().result()
        under_way.extend(pool.submit(work, piece) for piece in islice(waiting, 1))


def _complete_biases(model: nn.Module) -> None:
    """Add a bias of zeros to linears without one whose siblings have one, so that they can be fused."""
    for names in siblings(model).values():
        linears = _linears(model, names)
        if any(linear.bias is not None for linear in linears):
            for linear in linears:
                if linear.bias is None:
                    bias = torch.zeros(linear.out_features, dtype=linear.weight.dtype)
                    linear.bias = nn.Parameter(bias, requires_grad=False)


def _linears(model: nn.Module, names: Sequence[str]) -> list[nn.Linear]:
    return [cast(nn.Linear, model.get_submodule(name)) for name in names]


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every parameter and buffer, tied ones under each of their names."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)
