"""Read a registered adapter again, layer by layer: its first layers can be used while the last are on their way.

::

    header    names, types and places of all tensors: everything is checked but the numbers, and the layout is known
    layer 0   a range of the file -> digest | compared with the one registered -> packed | its full pages may be used
    layer 1                                 | (if large, read and hashed while layer 0 is packed)  | ...

A layer is used once it is known to hold the weights that were registered, never before. Without digests of the layers,
the pages count as full when the last layer has been read and the content hash of all is right.

A version with a provisional key (``identity``) is read for the first time: its files must have the file key that they
were registered with before the first byte is read and after the last. Then its content is known. In a registry with
strong ETags, every range is known to be of the file with that file key, and its layers are used as they come.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

from numpy.typing import NDArray

from manylora.core.adapters.folder import FileIdentity, read_config_file
from manylora.core.adapters.hash_cache import KnownContent
from manylora.core.adapters.identity import content_key, digest_layer, is_provisional, provisional_key, split_digests
from manylora.core.adapters.layout import AdapterLayout, layout_of
from manylora.core.adapters.packed import choose_dtype, exact_dtypes, pack_groups
from manylora.core.adapters.read import MatchedShapes, ReadRules, check_finite
from manylora.core.adapters.tensors import ModuleWeights
from manylora.core.adapters.weight_file import WeightFile, least_bytes
from manylora.core.errors import AdapterError
from manylora.core.types import AdapterVersion

__all__ = ["LayerReader"]

LEAST_AHEAD_BYTES = 1024 * 1024
"""Bytes of a layer from which another thread pays: they take about a millisecond to read and to hash."""


class LayerReader:
    """A registered version whose files are open; a context, which closes them.

    ``shapes`` remembers shapes from one reader to the next. ``AdapterError`` if its files are gone or broken, or belong
    to another version now.
    """

    def __init__(self, version: AdapterVersion, rules: ReadRules, shapes: MatchedShapes | None = None) -> None:
        self.first_content: KnownContent | None = None
        """The content of a version with a provisional key, once it was read for the first time."""
        self._version = version
        self._rules = rules
        self._base = base = rules.base
        self._name = version.source
        self._digests = split_digests(version.layer_digests)
        self._is_first = is_provisional(version.key) and not self._digests
        self._folder = rules.open(self._name, version.source)
        written = read_config_file(self._folder)

        def admit(weights: FileIdentity) -> None:
            if self._is_first and provisional_key(rules.make_file_key(written, weights)) != version.key:
                raise self._changed()

        self._file = WeightFile(self._folder, rules.max_bytes, admit)
        try:
            shapes = shapes or MatchedShapes(base)
            matched = shapes.match(self._name, written, self._file)
            if least_bytes(matched.weights) > version.host_bytes:
                raise self._changed()  # before it is laid out, since its ranks have no bound yet
            dtype = version.dtype or choose_dtype(self._file.fetch(matched.weights), base.page.adapter_dtype)
            self.layout: AdapterLayout = layout_of(matched.weights, base, dtype)
            self._layers = matched.layers
            is_same = self.layout.num_pages == version.num_pages
            if self._digests:
                is_same = is_same and len(self._digests) == len(self._layers)
                is_same = is_same and self._is_content(self._digests)
            if not is_same:
                raise self._changed()
            shapes.remember(matched)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files."""
        self._file.close()

    def pack(self, image: NDArray[Any]) -> Iterator[int]:
        """Fill an image of the layout; yield the number of its pages, from the first on, that hold their final content.

        ``AdapterError`` if a layer cannot be read, or holds other weights than those that were registered.
        """
        digests: list[bytes] = []
        exact: list[str] = []
        for number, ((groups, num_full), (weights, digest)) in enumerate(
            zip(self.layout.layers(), self._fetched(), strict=True)
        ):
            digests.append(digest)
            if not self._digests:  # else these very bytes have been checked
                check_finite(self._name, weights)
            elif digest != self._digests[number]:
                raise self._changed()
            if self._is_first and self._rules.asked_dtype == "auto":
                of_layer = exact_dtypes(weights)
                exact = of_layer if number == 0 else [dtype for dtype in exact if dtype in of_layer]
            pack_groups(self._name, image, groups, weights, self.layout.dtype)
            is_last = number + 1 == len(self._layers)
            if not is_last and (self._digests or (self._is_first and self._file.is_pinned)):
                yield num_full
        if not self._is_content(digests) or (self._is_first and not self._has_its_file_key()):
            raise self._changed()
        if self._is_first:
            dtype = exact[0] if exact else self._rules.asked_dtype
            key = content_key(self._base, digests, self._version.invocation)
            self.first_content = KnownContent(key, dtype, b"".join(digests))
        yield self.layout.num_pages

    def _has_its_file_key(self) -> bool:
        """Whether the bytes that were read are known to be of the files with the file key that was registered."""
        if self._file.is_pinned:
            return True
        file_key, _ = self._rules.file_key_of(self._folder)
        return provisional_key(file_key) == self._version.key

    def _is_content(self, digests: list[bytes]) -> bool:
        """Whether layers of these digests are the version, as far as its content is known."""
        if not is_provisional(self._version.key):
            return content_key(self._base, digests, self._version.invocation) == self._version.key
        return self._is_first or digests == self._digests

    def _fetched(self) -> Iterator[tuple[Sequence[ModuleWeights], bytes]]:
        """Yield each layer's weights and digest; large layers are read while the one before is packed."""
        if self._version.host_bytes < LEAST_AHEAD_BYTES * len(self._layers):
            yield from map(self._fetch_and_digest, self._layers)
            return
        with ThreadPoolExecutor(1) as ahead:
            coming = ahead.submit(self._fetch_and_digest, self._layers[0])
            for layer in self._layers[1:]:
                found = coming.result()
                coming = ahead.submit(self._fetch_and_digest, layer)
                yield found
            yield coming.result()

    def _fetch_and_digest(self, weights: Sequence[ModuleWeights]) -> tuple[Sequence[ModuleWeights], bytes]:
        weights = self._file.fetch(weights)
        return weights, digest_layer(weights)

    def _changed(self) -> AdapterError:
        return AdapterError(
            self._name,
            f"its files changed since it was registered (version {self._version.key[:12]} then); register it again",
        )
