"""Prefetching: load adapters to the device before their requests can be admitted.

Admission starts the load of every sequence that it tries. It stops when the seats are taken, the token budget is spent
or a sequence lacks pages; later sequences would find their adapters missing. So after each turn the next few waiting
sequences, in the policy's order, are searched for adapters to load meanwhile.

Three rules keep a wrong guess harmless:

* *It never delays a demanded load.* A link serves loads first in, first out. So a prefetch starts only on an idle link,
  one at a time: a load demanded later waits for at most one copy, of an adapter that a sequence waits for already. (A
  step composition after a published baseline may ask for more at once, or for none.)
* *It claims only pages that sequences ahead will not need.* Pages come from free and idle pages (never from adapters
  that are wanted or in use), less the KV and adapter pages that the sequences before it in line need.
* *It never evicts an item worth more than itself.* An adapter that a request waits for is certain to be used, an idle
  item is not. One that is only forecast (``forecast.py``, off by default) is priced by the same rule as
  the items it would displace, and only while no request waits.

Adapters that were registered without their weights are read in the background, while the reader has nothing else to do.
A fault in the weights is then found before the first request, and the first request finds them in host memory. Reads
give way to everything that was demanded: one at a time, only while no load is in flight, only into host memory that is
spare, and while requests are in flight only a small share of the time. A read that is demanded meanwhile has another
reader.

Source: Chameleon, section 4.2, "Prefetching"; look-ahead of ten after "vLLM multi-LoRA" (spec VL-5).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import InitVar, dataclass

from manylora.core.config import AdapterConfig
from manylora.core.engine.adapters.cache import AdapterCache
from manylora.core.engine.adapters.forecast import Forecast, Traffic
from manylora.core.engine.adapters.loader import AdapterLoader
from manylora.core.engine.adapters.residency import TierState
from manylora.core.engine.status import Counters
from manylora.core.memory import Depth, PageCache, num_blocks
from manylora.core.scheduling import Policy, StepComposition
from manylora.core.types import AdapterKey, AdapterVersion, Tier

__all__ = ["Prefetcher"]


FORECASTS: dict[str, type[Forecast | Traffic]] = {"gaps": Forecast, "traffic": Traffic}
BUSY_SHARE = 0.05  # share of the time that background reads may take while requests are in flight: they slow steps down


@dataclass(eq=False)
class Prefetcher:
    """Starts loads on idle links, for upcoming sequences or for forecast requests: one, or as the composition asks."""

    config: InitVar[AdapterConfig]
    _cache: AdapterCache
    _loader: AdapterLoader
    _page_cache: PageCache
    _policy: Policy
    _composition: StepComposition
    _counters: Counters

    def __post_init__(self, config: AdapterConfig) -> None:
        self._look_ahead = config.look_ahead
        self._forecast = FORECASTS[config.forecast_by]() if config.forecast else None
        reads_ahead = config.background_reads and config.keep_host_copies
        self._background = BackgroundReads(self._cache, self._loader) if reads_ahead else None

    def asked(self, key: AdapterKey, now: float) -> None:
        """Learn that a request for an adapter arrived."""
        if self._forecast is not None:
            self._forecast.used(key, now)

    def forget(self, key: AdapterKey) -> None:
        """Expect no more requests for an adapter: no name stands for it."""
        if self._forecast is not None:
            self._forecast.forget(key)

    def read_later(self, version: AdapterVersion) -> None:
        """Add a version that was registered without its weights, to be read in the background."""
        if self._background is not None:
            self._background.queue.append(version.key)

    def launch(self, now: float, *, is_busy: bool) -> None:
        """Start prefetches, and a background read; ``is_busy`` says whether requests are in flight."""
        loads = self._loader.loads
        tiers = Tier.HOST, Tier.DEVICE
        idle = [tier for tier in tiers if not loads.to(tier)] if loads.in_flight else tiers
        if idle and is_busy and self._look_ahead and len(self._policy):
            self._prefetch_upcoming(idle, now)
        elif idle and self._forecast is not None and not len(self._policy):
            self._prefetch_due(self._forecast, idle, now)
        if self._background is not None and self._background.queue:
            self._background.launch(now, is_busy=is_busy)

    def _prefetch_upcoming(self, idle: Seq[Tier], now: float) -> None:
        """Prefetch for waiting sequences, in their order: to each idle tier as many as the composition allows."""
        upcoming = self._policy.upcoming(self._look_ahead)
        missing: dict[AdapterKey, int] = {}  # and the sequences ahead of the first that needs it
        for place, sequence in enumerate(upcoming):
            if (key := sequence.adapter) is not None and self._missing_from(key) is not None:
                missing.setdefault(key, place)
        if not missing:  # mostly
            return
        most = dict.fromkeys(idle, self._composition.most_prefetches())
        room = self._page_cache.num_claimable(Depth.IDLE)
        for key, num_ahead in missing.items():
            version, tier = self._cache.residencies[key].version, self._missing_from(key)
            if tier is not None and most.get(tier):
                ahead = upcoming[:num_ahead] if tier is Tier.DEVICE else []
                num_kv_pages = sum([num_blocks(one.num_tokens_to_hold, one.table.block_size) for one in ahead])
                if tier is Tier.HOST or version.num_pages <= room - num_kv_pages:
                    most[tier] -= 1
                    self._prefetch(version, now)
            room -= version.num_pages

    def _prefetch_due(self, forecast: Forecast | Traffic, idle: Seq[Tier], now: float) -> None:
        """Prefetch one adapter that is due, if it is worth more until then than the items it displaces."""
        for key, until in forecast.due(now):
            version = self._cache.residencies[key].version
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
        residency = self._cache.residencies[key]
        if residency.device is not TierState.ABSENT or residency.host is TierState.LOADING:
            return None
        return Tier.DEVICE if residency.host is TierState.RESIDENT else Tier.HOST

    def _prefetch(self, version: AdapterVersion, now: float) -> None:
        self._counters.num_prefetches += self._loader.ensure(version, now, Depth.IDLE).is_loading


class BackgroundReads:
    """Reads versions in order of registration. Times are in seconds."""

    def __init__(self, cache: AdapterCache, loader: AdapterLoader) -> None:
        self.queue: deque[AdapterKey] = deque()  # versions that may be left to read
        self._cache = cache
        self._loader = loader
        self._reading: AdapterKey | None = None
        self._began_at = 0.0
        self._rests_until = 0.0

    def launch(self, now: float, *, is_busy: bool) -> None:
        """Start a read if there is nothing else to load; ``is_busy`` says whether requests are in flight."""
        if self._loader.loads.in_flight:
            return
        if self._reading is not None:
            self._reading = None
            self._rests_until = now + (now - self._began_at) * (1.0 / BUSY_SHARE - 1.0)
        if is_busy and now < self._rests_until:
            return
        while self.queue:
            key = self.queue.popleft()
            residency = self._cache.residencies.get(key)
            if residency is None or residency.host is not TierState.ABSENT:
                continue
            if self._cache.host.has_spare(residency.version):
                self._loader.read_ahead(residency.version, now)
                self._reading, self._began_at = key, now
                return
