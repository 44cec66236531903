"""Read a registered adapter again, layer by layer: its first layers can be used while the last are on their way.

::

    header    names, types and places of all tensors: everything is checked but the numbers, and the layout is known
    layer 0   a range of the file -> compared with its digest -> packed | its full pages may be used
    layer 1        (read while layer 0 is packed)                        | ...

A layer is used once it is known to hold the weights that were registered, never before. Without digests of the layers,
the pages count as full when the last layer has been read and the content hash of all is right.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self

from numpy.typing import NDArray

from manylora.adapters.config import read_config
from manylora.adapters.content import by_layer, content_key, digest_layer, split_digests
from manylora.adapters.layout import AdapterLayout
from manylora.adapters.method import ModuleWeights
from manylora.adapters.methods import find_method
from manylora.adapters.packed import pack_groups
from manylora.adapters.precision import choose_dtype
from manylora.adapters.read import check_directory, check_finite, find_weights, read_tensors
from manylora.adapters.shape import BaseShape
from manylora.adapters.weight_source import LocalFile, fetch, read_header
from manylora.errors import AdapterError
from manylora.types import AdapterVersion

__all__ = ["LayerReader"]


class LayerReader:
    """A registered version whose files are open; a context, which closes them.

    A ``.bin`` file has no header that could be read alone, and is read whole.

    Args:
        version: The version, as it was registered.
        base: The base model.
        max_bytes: Largest weight file.

    Raises:
        AdapterError: Its files are gone or broken, or belong to another version now.
    """

    def __init__(self, version: AdapterVersion, base: BaseShape, *, max_bytes: int) -> None:
        self._version = version
        self._base = base
        self._name = version.source
        self._digests = split_digests(version.layer_digests)
        directory = check_directory(self._name, version.source)
        config = read_config(self._name, directory)
        method = find_method(config)
        settings = method.parse(self._name, config)
        file = find_weights(self._name, directory)
        self._source: LocalFile | None = None
        if file.suffix == ".bin":
            tensors, _ = read_tensors(self._name, directory, max_bytes)
        else:
            self._source = LocalFile(self._name, file, max_bytes)
        try:
            if self._source is not None:
                tensors = read_header(self._name, self._source)
            weights = settings.match(tensors, base)
            dtype = version.dtype or choose_dtype(self._fetch(weights), base.page.dtype)
            self.layout: AdapterLayout = method.lay_out({w.module.name: w.rank for w in weights}, base, dtype)
            self._layers = by_layer(weights)
            is_same = self.layout.num_pages == version.num_pages
            if self._digests:
                is_same = is_same and len(self._digests) == len(self._layers)
                is_same = is_same and content_key(base, self._digests) == version.key
            if not is_same:
                raise self._changed()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the files."""
        if self._source is not None:
            self._source.close()

    def pack(self, image: NDArray[Any]) -> Iterator[int]:
        """Fill an image of the layout; yield the number of its pages, from the first on, that hold their final content.

        Raises:
            AdapterError: A layer cannot be read, or holds other weights than those that were registered.
        """
        digests = []
        with ThreadPoolExecutor(1) as ahead:
            coming = ahead.submit(self._fetch, self._layers[0])
            for number, (groups, num_full) in enumerate(self.layout.layers()):
                weights = coming.result()
                is_last = number + 1 == len(self._layers)
                if not is_last:
                    coming = ahead.submit(self._fetch, self._layers[number + 1])
                digests.append(digest_layer(weights))
                if self._digests and digests[-1] != self._digests[number]:
                    raise self._changed()
                check_finite(self._name, weights)
                pack_groups(self._name, image, groups, weights, self.layout.dtype)
                if self._digests and not is_last:
                    yield num_full
        if content_key(self._base, digests) != self._version.key:
            raise self._changed()
        yield self.layout.num_pages

    def _fetch(self, weights: Sequence[ModuleWeights]) -> Sequence[ModuleWeights]:
        return weights if self._source is None else fetch(self._source, weights)

    def _changed(self) -> AdapterError:
        return AdapterError(
            self._name,
            f"its files changed since it was registered (version {self._version.key[:12]} then); register it again",
        )
