"""Prefetching: bring adapters to the device before their requests can be admitted.

Admission starts the loads of all sequences it looks at. It stops looking when the seats are taken, the token budget is
spent or a sequence lacks pages; those behind would find their adapters missing when their turn comes. So after each
turn the next few waiting sequences, in the policy's order, are looked at for adapters that can be brought meanwhile.

Three rules keep a guess from doing harm:

* *It never delays a demanded load.* A link carries loads first in, first out. So a prefetch starts only on a link with
  nothing on it, one at a time: a load demanded later waits for the rest of one copy at most, and that copy is of an
  adapter that a sequence waits for already.
* *It takes only pages that sequences ahead will not need.* Pages come from free and idle ones (never from adapters that
  are wanted or in use), and the need of the sequences before it in line, KV and adapters, is set aside first.
* *It never evicts an item worth more than itself.* An adapter that a request waits for is certain to be used, an idle
  item is not. One that is merely due (``forecast.py``, off by default) is priced by the same rule as the items it would
  displace, and only while no request waits.

Source: Chameleon, section 4.2, "Prefetching"; look-ahead of ten after "vLLM multi-LoRA" (spec VL-5).
"""

from __future__ import annotations

from manylora.adapters.residency import TierState
from manylora.config import AdapterConfig
from manylora.engine.adapters.cache import AdapterCache
from manylora.engine.adapters.forecast import Forecast
from manylora.memory import Depth, PageCache, num_blocks
from manylora.scheduling import Policy
from manylora.types import AdapterKey, AdapterVersion, Tier

__all__ = ["Prefetcher"]


class Prefetcher:
    """Looks ahead, and starts at most one load on each idle link.

    Args:
        cache: Brings adapters.
        page_cache: Says how much could be claimed.
        policy: Says which sequence comes next.
        config: How far to look.
        block_size: Tokens per page.
    """

    def __init__(
        self, *, cache: AdapterCache, page_cache: PageCache, policy: Policy, config: AdapterConfig, block_size: int
    ) -> None:
        self._cache = cache
        self._page_cache = page_cache
        self._policy = policy
        self._look_ahead = config.look_ahead
        self._block_size = block_size
        self._forecast = Forecast() if config.forecast else None
        self.num_prefetches = 0

    def asked(self, key: AdapterKey, now: float) -> None:
        """Learn that a request for an adapter arrived."""
        if self._forecast is not None:
            self._forecast.used(key, now)

    def launch(self, now: float) -> None:
        """Start the loads that are worth starting now."""
        idle = [tier for tier in (Tier.HOST, Tier.DEVICE) if not self._cache.is_link_busy(tier)]
        if idle and self._look_ahead and len(self._policy):
            self._look(idle, now)
        elif idle and self._forecast is not None and not len(self._policy):
            self._foresee(self._forecast, idle, now)

    def _look(self, idle: list[Tier], now: float) -> None:
        """Prefetch for waiting sequences, in their order."""
        room = self._page_cache.num_claimable(Depth.IDLE)
        seen: set[AdapterKey] = set()
        for sequence in self._policy.upcoming(self._look_ahead):
            version = sequence.version
            if version is not None and version.key not in seen:
                seen.add(version.key)
                tier = self._missing_from(version.key)
                if tier in idle and (tier is Tier.HOST or version.num_pages <= room):
                    idle.remove(tier)
                    self._prefetch(version, now)
                    if not idle:
                        return
                if tier is not None:
                    room -= version.num_pages
            room -= num_blocks(sequence.num_tokens_to_hold, self._block_size)

    def _foresee(self, forecast: Forecast, idle: list[Tier], now: float) -> None:
        """Prefetch one adapter that is due, if keeping it till then is worth more than the items it displaces."""
        for key, until in forecast.due(now):
            if not self._cache.knows(key):
                forecast.forget(key)
                continue
            version = self._cache.residency(key).version
            tier = self._missing_from(key)
            if tier not in idle:
                continue
            # Some request in the time that is left: as good as one per that time.
            price = self._cache.reload_s(key) / (until - now) / version.num_pages
            if tier is Tier.HOST or self._page_cache.can_displace(version.num_pages, price, now):
                self._prefetch(version, now)
                return

    def _missing_from(self, key: AdapterKey) -> Tier | None:
        """Return the tier to bring an adapter to next; ``None`` if it is on the device, or on its way."""
        residency = self._cache.residency(key)
        if residency.device is TierState.RESIDENT or residency.is_loading:
            return None
        return Tier.DEVICE if residency.host is TierState.RESIDENT else Tier.HOST

    def _prefetch(self, version: AdapterVersion, now: float) -> None:
        self.num_prefetches += self._cache.ensure(version, now, Depth.IDLE).is_loading
