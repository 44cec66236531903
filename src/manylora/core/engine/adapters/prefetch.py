"""Prefetching: load adapters to the device before their requests can be admitted.

Admission starts the load of every sequence that it tries. It stops when the seats are taken, the token budget is spent
or a sequence lacks pages; later sequences would find their adapters missing. So after each turn the next few waiting
sequences, in the policy's order, are searched for adapters to load meanwhile.

Three rules keep a wrong guess harmless:

* *It never delays a demanded load.* A link serves loads first in, first out. So a prefetch starts only on an idle link,
  one at a time: a load demanded later waits for at most one copy, of an adapter that a sequence waits for already. (A
  step composition after a published baseline may ask for more at once, or for none.)
* *It claims only pages that sequences ahead will not need.* Pages come from free and idle ones (never from adapters
  that are wanted or in use), less the KV and adapter pages that the sequences before it in line need.
* *It never evicts an item worth more than itself.* An adapter that a request waits for is certain to be used, an idle
  item is not. One that is only forecast (``forecast.py``, off by default) is priced by the same rule as the items it
  would displace, and only while no request waits.

Adapters that were registered without their weights are read after all others, for no request (``background.py``).

Source: Chameleon, section 4.2, "Prefetching"; look-ahead of ten after "vLLM multi-LoRA" (spec VL-5).
"""

from __future__ import annotations

from manylora.core.adapters.residency import TierState
from manylora.core.config import AdapterConfig
from manylora.core.engine.adapters.background import BackgroundReads
from manylora.core.engine.adapters.cache import AdapterCache
from manylora.core.engine.adapters.forecast import Forecast
from manylora.core.memory import Depth, PageCache, num_blocks
from manylora.core.scheduling import Policy, StepComposition
from manylora.core.types import AdapterKey, AdapterVersion, Tier

__all__ = ["Prefetcher"]


class Prefetcher:
    """Starts loads on idle links, for upcoming sequences or for forecast requests: one, or as the composition asks."""

    def __init__(
        self,
        *,
        cache: AdapterCache,
        page_cache: PageCache,
        policy: Policy,
        composition: StepComposition,
        config: AdapterConfig,
        block_size: int,
    ) -> None:
        self._cache = cache
        self._page_cache = page_cache
        self._policy = policy
        self._composition = composition
        self._look_ahead = config.look_ahead
        self._block_size = block_size
        self._forecast = Forecast() if config.forecast else None
        self._background = BackgroundReads(cache) if config.background_reads and config.keep_host_copies else None
        self.num_prefetches = 0

    def asked(self, key: AdapterKey, now: float) -> None:
        """Learn that a request for an adapter arrived."""
        if self._forecast is not None:
            self._forecast.used(key, now)

    def add_unread(self, version: AdapterVersion) -> None:
        """Add a version that was registered without its weights."""
        if self._background is not None:
            self._background.add(version)

    def launch(self, now: float, *, is_busy: bool) -> None:
        """Start prefetches, and a background read; ``is_busy`` says whether requests are in flight."""
        idle = [tier for tier in (Tier.HOST, Tier.DEVICE) if not self._cache.is_link_busy(tier)]
        if idle and self._look_ahead and len(self._policy):
            self._prefetch_upcoming(dict.fromkeys(idle, self._composition.most_prefetches()), now)
        elif idle and self._forecast is not None and not len(self._policy):
            self._prefetch_due(self._forecast, idle, now)
        if self._background is not None and self._background.has_work:
            self._background.launch(now, is_busy=is_busy)

    def _prefetch_upcoming(self, most: dict[Tier, int], now: float) -> None:
        """Prefetch for waiting sequences, in their order: to each tier at most so many."""
        if not any(most.values()):
            return
        room = self._page_cache.num_claimable(Depth.IDLE)
        seen: set[AdapterKey] = set()
        for sequence in self._policy.upcoming(self._look_ahead):
            version = sequence.version
            if version is not None and version.key not in seen:
                seen.add(version.key)
                tier = self._missing_from(version.key)
                if tier is not None and most.get(tier) and (tier is Tier.HOST or version.num_pages <= room):
                    most[tier] -= 1
                    self._prefetch(version, now)
                    if not any(most.values()):
                        return
                if tier is not None:
                    room -= version.num_pages
            room -= num_blocks(sequence.num_tokens_to_hold, self._block_size)

    def _prefetch_due(self, forecast: Forecast, idle: list[Tier], now: float) -> None:
        """Prefetch one adapter that is due, if it is worth more until then than the items it displaces."""
        for key, until in forecast.due(now):
            if not self._cache.knows(key):
                forecast.forget(key)
                continue
            version = self._cache.residency(key).version
            tier = self._missing_from(key)
            if tier not in idle:
                continue
            # One request is expected in the remaining time.
            price = self._cache.reload_s(key) / (until - now) / version.num_pages
            if tier is Tier.HOST or self._page_cache.can_displace(version.num_pages, price, now):
                self._prefetch(version, now)
                return

    def _missing_from(self, key: AdapterKey) -> Tier | None:
        """Return the next tier to load an adapter to; ``None`` if it is on the device, or loading."""
        residency = self._cache.residency(key)
        if residency.device is TierState.RESIDENT or residency.is_loading:
            return None
        return Tier.DEVICE if residency.host is TierState.RESIDENT else Tier.HOST

    def _prefetch(self, version: AdapterVersion, now: float) -> None:
        self.num_prefetches += self._cache.ensure(version, now, Depth.IDLE).is_loading
