"""The registry of adapter names.

A name points to a version; replacing an adapter in place points it to another version. Two names may share a version
(the same weights uploaded twice are held once). A version outlives its last name as long as requests use it.

A *label* is a name that begins with ``@``, as no adapter's does. A fleet holds versions by labels: they are neither
counted nor shown, and no request finds an adapter by one.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

from manylora.core.errors import AdapterExists, AdapterNotFound, CapacityError
from manylora.core.types import AdapterKey, AdapterVersion

__all__ = ["LABEL_MARK", "AdapterRegistry", "NamedAdapter", "is_label"]

LABEL_MARK = "@"


@dataclass(slots=True)
class NamedAdapter:
    """A registered name."""

    name: str
    version: AdapterVersion  # its current version
    generation: int = 1  # starts at 1 and grows by one with each replacement
    is_pinned: bool = False  # whether its version must stay on the device
    num_requests: int = 0  # requests for this name
    num_hits: int = 0  # requests that found the adapter on the device


def is_label(name: str) -> bool:
    """Whether a name holds a version, and is no adapter's."""
    return name.startswith(LABEL_MARK)


class AdapterRegistry:
    """Resolves names to versions; at most ``max_registered`` names, and never ``base_name``, the base model's.

    ``pinned`` has the records of pinned names.
    """

    def __init__(self, base_name: str, max_registered: int) -> None:
        self.base_name = base_name
        self._max_registered = max_registered
        self._by_name: dict[str, NamedAdapter] = {}
        self._num_labels = 0
        self._names_of: dict[AdapterKey, dict[str, None]] = {}
        self.pinned: dict[str, NamedAdapter] = {}
        self._used: dict[str, NamedAdapter] = {}

    def __len__(self) -> int:
        return len(self._by_name) - self._num_labels

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    def get(self, name: str) -> NamedAdapter:
        """Return a name's record, or raise ``AdapterNotFound``."""
        try:
            return self._by_name[name]
        except KeyError:
            raise AdapterNotFound(name, "no adapter of that name is loaded") from None

    def all(self) -> list[NamedAdapter]:
        """Return every record but labels', in order of registration."""
        return [named for name, named in self._by_name.items() if not is_label(name)]

    def first(self, num: int) -> list[NamedAdapter]:
        """Return the records but labels' that were registered first."""
        return self.all() if self._num_labels else list(islice(self._by_name.values(), num))

    def used(self) -> list[NamedAdapter]:
        """Return the records of names that a request has asked for."""
        return list(self._used.values())

    def note_request(self, name: str) -> None:
        """Count a request; the rest of an answer may have a name that was removed, which is not counted."""
        if (named := self._by_name.get(name)) is not None:
            self._used[name] = named
            named.num_requests += 1

    def note_hit(self, name: str) -> None:
        """Count a request that found its adapter on the device, as ``note_request`` counts requests."""
        if (named := self._by_name.get(name)) is not None:
            named.num_hits += 1

    def names_of(self, key: AdapterKey) -> tuple[str, ...]:
        """Return the names that point to a version, labels included."""
        return tuple(self._names_of.get(key, ()))

    def shown_names_of(self, key: AdapterKey) -> list[str]:
        """Return the names that point to a version, without labels."""
        return [name for name in self._names_of.get(key, ()) if not is_label(name)]

    def set_pinned(self, name: str, pinned: bool) -> None:
        """Pin or unpin a name, or raise ``AdapterNotFound``; a replacement in place stays pinned."""
        named = self.get(name)
        named.is_pinned = pinned
        if pinned:
            self.pinned[name] = named
        else:
            self.pinned.pop(name, None)

    def is_pinned(self, key: AdapterKey) -> bool:
        """Whether any name pins the version."""
        return any(self._by_name[name].is_pinned for name in self._names_of.get(key, ()))

    def check_can_add(self, name: str, *, replace: bool) -> None:
        """Check that ``add`` would succeed.

        ``AdapterExists`` if the name is the base model's, or taken and ``replace`` is not set; ``CapacityError`` if too
        many names.
        """
        if name == self.base_name:
            raise AdapterExists(name, "the base model has that name")
        if name in self._by_name:
            if not replace:
                raise AdapterExists(name, "already loaded; set load_inplace to replace it")
        elif len(self) >= self._max_registered and not is_label(name):
            raise CapacityError(
                f"{self._max_registered} adapters are registered, the most allowed; unload some first", retry_after_s=60
            )

    def add(self, name: str, version: AdapterVersion, *, replace: bool) -> AdapterVersion | None:
        """Point ``name`` to ``version`` and return its previous version; raises as ``check_can_add`` does."""
        self.check_can_add(name, replace=replace)
        named = self._by_name.get(name)
        if named is None:
            self._by_name[name] = NamedAdapter(name, version)
            self._num_labels += is_label(name)
            old = None
        else:
            old = named.version
            self._unlink(old.key, name)
            named.version = version
            named.generation += 1
        self._names_of.setdefault(version.key, {})[name] = None
        return old

    def remove(self, name: str) -> AdapterVersion:
        """Remove ``name`` and return its version, or raise ``AdapterNotFound``."""
        version = self.get(name).version
        del self._by_name[name]
        self._num_labels -= is_label(name)
        self.pinned.pop(name, None)
        self._used.pop(name, None)
        self._unlink(version.key, name)
        return version

    def _unlink(self, key: AdapterKey, name: str) -> None:
        names = self._names_of[key]
        del names[name]
        if not names:
            del self._names_of[key]
