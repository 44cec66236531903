"""A linear of the base: the format of its weight, its product, and its bytes in memory that several processes map.

::

    write_weight(weight, append) -> WeightEntry      in the process that loads
    map_weight(buffer, entry)    -> weight           in every process that maps those bytes
    BaseLinear(weight, bias).product(x)              in every step

A weight has one of four formats, and only this module tells them apart:

* *plain*: a strided tensor of any type, on any device.
* *packed*: float32 on a CPU, in an order of oneDNN's own.
* *narrow*: 16, 8 or 4 bits on a CPU, in the order of our kernels (``narrow``).
* *by row*: 8 or 4 bits on a GPU (``row_weight``).

On the CPU torch sends float32 products to MKL, which leaves AVX-512 unused on AMD processors; oneDNN, which torch
includes too, does not (measured on a Zen 4 core: 240 against 110 GFLOP/s). Its call costs ten microseconds more, so
small products stay with MKL. A weight that is packed once saves products of a few rows a third of their time, and those
of many a tenth. The operators are those that torch's compiler emits for linears. Where a build lacks them, or they are
wrong, ``functional.linear`` is used.

Torch shows neither the memory of a packed weight nor its order. Its ahead-of-time compiler keeps such weights in one
file and makes tensors over them, through a C interface in every build. A packed weight is its bytes and a *layout*
(oneDNN's description of their order); a process with both needs no copy and no packing. The layout depends on the
processor, so the bytes are valid on this machine only.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from manylora.execution.device import dtype_name
from manylora.execution.kernels.cpu.forms import NarrowForm
from manylora.execution.kernels.narrow import NarrowWeight
from manylora.execution.kernels.row_weight import RowForm, RowWeight

__all__ = [
    "BaseLinear",
    "Weight",
    "WeightEntry",
    "bound_caches",
    "can_share_packed",
    "exact_products",
    "has_onednn",
    "linear",
    "map_weight",
    "pack",
    "packed_bytes",
    "packed_layout",
    "packed_over",
    "reorder",
    "rows_at",
    "rows_of",
    "side_by_side",
    "weight_kind",
    "write_narrow_weight",
    "write_weight",
]

MIN_WORK, MIN_ROWS = 1 << 20, 2  # multiply-adds and rows from which the faster product outweighs the slower call
MIN_PACKED = 1 << 18  # weights from which this holds for a packed product of one row too

CACHED_PRIMITIVES = 128
"""Compiled products that oneDNN keeps, and torch beside it: one for each number of rows and shape of a weight.

At 1024, the default, they take most of a gigabyte once steps of all sizes were seen. To make one again takes a fraction
of a millisecond, which the layers of a step share. Steps that decode rarely change their number of rows.
"""

_LAYOUT_MKLDNN = 3  # ``c10::Layout::Mkldnn``; the C interface has a name for the strided layout only


class WeightEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One weight in a buffer."""

    names: tuple[str, ...]  # paths of parameters and buffers in the model; several if they are tied
    dtype: str  # torch's name (``float32``)
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in elements; empty for a packed weight
    offset: int  # first byte in the buffer
    num_bytes: int
    packing: bytes = b""  # the layout of a packed weight; empty for others
    form: NarrowForm | RowForm | None = None  # the form of a weight that is narrow, or kept by row


Weight: TypeAlias = torch.Tensor | NarrowWeight | RowWeight  # a weight in any format


def write_weight(
    names: tuple[str, ...], weight: torch.Tensor, append: Callable[[NDArray[np.uint8]], int], *, is_linear: bool
) -> WeightEntry:
    """Write a weight of the CPU in the format whose products are fastest.

    ``append`` takes bytes and returns their offset. A weight may be packed if only products read it (``is_linear``).
    """
    weight, packing = weight.detach(), b""
    if is_linear and can_share_packed() and (packed := pack(weight)).is_mkldnn:
        packing, content = packed_layout(packed), packed_bytes(packed)
    else:
        weight = weight.contiguous()
        content = weight.reshape(-1).view(torch.uint8).numpy()
    return WeightEntry(
        names=names,
        dtype=dtype_name(weight.dtype),
        shape=tuple(weight.shape),
        strides=() if packing else weight.stride(),
        offset=append(content),
        num_bytes=content.nbytes,
        packing=packing,
    )


def write_narrow_weight(
    names: tuple[str, ...],
    form: NarrowForm | RowForm,
    content: NDArray[np.uint8],
    append: Callable[[NDArray[np.uint8]], int],
) -> WeightEntry:
    """Write a weight from ``write_narrow`` or ``write_rows``; ``append`` takes bytes and returns their offset."""
    return WeightEntry(
        names=names,
        dtype="uint8",
        shape=(form.num_out, form.num_in),
        strides=(),
        offset=append(content),
        num_bytes=content.nbytes,
        form=form,
    )


