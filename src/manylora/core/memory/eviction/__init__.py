"""Eviction: the order in which idle items are dropped when pages are short.

``policy.py`` is the interface. ``price.py`` and policies by one number per item (``ranking.py``), such as LRU, have one
order over adapters and prefix blocks. ``fastlibra.py`` has one too, in which
blocks depend on their adapter. ``published.py`` has policies that rank adapters, combined with prefix blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter

from manylora.core.memory.eviction.fastlibra import FastLibraEviction
from manylora.core.memory.eviction.policy import Depth, EvictionPolicy, IdleItem, ItemKey, LinearCost, ReloadCosts
from manylora.core.memory.eviction.price import PriceEviction
from manylora.core.memory.eviction.published import ByAge, GdsfScore, WeightedScore
from manylora.core.memory.eviction.ranking import KeyedEviction
from manylora.core.plugins import made_by, options_for

__all__ = [
    "EVICTION_POLICIES",
    "Depth",
    "EvictionPolicy",
    "IdleItem",
    "ItemKey",
    "KeyedEviction",
    "LinearCost",
    "ReloadCosts",
    "make_eviction_policy",
]


EVICTION_POLICIES: dict[str, Callable[..., EvictionPolicy]] = {
    "chameleon": lambda costs: ByAge(WeightedScore(0.45, 0.10, 0.45)),
    "fair": lambda costs: ByAge(WeightedScore(1 / 3, 1 / 3, 1 / 3)),
    "fastlibra": FastLibraEviction,
    "gdsf": lambda costs: ByAge(GdsfScore(costs)),
    "lru": lambda costs: KeyedEviction(attrgetter("idle_since")),
    "none": lambda costs: KeyedEviction(attrgetter("idle_since"), keeps_idle_adapters=False),
    "price": PriceEviction,
}


def make_eviction_policy(name: str, costs: ReloadCosts, given: Mapping[str, object] | None = None) -> EvictionPolicy:
    """Return an eviction policy by its name in ``EVICTION_POLICIES``, or a plug-in (``plugins.py``), with its options.

    The adapter cache and the core keep ``costs`` up to date. ``ConfigError`` if the name is unknown or no eviction
    policy, or an option is wrong.
    """
    options = options_for("eviction", name, EVICTION_POLICIES, given or {})
    taken = () if options is None else (options,)
    return made_by("eviction", name, EVICTION_POLICIES, costs, *taken, seam=EvictionPolicy)
