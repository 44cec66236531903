"""The order in which idle items go when pages run short: the interface every eviction policy implements.

Idle adapters and idle prefix blocks compete for the same pages. A policy learns of each item that becomes idle,
is used or is gone, and names the one least worth keeping. ``memory/cache.py`` decides which may go at all (idle, not
pinned, not on its way), and that a prefix block never goes before the blocks that need it.

::

    used(key) --> remove(key) --> ... in use ... --> add(item) --> victim() --> evict(key)
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple, Protocol

from manylora.types import AdapterKey

__all__ = ["Depth", "EvictionPolicy", "IdleItem", "ItemKey"]

ItemKey = AdapterKey | int
"""An adapter's key, or the page number of a prefix block."""


class Depth(IntEnum):
    """How far down a claim may reach."""

    IDLE = 1
    WANTED = 2


class IdleItem(NamedTuple):
    """Something that could be dropped, and what bringing it back would take; a tuple, for each idle block is one.

    Args:
        key: The adapter's key, or the page number of a prefix block.
        num_pages: What dropping it frees.
        idle_since: When it was last in use, in seconds.
        copy_bytes: Bytes to copy from the host to the device (adapters).
        read_bytes: Bytes to read from disk before that; 0 while the host holds a copy.
        run_tokens: Tokens to run through the model again (prefix blocks).
    """

    key: ItemKey
    num_pages: int
    idle_since: float
    copy_bytes: int = 0
    read_bytes: int = 0
    run_tokens: int = 0


class EvictionPolicy(Protocol):
    """Ranks idle items, those that waiting requests want apart from the others. ``now`` is in seconds."""

    @property
    def keeps_idle_adapters(self) -> bool:
        """Whether an adapter stays on the device once no sequence uses or waits for it."""
        ...

    def used(self, key: ItemKey, now: float) -> None:
        """Learn that a request needs it, whether or not it is there."""
        ...

    def forget(self, key: AdapterKey, now: float) -> None:
        """Forget an adapter that is gone for good."""
        ...

    def add(self, item: IdleItem, depth: Depth) -> None:
        """Take in an item that may be dropped from now on."""
        ...

    def remove(self, key: ItemKey) -> None:
        """Take out an item that may not be dropped any more."""
        ...

    def evict(self, key: ItemKey, now: float) -> None:
        """Take out an item that was dropped for room."""
        ...

    def victim(self, depth: Depth, now: float, spare: AdapterKey | None = None) -> IdleItem | None:
        """Return the item of that depth least worth keeping, other than ``spare``; it stays until taken out."""
        ...

    def price(self, item: IdleItem, now: float) -> float:
        """Return what keeping an idle item saves, in seconds of reloading per second and page.

        Infinite if the policy knows no such figure: nothing that is merely guessed may then displace it.
        """
        ...
