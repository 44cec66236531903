"""The catalog of adapters: operations by name, on top of the cache's operations on versions.

Every method runs on the loop's thread and returns at once; files were read or checked before, in another process.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from dataclasses import InitVar, dataclass
from itertools import islice

from manylora.core.config import EngineConfig
from manylora.core.engine.adapters.cache import AdapterCache
from manylora.core.engine.adapters.loader import AdapterLoader
from manylora.core.engine.adapters.prefetch import Prefetcher
from manylora.core.engine.adapters.registry import LABEL_MARK, AdapterRegistry, NamedAdapter, is_label
from manylora.core.engine.adapters.residency import TierState
from manylora.core.engine.status import AdapterStatus
from manylora.core.errors import AdapterError, AdapterReplaced, CapacityError, ManyloraError, ModelNotFound
from manylora.core.memory import num_blocks
from manylora.core.scheduling import Sequence
from manylora.core.types import AdapterKey, AdapterVersion, Tier

__all__ = ["AdapterCatalog"]

_HEIGHT = {tier: height for height, tier in enumerate(Tier)}


@dataclass(eq=False)
class AdapterCatalog:
    """Registers, replaces, pins, warms and unregisters adapters by name; ``AdapterNotFound`` if a name is unknown."""

    config: InitVar[EngineConfig]
    _registry: AdapterRegistry
    _cache: AdapterCache
    _loader: AdapterLoader
    _num_pages: int  # pages in the pool
    _sequences: Mapping[str, Sequence]  # every waiting and running sequence, by request
    _prefetcher: Prefetcher  # reads versions that were registered without their weights

    def __post_init__(self, config: EngineConfig) -> None:
        self._max_pages = config.adapters.most_pages(self._num_pages)
        self._block_size = config.memory.block_size

    def __contains__(self, name: str) -> bool:
        return name in self._registry

    def resolve(self, model: str, key: AdapterKey | None = None) -> tuple[str, AdapterVersion | None]:
        """Return the name and version of the adapter that a request names; an empty name and ``None`` are the base.

        An exact name wins over ``base:adapter``. With a key, that version answers, whatever the name stands for here: a
        fleet's names move on all engines at once, and the engines learn of it one by one. ``ModelNotFound`` if no
        adapter has that name or key; there is no fallback to the base.
        """
        if key is not None and (known := self._cache.residencies.get(key)) is not None:
            return self._name_for(model, key), known.version
        base_name = self._registry.base_name
        if model in ("", base_name):
            return "", None
        base, _, adapter = model.partition(":")
        name = model if model in self._registry or base != base_name else adapter
        if name in self._registry and key is None and not is_label(name):
            return name, self._registry.get(name).version
        raise ModelNotFound(f"The model {model[:200]!r} does not exist", param="model")

    def resolve_version(self, model: str, key: AdapterKey | None) -> tuple[str, AdapterVersion | None]:
        """Return the adapter of an answer that another engine began: the same version, under any name.

        A version that has lost its last name goes on under the name in the request, while other answers run on it.
        ``AdapterReplaced`` if the version is not here: the name has other weights now, or is gone.
        """
        if key is None:
            if model in ("", self._registry.base_name):
                return "", None
            raise AdapterReplaced(model, "this answer was begun by the base model, which has another name here")
        if key in self._cache.residencies:
            return self._name_for(model, key), self._cache.residencies[key].version
        state = "was replaced" if model in self._registry else "was unloaded"
        raise AdapterReplaced(model, f"it {state} before this answer was complete; please ask again")

    def _name_for(self, model: str, key: AdapterKey) -> str:
        """Return the name under which a version answers: the request's, or one of its own if that is not known."""
        return model if model in self._registry else next(iter(self._registry.shown_names_of(key)), model)

    def register(
        self, name: str, version: AdapterVersion, now: float, *, replace: bool = False, tier: Tier = Tier.HOST
    ) -> AdapterStatus:
        """Point a name to a version whose weights the executor holds in the host tier, or that is on disk.

        Earlier requests keep the version that the name had then. If the version is refused, its host copy is dropped. A
        version on disk is read when a sequence needs it, or in the background. One that takes the place of a version
        with requests in flight is copied to the device at once: the next of those that come will need it.
        ``AdapterExists`` if the name is taken (and ``replace`` is not set), or the base's; ``AdapterError`` if the
        version is larger than one adapter may be; ``CapacityError`` if too many adapters, or the name is pinned and
        there is no room to pin the new version.
        """
        try:
            is_pinned = self._check_can_register(name, version, replace=replace)
            old = self._registry.add(name, version, replace=replace)
        except ManyloraError:
            if tier is Tier.HOST:
                self._cache.refuse(version)
            raise
        self._cache.add(version, now, tier)
        if tier is Tier.DISK and self._cache.residencies[version.key].host is TierState.ABSENT:
            self._prefetcher.read_later(version)
        self._cache.refresh(version.key, now)
        is_in_use = False
        if old is not None and old.key != version.key:
            is_in_use = self._cache.residencies[old.key].is_referenced
            self._forget_if_unnamed(old, now)
        if is_pinned or is_in_use:
            self._loader.warm(version, now)
        return self.status(name, now)

    def point(self, name: str, to: str, now: float) -> AdapterStatus:
        """Point a name, which may be new, to the version of another one; earlier requests keep the version it had.

        ``AdapterExists`` if the name is the base's; ``CapacityError`` if too many adapters, or the name is pinned and
        there is no room to pin the version.
        """
        return self.register(name, self._registry.get(to).version, now, replace=True, tier=Tier.DISK)

    def unregister(self, name: str, now: float) -> None:
        """Remove a name; its version is freed when the requests on it have ended."""
        self._forget_if_unnamed(self._registry.remove(name), now)

    def pin(self, name: str, pinned: bool, now: float) -> AdapterStatus:
        """Load an adapter to the device and keep it there, or undo that.

        ``CapacityError`` if pinning it would leave too little room for a request in flight.
        """
        version = self._registry.get(name).version
        if pinned and not self._registry.is_pinned(version.key):
            self._check_can_pin(name, version)
        self._registry.set_pinned(name, pinned)
        self._cache.refresh(version.key, now)
        if pinned:
            self._loader.warm(version, now)
        return self.status(name, now)

    def warm(self, name: str, now: float) -> AdapterStatus:
        """Start loading an adapter to the device before any request for it.

        ``CapacityError`` if there is no idle memory for it.
        """
        residency = self._loader.warm(self._registry.get(name).version, now)
        if residency.tier is not Tier.DEVICE and not residency.is_loading:
            shown = name.removeprefix(LABEL_MARK)
            raise CapacityError(f"no idle memory for adapter {shown!r}", retry_after_s=1.0, status=503)
        return self.status(name, now)

    def status(self, name: str, now: float) -> AdapterStatus:
        """Return one adapter's status."""
        named = self._registry.get(name)
        residency = self._cache.residencies[named.version.key]
        used_at = residency.last_used_at
        return AdapterStatus(
            name=named.name,
            version=named.version,
            generation=named.generation,
            tier=residency.tier,
            state=residency.state,
            is_pinned=named.is_pinned,
            num_running=residency.num_running,
            num_waiting=residency.num_waiting,
            num_requests=named.num_requests,
            num_hits=named.num_hits,
            last_used_s=None if used_at is None else now - used_at,
            price=self._cache.price(named.version.key, now),
            error=residency.error,
        )

    def statuses(self, now: float) -> tuple[AdapterStatus, ...]:
        """Return every registered adapter's status, in order of registration."""
        return tuple(self.status(named.name, now) for named in self._registry.all())

    def busiest(self, num_adapters: int, now: float) -> tuple[AdapterStatus, ...]:
        """Return the status of a few: by tier, then with requests or failures, then by use; for views of thousands."""

        def use(named: NamedAdapter) -> tuple[int, bool, int]:
            residency = self._cache.residencies[named.version.key]
            if residency.error is not None:
                return _HEIGHT[Tier.HOST], True, named.num_requests
            return _HEIGHT[residency.tier], residency.is_referenced, named.num_requests

        # Of the others, which are idle and unused, as many as are asked for will do: those in host memory, then any.
        in_host = self._named(islice(self._cache.host.recent(), num_adapters))
        failed = self._named(islice(self._cache.failed, num_adapters))
        some = [*self._in_use(), *failed, *in_host, *self._registry.first(num_adapters)]
        candidates = {named.name: named for named in some}
        busiest = heapq.nlargest(num_adapters, candidates.values(), key=use)
        return tuple(self.status(named.name, now) for named in busiest)

    def in_use(self, now: float) -> tuple[AdapterStatus, ...]:
        """Return the status of every adapter that has had a request, is pinned, or has pages; for metrics."""
        return tuple(self.status(named.name, now) for named in self._in_use())

    def _in_use(self) -> list[NamedAdapter]:
        registry = self._registry
        named = [*registry.used(), *registry.pinned.values(), *self._named(self._cache.in_pages)]
        return list({one.name: one for one in named if not is_label(one.name)}.values())

    def _named(self, keys: Iterable[AdapterKey]) -> list[NamedAdapter]:
        return [self._registry.get(name) for key in keys for name in self._registry.shown_names_of(key)]

    def num_pinned_pages(self, besides: AdapterVersion | None = None) -> int:
        """Return the pages of pinned versions other than ``besides``."""
        if not self._registry.pinned:
            return 0
        pinned = {named.version.key: named.version.num_pages for named in self._registry.pinned.values()}
        if besides is not None:
            pinned.pop(besides.key, None)
        return sum(pinned.values())

    def _check_can_register(self, name: str, version: AdapterVersion, *, replace: bool) -> bool:
        """Raise the errors of ``register``; return whether the name is pinned."""
        self._registry.check_can_add(name, replace=replace)
        if version.num_pages > self._max_pages:
            reason = f"needs {version.num_pages} pages; one adapter may take {self._max_pages} of {self._num_pages}"
            raise AdapterError(name, f"{reason} (--max-adapter-share)")
        is_pinned = name in self._registry and self._registry.get(name).is_pinned
        if is_pinned and not self._registry.is_pinned(version.key):
            self._check_can_pin(name, version)
        return is_pinned

    def _check_can_pin(self, name: str, version: AdapterVersion) -> None:
        """Raise ``CapacityError`` unless every request in flight still fits beside the pinned adapters."""
        shown = name.removeprefix(LABEL_MARK)
        for sequence in self._sequences.values():
            if sequence.adapter == version.key:
                continue
            # The last token needs no KV.
            most_tokens = sequence.state_tokens + sequence.num_prompt_tokens + sequence.max_tokens - 1
            need = num_blocks(most_tokens, self._block_size) + sequence.num_adapter_pages
            left = self._num_pages - self.num_pinned_pages(besides=sequence.version) - version.num_pages
            if need > left:
                raise CapacityError(
                    f"pinning {shown!r} ({version.num_pages} pages) would leave too little memory "
                    f"for a request in flight that needs {need} pages",
                    retry_after_s=5.0,
                )
        if self.num_pinned_pages() + version.num_pages >= self._num_pages:
            raise CapacityError(f"pinning {shown!r} would leave no memory for requests", retry_after_s=60.0)

    def _forget_if_unnamed(self, version: AdapterVersion, now: float) -> None:
        if names := self._registry.names_of(version.key):
            # Its files may go with the name: it is read again from those of a name that it still has.
            self._cache.residencies[version.key].moved(self._registry.get(names[0]).version)
            self._cache.refresh(version.key, now)  # it may have been pinned by that name
        else:
            self._prefetcher.forget(version.key)
            self._cache.retire(version.key, now)