def weight_kind(entry: WeightEntry) -> str:
    """Return the numbers of a weight, and how it is multiplied, in words."""
    if entry.packing:
        return f"{entry.dtype}, in oneDNN's order"
    if (form := entry.form) is None:
        return entry.dtype
    scales = f", a scale for {form.group} inputs" if form.group else ""
    if isinstance(form, RowForm):
        return f"{form.numbers}{scales}, activations in {form.dtype}"
    activations = "int8, summed as integers" if form.is_rounded else "float32"
    return f"{form.numbers}{scales}, activations in {activations}"


def side_by_side(names: tuple[str, ...], parts: Sequence[torch.Tensor], buffer: torch.Tensor) -> WeightEntry:
    """Return the entry of parts that follow one another in ``buffer``, as one plain weight."""
    first, sizes = parts[0], [part.nbytes for part in parts]
    starts = list(accumulate(sizes[:-1], initial=first.data_ptr()))
    assert [part.data_ptr() for part in parts] == starts, f"{names} does not lie side by side"
    shape = first.shape if len(parts) == 1 else (sum(len(part) for part in parts), *first.shape[1:])
    return WeightEntry(
        names=names,
        dtype=dtype_name(first.dtype),
        shape=tuple(shape),
        strides=first.stride(),
        offset=starts[0] - buffer.data_ptr(),
        num_bytes=sum(sizes),
    )


def map_weight(buffer: torch.Tensor, entry: WeightEntry) -> Weight:
    """Return the weight over its bytes in ``buffer`` ``[num_bytes]``; a packed one does not keep the buffer alive.

    ``RuntimeError`` if the weight is packed, and this build of torch does not read such weights.
    """
    if entry.packing:
        return packed_over(buffer.data_ptr() + entry.offset, entry.shape, entry.packing)
    data = buffer[entry.offset : entry.offset + entry.num_bytes]
    if isinstance(entry.form, RowForm):
        return RowWeight(data, entry.form)
    if entry.form is not None:
        return NarrowWeight(data, entry.form)
    return data.view(getattr(torch, entry.dtype)).as_strided(entry.shape, entry.strides)


class BaseLinear(nn.Module):
    """A linear of the base: ``weight`` ``[out, in]`` in any format, and ``bias`` ``[out]`` if it has one.

    Linears that share an input, and whose weights have different formats, are one linear of several weights.
    """

    def __init__(self, weights: Weight | Sequence[Weight], bias: torch.Tensor | None) -> None:
        super().__init__()
        self.weights = tuple(weights) if isinstance(weights, Sequence) else (weights,)
        self.bias = bias if bias is None else nn.Parameter(bias, requires_grad=False)
        self.is_exact = False  # whether activations stay as they are beside weights whose products round them

    @property
    def weight(self) -> Weight:
        """The first weight: some models ask for its type or device."""
        return self.weights[0]

    def product(self, x: torch.Tensor, *, has_bias: bool = True) -> torch.Tensor:
        """Return ``x W^T``, plus the bias unless ``has_bias`` is false, for ``x`` ``[..., in]``."""
        bias = self.bias if has_bias else None
        weight = self.weights[0]
        if len(self.weights) == 1 and isinstance(weight, torch.Tensor):
            return linear(x, weight, bias)
        products = [self._product(x, weight) for weight in self.weights]
        out = products[0] if len(products) == 1 else torch.cat(products, dim=-1)
        return out if bias is None else out.add_(bias)

    def _product(self, x: torch.Tensor, weight: Weight) -> torch.Tensor:
        if isinstance(weight, torch.Tensor):
            return linear(x, weight)
        return weight.product(x) if isinstance(weight, RowWeight) else weight.product(x, is_exact=self.is_exact)


