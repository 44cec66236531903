"""The interface of eviction policies: the order in which idle items are dropped when pages are short.

Idle adapters and idle prefix blocks compete for the same pages. A policy sees each item that becomes idle, is used or
is dropped, and names the item least worth keeping. ``core/memory/cache.py`` decides which items may be dropped (idle,
not pinned, not loading), and that a prefix block is never dropped before the blocks that depend on it.

::

    used(key) --> remove(key) --> ... in use ... --> add(item) --> victim() --> evict(key)
"""

from __future__ import annotations

from enum import IntEnum
from math import inf
from typing import NamedTuple, Protocol

from manylora.core.types import AdapterKey

__all__ = ["Depth", "EvictionPolicy", "IdleItem", "ItemKey"]

ItemKey = AdapterKey | int  # an adapter's key, or the page number of a prefix block


class Depth(IntEnum):
    """The last class of items that a claim may drop."""

    IDLE = 1
    WANTED = 2


class IdleItem(NamedTuple):
    """An item that may be dropped, and the work of its reload; a tuple, because each idle block has one."""

    key: ItemKey  # the adapter's key, or the page number of a prefix block
    num_pages: int  # its pages
    idle_since: float  # when it was last in use, in seconds
    copy_bytes: int = 0  # bytes to copy from the host to the device (adapters)
    read_bytes: int = 0  # bytes to read from disk before that; 0 while the host has a copy
    run_tokens: int = 0  # tokens to recompute (prefix blocks)
    adapter: AdapterKey | None = None  # the adapter that computed it (prefix blocks), if not the base


class EvictionPolicy(Protocol):
    """Ranks idle items, separately those that waiting requests need. ``now`` is in seconds.

    A class that inherits from it learns nothing from uses and has no price.
    """

    keeps_idle_adapters: bool = True  # whether an adapter stays on the device when no sequence uses or waits for it

    def used(self, key: ItemKey, now: float) -> None:
        """Record that a request needs an item, present or not."""
        return

    def forget(self, key: AdapterKey, now: float) -> None:
        """Forget an adapter that was unloaded."""
        return

    def add(self, item: IdleItem, depth: Depth) -> None:
        """Add an item that may be dropped."""

    def remove(self, key: ItemKey) -> None:
        """Remove an item that may no longer be dropped."""

    def evict(self, key: ItemKey, now: float) -> None:
        """Remove an item that was dropped for a claim."""
        self.remove(key)

    def victim(self, depth: Depth, now: float, spare: AdapterKey | None = None) -> IdleItem | None:
        """Return the item of that depth least worth keeping, other than ``spare``; it stays until it is removed."""

    def price(self, item: IdleItem, now: float) -> float:
        """Return the worth of keeping an idle item, in seconds of reloading saved per second and page.

        Infinite if the policy has another unit: a forecast then displaces no item.
        """
        return inf
