"""``adapter_model.bin``: adapters from before safetensors, which are pickles.

Unpickling runs whatever the file says. PyTorch's weights-only unpickler does not, but it believes sizes: a zip
entry that inflates a thousandfold, or a tensor of stride 0 over one number, would fill the memory. So only plain,
uncompressed archives are read, and sizes are checked before and after.
"""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from manylora.adapters.tensors import StoredTensor, open_regular
from manylora.errors import AdapterError

__all__ = ["read_bin"]

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
}


def read_bin(name: str, path: Path, max_bytes: int) -> dict[str, StoredTensor]:
    """Read a PyTorch weight file without running it; a ``TensorFileReader``.

    Args:
        name: The adapter, for messages.
        path: The file.
        max_bytes: Most bytes the file, and its tensors together, may take.

    Raises:
        AdapterError: It is damaged, too large, compressed, from before PyTorch 1.6, or holds more than tensors.
    """
    with open_regular(name, path, max_bytes) as file:
        _check_archive(name, path.name, file, max_bytes)
        try:
            content = torch.load(file, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            raise AdapterError(name, f"{path.name} holds more than tensors, and is not run to find out what") from error
        except Exception as error:  # a hostile pickle makes the unpickler raise nearly anything
            raise AdapterError(name, f"{path.name} is damaged: {type(error).__name__}") from error
    if not isinstance(content, dict):
        raise AdapterError(name, f"{path.name} holds a {type(content).__name__}, expected tensors by name")
    tensors: dict[str, StoredTensor] = {}
    left = max_bytes
    for key, value in content.items():
        if not (isinstance(key, str) and isinstance(value, torch.Tensor) and value.layout is torch.strided):
            raise AdapterError(name, f"{path.name} holds more than tensors by name: {str(key)[:80]!r}")
        # Counted as if it were contiguous, which is what it is about to be.
        left -= value.numel() * value.element_size()
        if left < 0:
            raise AdapterError(name, f"{path.name} holds tensors of more than {max_bytes} bytes")
        tensors[key] = _store(value)
    return tensors


def _check_archive(name: str, file_name: str, file: BinaryIO, max_bytes: int) -> None:
    try:
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, ValueError, NotImplementedError) as error:
        raise AdapterError(
            name, f"{file_name} is damaged, or was saved by a PyTorch older than 1.6: {error}"
        ) from error
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        raise AdapterError(name, f"{file_name} is compressed, which PyTorch's own files are not")
    if sum(entry.file_size for entry in entries) > max_bytes:
        raise AdapterError(name, f"{file_name} claims to hold more than {max_bytes} bytes")
    file.seek(0)


def _store(tensor: torch.Tensor) -> StoredTensor:
    shape = tuple(tensor.shape)
    dtype = _DTYPES.get(tensor.dtype, str(tensor.dtype).removeprefix("torch."))
    if tensor.dtype not in _DTYPES:
        # Refused by name where its key is known; the bytes are of no use.
        return StoredTensor(dtype, shape, np.empty(0, np.uint8))
    # A parameter or a view becomes plain contiguous bytes.
    plain: Any = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return StoredTensor(dtype, shape, plain.numpy())