@contextmanager
def exact_products(model: nn.Module) -> Iterator[None]:
    """Let no base product of ``model`` round its activations inside."""
    linears = [module for module in model.modules() if isinstance(module, BaseLinear)]
    for one in linears:
        one.is_exact = True
    try:
        yield
    finally:
        for one in linears:
            one.is_exact = False


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return ``x W^T + b`` for ``x`` ``[..., in]`` and ``weight`` ``[out, in]``, plain or packed."""
    if weight.is_mkldnn:
        return _onednn(x, weight, bias)
    if (
        x.dtype is torch.float32
        and x.device.type == "cpu"
        and (num_rows := x.numel() // x.shape[-1]) >= MIN_ROWS
        and num_rows * weight.numel() >= MIN_WORK
        and has_onednn()
    ):
        return _onednn(x, weight, bias)
    return functional.linear(x, weight, bias)


def rows_of(weight: Weight, first: int, last: int) -> torch.Tensor:
    """Return rows ``[first, last)`` of a weight ``[out, in]`` in any format, as float32: what its products multiply."""
    if isinstance(weight, torch.Tensor):
        return _dense(weight)[first:last].float()
    return rows_at(weight, torch.arange(first, last))


def rows_at(weight: Weight, places: torch.Tensor) -> torch.Tensor:
    """Return the rows of a weight ``[out, in]`` at some places ``[n]``, as float32."""
    if isinstance(weight, NarrowWeight):
        return weight.rows(places)
    if isinstance(weight, RowWeight):
        return weight.rows(places.to(weight.device), torch.float32)
    return _dense(weight).index_select(0, places.to(weight.device)).float()


def _dense(weight: torch.Tensor) -> torch.Tensor:
    return weight.to_dense() if weight.is_mkldnn else weight


def pack(weight: torch.Tensor) -> torch.Tensor:
    """Return an opaque copy of ``weight`` ``[out, in]`` in the order that ``linear`` reads fastest.

    A weight that is small, not float32 or not on a CPU is returned unchanged.
    """
    is_worth_it = weight.dtype is torch.float32 and weight.device.type == "cpu" and weight.numel() >= MIN_PACKED
    return reorder(weight) if is_worth_it and has_onednn() else weight


@torch.no_grad()
def reorder(weight: torch.Tensor) -> torch.Tensor:
    """Return ``weight`` packed, whatever its size; ``RuntimeError`` if this build of torch has no oneDNN."""
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)
    return packed


def packed_bytes(weight: torch.Tensor) -> NDArray[np.uint8]:
    """Return the memory of a packed weight, valid while the weight lives."""
    address: int = torch.ops.mkldnn.data_ptr(weight)
    num_bytes: int = torch.ops.mkldnn._nbytes(weight)
    return np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(address))


def packed_layout(weight: torch.Tensor) -> bytes:
    """Return oneDNN's description of a packed weight's order."""
    return bytes(torch.ops.mkldnn._get_mkldnn_serialized_md(weight).numpy().tobytes())


def packed_over(address: int, shape: Sequence[int], layout: bytes) -> torch.Tensor:
    """Return a packed float32 weight of ``shape`` ``(out, in)`` over memory at ``address``; the caller keeps it alive.

    ``RuntimeError`` if this build of torch does not make such tensors.
    """
    torch_cpu, new_capsule = _interface()
    sizes = (ctypes.c_int64 * len(shape))(*shape)
    no_strides = (ctypes.c_int64 * len(shape))()
    handle = ctypes.c_void_p()
    error = torch_cpu.aoti_torch_create_tensor_from_blob_v2(
        ctypes.c_void_p(address),
        ctypes.c_int64(len(shape)),
        sizes,
        no_strides,
        ctypes.c_int64(0),
        ctypes.c_int32(torch_cpu.aoti_torch_dtype_float32()),
        ctypes.c_int32(torch_cpu.aoti_torch_device_type_cpu()),
        ctypes.c_int32(-1),
        ctypes.byref(handle),
        ctypes.c_int32(_LAYOUT_MKLDNN),
        (ctypes.c_uint8 * len(layout)).from_buffer_copy(layout),
        ctypes.c_int64(len(layout)),
    )
    if error:
        raise RuntimeError("torch made no packed tensor over that memory")
    tensor: torch.Tensor = torch._C._aoti.alloc_tensor_by_stealing_from_void_ptr(new_capsule(handle, None, None))
    return tensor


@cache
def has_onednn() -> bool:
    """Return whether oneDNN's linear exists and agrees with ``functional.linear``, packed and not."""
    if not torch.backends.mkldnn.is_available():
        return False
    x, weight = _sample()
    try:
        found = [_onednn(x, weight, None), _onednn(x, reorder(weight), None)]
    except (AttributeError, NotImplementedError, RuntimeError, TypeError):
        return False
    return all(torch.allclose(product, functional.linear(x, weight), atol=1e-4) for product in found)


@cache
def can_share_packed() -> bool:
    """Return whether weights can be packed, and a packed weight over other memory gives the same product."""
    if not has_onednn():
        return False
    x, weight = _sample()
    try:
        packed = reorder(weight)
        memory = packed_bytes(packed).copy()
        other = packed_over(memory.ctypes.data, weight.shape, packed_layout(packed))
        return other.is_mkldnn and torch.equal(linear(x, other), linear(x, packed))
    except (AttributeError, NotImplementedError, OSError, RuntimeError, TypeError):
        return False


def bound_caches(num_primitives: int = CACHED_PRIMITIVES) -> None:
    """Bound oneDNN's caches; before the first product, when their sizes are read. Bounds that are set stay."""
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(name, str(num_primitives))


def _onednn(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")
    return product


def _sample() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.linspace(-1, 1, 64).view(4, 16), torch.linspace(1, -2, 128).view(8, 16)


@cache
def _interface() -> tuple[ctypes.CDLL, Any]:
    """Return torch's C interface, and Python's function that makes a capsule."""
    torch_cpu = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    prototype = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    return torch_cpu, prototype(("PyCapsule_New", ctypes.pythonapi))
