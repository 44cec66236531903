"""Adapters that no one has loaded: a request names one, and it is looked for in the registries and loaded.

A name is a place below a ``--lora-registry`` and nothing else, so that no request reaches another host or path.
Requests for one name share its look-up. A name that no registry has, or whose adapter cannot be served, is not asked
for again for a while by the same caller: a quick refusal would tell another one that it was asked for. At most half of
the look-ups under way are of one caller.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from manylora.core.adapters.sources import check_name, resolve_url
from manylora.core.errors import (
    AdapterError,
    AdapterExists,
    AdapterNotFound,
    AdapterUnavailable,
    CapacityError,
)
from manylora.serving.ports import FleetPort

__all__ = ["OnDemand"]

logger = logging.getLogger(__name__)

REFUSED_S = 30.0  # time for which a name is not looked for again
MAX_REFUSED = 4096  # names that are remembered as refused; the oldest are looked for again
MAX_LOADING = 64
RETRY_S = 5.0


@dataclass(eq=False)
class OnDemand:
    """Loads the adapters that requests name. For the event loop's thread alone."""

    fleet: FleetPort  # the engines
    registries: Sequence[str]  # where to look, in order
    now: Callable[[], float]  # returns a time in seconds that never steps back
    _loading: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    _callers: Counter[str] = field(default_factory=Counter)
    _refused: OrderedDict[tuple[str, str], tuple[float, AdapterError | None]] = field(default_factory=OrderedDict)

    async def find(self, model: str, caller: str) -> None:
        """Load the adapter that a request names, unless there is none: then its name stays unknown.

        ``AdapterError`` if there is one that cannot be served; ``CapacityError`` if its registry does not answer, there
        is no room for it, or too many are looked for.
        """
        adapters = self.fleet.adapters
        name = model.removeprefix(f"{self.fleet.served_name}:")
        if name in adapters.loaded or model == self.fleet.served_name or name in adapters.unavailable:
            return
        if "@" in name or adapters.find(model) is not None:  # a version of an adapter that was published
            return
        until, error = self._refused.get((caller, name), (0.0, None))
        if self.now() < until:
            if error is not None:
                raise type(error)(name, error.reason)
            return
        if (task := self._loading.get(name)) is None:
            if len(self._loading) >= MAX_LOADING or self._callers[caller] >= MAX_LOADING // 2:
                reason = f"{len(self._loading)} adapters are being looked for in registries, no more may wait"
                raise CapacityError(reason, retry_after_s=RETRY_S, status=503)
            task = self._loading[name] = asyncio.create_task(self._load(name, caller))
            self._callers[caller] += 1
            task.add_done_callback(lambda done: self._end(done, name, caller))
        await asyncio.shield(task)  # a client that leaves ends it for no other

    def _places(self, name: str) -> list[str]:
        """Return the URLs of an adapter of that name; none for a name that is no part of a URL."""
        try:
            check_name(name)
            return [resolve_url(name, f"{one.rstrip('/')}/{name}", (one,)) for one in self.registries]
        except AdapterError:
            return []

    def _end(self, done: asyncio.Task[None], name: str, caller: str) -> None:
        del self._loading[name]
        self._callers[caller] -= 1
        self._callers += Counter()  # drops callers without a look-up
        if not done.cancelled():
            done.exception()  # it was raised for the clients that are still there

    async def _load(self, name: str, caller: str) -> None:
        error: AdapterError | None = None
        try:
            for url in self._places(name):
                try:
                    await self.fleet.adapters.load(name, url, by_header=True)
                    return
                except AdapterNotFound:
                    continue
        except AdapterExists:
            return
        except AdapterUnavailable as unavailable:
            raise CapacityError(str(unavailable), retry_after_s=RETRY_S, status=503) from None
        except AdapterError as refusal:
            error = refusal
        self._refused[caller, name] = self.now() + REFUSED_S, error
        self._refused.move_to_end((caller, name))
        while len(self._refused) > MAX_REFUSED:
            self._refused.popitem(last=False)
        if error is not None:
            logger.warning("adapter_not_loaded name=%a reason=%a", name, error.reason)
            raise error
