"""Packed weights in memory that several processes map.

oneDNN's packed weights are *opaque* tensors: torch shows neither their memory nor its order. Torch's ahead-of-time
compiler keeps such weights in one file and makes tensors over them, through a C interface in every build. A packed
weight is its bytes and a *layout* (oneDNN's description of their order); a process with both needs no copy and no
packing::

    pack(weight) -> packed_bytes, packed_layout     in the process that loads
    packed_over(address, shape, layout)             in every process that maps those bytes

The layout depends on the processor, so the bytes are valid on this machine only.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from manylora.execution.kernels.linear import has_onednn, linear, reorder

__all__ = ["can_share_packed", "packed_bytes", "packed_layout", "packed_over"]

_LAYOUT_MKLDNN = 3
"""``c10::Layout::Mkldnn``; the C interface has a name for the strided layout only."""


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

    Raises:
        RuntimeError: This build of torch does not make such tensors.
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
    capsule = new_capsule(handle, None, None)
    tensor: torch.Tensor = torch._C._aoti.alloc_tensor_by_stealing_from_void_ptr(capsule)
    return tensor


@cache
def can_share_packed() -> bool:
    """Return whether weights can be packed, and a packed weight over other memory gives the same product."""
    if not has_onednn():
        return False
    x, weight = torch.linspace(-1, 1, 64).view(4, 16), torch.linspace(1, -2, 128).view(8, 16)
    try:
        packed = reorder(weight)
        memory = packed_bytes(packed).copy()
        other = packed_over(memory.ctypes.data, weight.shape, packed_layout(packed))
        return other.is_mkldnn and torch.equal(linear(x, other), linear(x, packed))
    except (AttributeError, NotImplementedError, OSError, RuntimeError, TypeError):
        return False


@cache
def _interface() -> tuple[ctypes.CDLL, Any]:
    """Return torch's C interface, and Python's function that makes a capsule."""
    torch_cpu = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    prototype = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    return torch_cpu, prototype(("PyCapsule_New", ctypes.pythonapi))
