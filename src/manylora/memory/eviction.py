"""Which idle thing goes first when pages run short.

Idle adapters and idle prefix blocks stand in one order: whatever is worth least per page goes, of either
kind. A policy only ranks; what may be ranked at all (idle, not pinned, not on its way) is decided by
``memory/store.py``.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from manylora.errors import ConfigError
from manylora.types import AdapterKey

__all__ = ["EVICTION_POLICIES", "EvictionPolicy", "IdleItem", "LruEviction", "make_eviction_policy"]


@dataclass(frozen=True, slots=True)
class IdleItem:
    """Something that could be dropped.

    Args:
        key: The adapter's key, or the page number of a prefix block.
        num_pages: What dropping it frees.
        num_bytes: What bringing it back would copy (adapter) or recompute (prefix block).
    """

    key: AdapterKey | int
    num_pages: int
    num_bytes: int

    @property
    def is_adapter(self) -> bool:
        """Whether it is an adapter rather than a prefix block."""
        return isinstance(self.key, str)


class EvictionPolicy(Protocol):
    """Ranks idle items. ``now`` is seconds on the loop's clock."""

    def add(self, item: IdleItem, now: float) -> None:
        """Take in an item that was used until ``now`` and is idle from here on."""
        ...

    def remove(self, key: AdapterKey | int) -> None:
        """Forget an item: it is in use again or gone."""
        ...

    def victim(self, now: float, spare: AdapterKey | None = None) -> IdleItem | None:
        """Return the item least worth keeping, other than ``spare``; it stays until removed."""
        ...


class LruEviction:
    """Least recently used first, adapters and prefix blocks alike."""

    def __init__(self) -> None:
        self._items: OrderedDict[AdapterKey | int, IdleItem] = OrderedDict()

    def add(self, item: IdleItem, now: float) -> None:
        """Put ``item`` last in line."""
        self._items[item.key] = item
        self._items.move_to_end(item.key)

    def remove(self, key: AdapterKey | int) -> None:
        """Take an item out of line."""
        del self._items[key]

    def victim(self, now: float, spare: AdapterKey | None = None) -> IdleItem | None:
        """Return the item idle for longest."""
        return next((item for item in self._items.values() if item.key != spare), None)


EVICTION_POLICIES: dict[str, Callable[[], EvictionPolicy]] = {"lru": LruEviction}


def make_eviction_policy(name: str) -> EvictionPolicy:
    """Make an eviction policy by name.

    Raises:
        ConfigError: No policy has that name.
    """
    if name not in EVICTION_POLICIES:
        raise ConfigError(f"Got eviction = {name!r}, expected one of {', '.join(sorted(EVICTION_POLICIES))}")
    return EVICTION_POLICIES[name]()
