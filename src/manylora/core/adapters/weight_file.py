"""The weight file of an adapter, open: its tensors first, their bytes when they are wanted.

The header of a safetensors file is read alone, or the pickle of a ``.bin`` file. So the names, types, shapes and sizes
of all tensors are checked before a byte of them is read, and a large file costs no more than a small one until it has
been found to fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Self

from manylora.core.adapters.bin_file import describe_bin
from manylora.core.adapters.folder import Folder
from manylora.core.adapters.method import ModuleWeights
from manylora.core.adapters.opened import FileIdentity, LocalFile, OpenFile
from manylora.core.adapters.shape import BaseShape
from manylora.core.adapters.tensors import StoredTensor
from manylora.core.adapters.weight_source import fetch, parse_header, read_header_bytes
from manylora.core.errors import AdapterError

__all__ = ["WeightFile", "check_size", "least_bytes"]

LEAST_ELEMENT_BYTES = 2


class WeightFile:
    """The open weight file of a folder; a context, which closes it.

    Args:
        folder: The folder.
        max_bytes: Largest weight file.
        admit: Takes the identity of the open file before it is parsed, and raises to refuse it.

    Raises:
        AdapterError: The file is missing, unreadable, too short for its header, or larger than ``max_bytes``.
    """

    def __init__(
        self, folder: Folder, max_bytes: int, admit: Callable[[FileIdentity], None] = lambda identity: None
    ) -> None:
        name, file = folder.name, folder.find_weights()
        opened = folder.open(file, max_bytes)
        self.num_bytes = opened.size
        self.identity = opened.identity
        self.is_pinned = opened.is_pinned
        """Whether ``fetch`` fails for bytes that were written after the opening."""
        self.header: bytes | None = None
        """The header of a safetensors file; ``None`` of a pickle."""
        self._name = name
        self._source: OpenFile = opened
        self._tensors: Mapping[str, StoredTensor] | None = None
        try:
            admit(self.identity)
            if isinstance(opened, LocalFile) and file.endswith(".bin"):
                self._tensors = describe_bin(name, opened.file, max_bytes)
            else:
                self.header = read_header_bytes(name, opened)
        except BaseException:
            opened.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """Its tensors by key, without their bytes.

        Raises:
            AdapterError: The header is damaged.
        """
        if self._tensors is None:
            assert self.header is not None
            self._tensors = parse_header(self._name, self.header, self.num_bytes)
        return self._tensors

    def fetch(self, weights: Sequence[ModuleWeights]) -> Sequence[ModuleWeights]:
        """Return weights of its tensors with their bytes.

        Raises:
            AdapterError: They cannot be read.
        """
        return fetch(self._source, weights)

    def close(self) -> None:
        """Close the file."""
        self._source.close()


def least_bytes(weights: Iterable[ModuleWeights]) -> int:
    """Return the least memory that weights take in any type, in bytes; costs no layout."""
    return LEAST_ELEMENT_BYTES * sum(w.rank * (w.module.in_features + w.module.out_features) for w in weights)


def check_size(name: str, weights: Iterable[ModuleWeights], base: BaseShape, max_pages: int | None) -> None:
    """Raise ``AdapterError`` if weights need more than ``max_pages`` of a base in any type; costs no layout."""
    if max_pages is None:
        return
    least = least_bytes(weights)
    if least > max_pages * base.page.num_bytes:
        pages = -(-least // base.page.num_bytes)
        raise AdapterError(name, f"needs {pages} pages or more; one adapter may take {max_pages} (--max-adapter-share)")
