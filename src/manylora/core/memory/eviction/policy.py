"""The interface of eviction policies: the order in which idle items are dropped when pages are short.

Idle adapters and idle prefix blocks compete for the same pages. A policy sees each item that becomes idle, is used or
is dropped, and names the item least worth keeping. ``core/memory/cache.py`` decides which items may be dropped (idle,
not pinned, not loading), and that a prefix block is never dropped before the blocks that depend on it.

::

    used(key) --> remove(key) --> ... in use ... --> add(item) --> victim() --> evict(key)

Durations of reloads are measured on copies, reads and steps. Each is a constant plus a rate per byte (or token), fitted
to recent observations by least squares. Because of the constant a small adapter costs more per byte than a large one.
"""

from __future__ import annotations

from enum import IntEnum
from math import inf
from typing import NamedTuple, Protocol

from manylora.core.types import AdapterKey

__all__ = ["Depth", "EvictionPolicy", "IdleItem", "ItemKey", "LinearCost", "ReloadCosts"]

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


FADE = 0.995  # factor on an observation's weight with every later one: a memory of about 200 observations
GUESS = 0.05  # weight of each of the guess's two points: enough to determine coefficients that observations do not


class LinearCost:
    """A line through noisy points with exponential fading, starting from a guess, in seconds per byte or token.

    The guess counts as two observations of low weight, at 0 and at the ``typical`` amount.
    """

    def __init__(self, fixed_s: float, per_unit_s: float, typical: float) -> None:
        self._scale = typical  # unit of amounts, for numerical stability
        self._guess = (fixed_s, per_unit_s * typical)
        self.num_observed = self._x = self._xx = self._t = self._xt = 0.0
        self._line = self._guess
        self._last = (0.0, fixed_s)

    @property
    def last_residual_s(self) -> float:
        """Duration of the last observation beyond the line, in seconds."""
        amount, seconds = self._last
        return seconds - self.seconds(amount)

    def observe(self, amount: float, seconds: float) -> None:
        """Record that ``amount`` took ``seconds``."""
        x = amount / self._scale
        self.num_observed = self.num_observed * FADE + 1.0
        self._x = self._x * FADE + x
        self._xx = self._xx * FADE + x * x
        self._t = self._t * FADE + seconds
        self._xt = self._xt * FADE + x * seconds
        self._line = self._fit()
        self._last = (amount, seconds)

    def seconds(self, amount: float) -> float:
        """Return the duration of ``amount``."""
        return self._line[0] + self._line[1] * amount / self._scale

    def marginal_s(self, amount: float) -> float:
        """Return the duration that ``amount`` more adds to work in progress."""
        return self._line[1] * amount / self._scale

    def _fit(self) -> tuple[float, float]:
        """Fit the observations and the guess, at ``x = 0`` and ``x = 1``; no coefficient is negative."""
        fixed, slope = self._guess
        n, x, xx = self.num_observed + 2 * GUESS, self._x + GUESS, self._xx + GUESS
        t, xt = self._t + GUESS * (2 * fixed + slope), self._xt + GUESS * (fixed + slope)
        per_unit = (n * xt - x * t) / (n * xx - x * x)
        if per_unit <= 0.0:
            return t / n, 0.0
        constant = (t - per_unit * x) / n
        return (constant, per_unit) if constant >= 0.0 else (0.0, xt / xx)


class ReloadCosts:
    """Durations of reloads of adapters and prefix blocks.

    Guesses before the first measurements: a PCIe 4 link, an NVMe disk, an 8B model on a data-centre GPU.
    """

    def __init__(self) -> None:
        self.copy = LinearCost(0.0005, 1 / 16e9, 64e6)
        self.read = LinearCost(0.005, 1 / 2e9, 64e6)
        self.step = LinearCost(0.02, 0.0001, 512.0)

    def reload_s(self, item: IdleItem) -> float:
        """Return the duration of a reload, in seconds, without waits.

        A block is recomputed within a step that runs anyway: its cost is the step's increase.
        """
        if isinstance(item.key, int):
            return self.step.marginal_s(item.run_tokens)
        return self.copy.seconds(item.copy_bytes) + (self.read.seconds(item.read_bytes) if item.read_bytes else 0.0)
