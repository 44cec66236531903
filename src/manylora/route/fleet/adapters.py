"""Adapters of the whole fleet: loaded, replaced and unloaded on every backend as one operation.

The log holds the changes that were made through this router. A backend that joins or returns makes those that it missed
before it gets requests; one that cannot load an adapter joins without it. A backend that failed on a change gets no
requests for that adapter until it has made the change, which is tried again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from manylora.core.errors import CapacityError
from manylora.route.backend import Backend
from manylora.route.config import ProxyConfig
from manylora.route.fleet.changes import BackendChanges, Change
from manylora.route.fleet.members import Backends
from manylora.route.fleet.placement import AdapterPlacement
from manylora.serving.http.errors import HttpError

__all__ = ["RoutedAdapters"]

MAX_AGAIN = 4
"""Failed changes that are tried again on one backend at one poll."""

Answers = dict[Backend, tuple[int, str]]
"""Status and text by backend."""


@dataclass(slots=True, eq=False)
class RoutedAdapters:
    """Loads and unloads adapters on all backends. For the event loop's thread alone.

    Args:
        config: Times.
        backends: All of them.
        changes: Makes changes on single backends.
        placement: Loads adapters on demand, and holds off while an adapter changes.
    """

    config: ProxyConfig
    backends: Backends
    changes: BackendChanges
    placement: AdapterPlacement
    _one_at_a_time: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def load(self, name: str, path: str, *, in_place: bool) -> None:
        """Load an adapter on every backend that is up.

        The change enters the log if one backend succeeds; the others that were up get no requests for the adapter until
        they have it.

        Raises:
            HttpError: 400, all have it; otherwise the status of a backend that failed, with a line for each that did.
            CapacityError: No backend is up.
        """

        def lacks(backend: Backend) -> bool:
            return in_place or name not in backend.cards or name in backend.outdated

        async with self._one_at_a_time, self.placement.blocked(name):
            up, known = self._up(), self.changes.log.get(name)
            is_other = known is not None and known.path not in (None, path) and not in_place
            if not any(map(lacks, up)) or (is_other and not all(map(lacks, up))):
                raise HttpError(
                    400,
                    f"The lora adapter '{name}' has already been loaded. "
                    "If you want to load the adapter in place, set 'load_inplace' to True.",
                    param="lora_name",
                    kind="InvalidUserInput",
                )
            is_same = known is not None and known.path == path and not in_place
            change = known if known is not None and is_same else self.changes.log.next(path)
            answers = await self._everywhere(name, change, lacks, in_place=in_place)
            self._enter(name, change, answers)

    async def unload(self, name: str) -> None:
        """Unload an adapter from every backend that has it.

        Raises:
            HttpError: 404, none has it; otherwise the status of a backend that failed.
            CapacityError: No backend is up.
        """

        def holds(backend: Backend) -> bool:
            return name in backend.cards

        async with self._one_at_a_time, self.placement.blocked(name):
            known = self.changes.log.get(name)
            if not any(map(holds, self._up())) and (known is None or known.path is None):
                raise HttpError(404, f"The lora adapter '{name[:200]}' cannot be found.", param="lora_name")
            change = self.changes.log.next(None)
            self._enter(name, change, await self._everywhere(name, change, holds))

    async def prepare(self, backend: Backend) -> bool:
        """Make the changes that a backend has missed; return whether it may have requests.

        It may have them without an adapter that it cannot load, for which it then gets none. On a backend that is up,
        try failed changes again.
        """
        account = self.changes.account_of(backend)
        if backend.health.is_up:
            self.placement.try_again(account, MAX_AGAIN)
            return True
        await self.placement.ended(lambda other, name: other is backend)
        account.rejoin()
        if missed := self.changes.missed(backend):
            await self.changes.make(backend, missed, in_place=True)
        return not self.changes.missed(backend)  # the log may have changed meanwhile

    def left(self, backend: Backend) -> None:
        """Forget a backend."""
        self.changes.left(backend)

    async def _everywhere(
        self, name: str, change: Change, concerns: Callable[[Backend], bool], *, in_place: bool = False
    ) -> Answers:
        """Make a change on every backend that is up and that it concerns, and on those that come up meanwhile.

        When this returns, every such backend has been asked: the caller enters the change into the log before the
        event loop runs on, and backends that come up later get it from there.
        """
        answers: Answers = {}
        asked: dict[Backend, int] = {}  # and the number of times that it had joined
        while pending := [
            one
            for one in self.backends
            if one.health.is_up and asked.get(one) != one.health.num_joins and concerns(one)
        ]:
            asked |= {one: one.health.num_joins for one in pending}
            done = await asyncio.gather(
                *(self.changes.make(one, [(name, change)], in_place=in_place) for one in pending)
            )
            answers |= {one: answer for one, (answer,) in zip(pending, done, strict=True)}
        return {backend: answer for backend, answer in answers.items() if not backend.is_leaving}

    def _enter(self, name: str, change: Change, answers: Answers) -> None:
        """Enter a change into the log, unless all backends failed on it.

        Raises:
            HttpError: Some or all backends failed.
        """
        failed = [(backend, status, text) for backend, (status, text) in answers.items() if status != 200]
        if not failed or len(failed) < len(answers):
            dropped = self.changes.log.enter(name, change)
            for backend, _, _ in failed:
                self.backends.catalog.hide(backend, name)
            for account in self.changes.accounts:
                account.placed.pop(name, None)
                if dropped is not None:
                    account.forget(dropped)
                    self.backends.catalog.show(account.backend, dropped)
        if failed:
            lines = "; ".join(f"{backend.url}: {status} {text[:200]}" for backend, status, text in failed)
            status = failed[0][1]
            raise HttpError(
                status if 400 <= status < 600 else 502,
                f"{len(failed)} of {len(answers)} backends failed on adapter '{name[:200]}': {lines}",
            )

    def _up(self) -> list[Backend]:
        up = [backend for backend in self.backends if backend.health.is_up]
        if not up:
            raise CapacityError("No backend is up; please try again.", retry_after_s=self.config.poll_s, status=503)
        return up
