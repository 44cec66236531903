"""The changes of adapters that the router was told, and each backend's account of the changes that it has made.

An adapter that was unloaded keeps an entry, so that a backend that was away does not bring it back. Of these entries
the oldest are dropped beyond a bound.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from time import monotonic

from manylora.route.backend import Backend
from manylora.route.config import ProxyConfig
from manylora.route.fleet.members import Backends
from manylora.route.report import ServerKind
from manylora.route.upstream.pool import FetchFailed

__all__ = ["AdapterAccount", "BackendChanges", "Change", "ChangeLog"]

MAX_UNLOADED = 10_000  # adapters that were unloaded and keep an entry
MAX_CALLS = 4  # changes of adapters at one backend at once
MAX_TRIES = 3  # tries to load an adapter on a backend that joins, before it joins without
AGAIN_S = 30.0  # time between two tries to load an adapter on a backend that could not load it, in seconds
MAX_FAILED = 10_000
MAX_ANSWER_BYTES = 64 * 1024

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Change:
    """The latest change of one adapter."""

    path: str | None  # the adapter's weights; ``None`` where it was unloaded
    generation: int  # a number that no other change has


class ChangeLog:
    """The latest change of each adapter, by its name: the version that every backend must have.

    Of the adapters that were unloaded, ``max_unloaded`` keep an entry.
    """

    def __init__(self, max_unloaded: int = MAX_UNLOADED) -> None:
        self._max_unloaded = max_unloaded
        self._changes: dict[str, Change] = {}
        self._unloaded: dict[str, None] = {}  # the oldest first
        self._generation = 0

    def __iter__(self) -> Iterator[tuple[str, Change]]:
        """Iterate over names and their changes."""
        return iter(self._changes.items())

    def get(self, name: str) -> Change | None:
        """Return the change of an adapter, if there is one."""
        return self._changes.get(name)

    def next(self, path: str | None) -> Change:
        """Return a new change, which is not entered yet."""
        self._generation += 1
        return Change(path, self._generation)

    def enter(self, name: str, change: Change) -> str | None:
        """Enter a change; return the adapter whose entry was dropped for it, if any."""
        self._changes[name] = change
        self._unloaded.pop(name, None)
        if change.path is None:
            self._unloaded[name] = None
        if len(self._unloaded) <= self._max_unloaded:
            return None
        oldest = next(iter(self._unloaded))
        del self._unloaded[oldest], self._changes[oldest]
        return oldest


@dataclass(frozen=True, slots=True)
class _Made:
    """A change that the backend has made, and the path that it listed afterwards."""

    generation: int
    root: str | None


@dataclass(frozen=True, slots=True)
class _Failure:
    num_tries: int
    at: float


@dataclass(slots=True, eq=False)
class AdapterAccount:
    """The adapters that the router changed or placed on one backend."""

    backend: Backend
    # Adapters that were placed on demand and the time of their last request, the oldest first; an adapter counts from
    # before its load until its unload has succeeded.
    placed: dict[str, float] = field(default_factory=dict)
    # Held while room is made for an adapter, by the unload of ``leaving``.
    making_room: asyncio.Lock = field(default_factory=asyncio.Lock)
    leaving: str | None = None  # the adapter that is being unloaded
    # Bounds the changes under way.
    calls: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_CALLS))
    _made: dict[str, _Made] = field(default_factory=dict)
    _failures: dict[str, _Failure] = field(default_factory=dict)
    _num_joins: int = 0

    def has_made(self, name: str, change: Change) -> bool:
        """Whether the backend has made a change, and has not lost it since: a restart brings back paths of its own."""
        card, made = self.backend.cards.get(name), self._made.get(name)
        if change.path is None:
            return card is None
        if card is None or made is None or made.generation != change.generation:
            return False
        return card.root in (None, name, change.path, made.root)

    def has_lost(self, name: str, change: Change) -> bool:
        """Whether the backend had made a change, and has lost it since."""
        made = self._made.get(name)
        return made is not None and made.generation == change.generation and not self.has_made(name, change)

    def note_made(self, name: str, change: Change) -> None:
        """Learn that the backend has made a change."""
        card = self.backend.cards.get(name)
        self._made[name] = _Made(change.generation, None if card is None else card.root)
        self._failures.pop(name, None)

    def note_failed(self, name: str, status: int, now: float) -> None:
        """Learn that the backend could not make a change.

        An answer that says so is final, 500 too: vLLM answers it to an invalid adapter. Any other failure may pass.
        """
        is_final = 400 <= status <= 500 and status != 429
        before = self._failures.pop(name, None)
        num_tries = MAX_TRIES if is_final else 1 if before is None else before.num_tries + 1
        if len(self._failures) >= MAX_FAILED:
            del self._failures[next(iter(self._failures))]
        self._failures[name] = _Failure(num_tries, now)
        if not is_final:  # it may have been made all the same
            self._made.pop(name, None)

    def forget_failure(self, name: str) -> None:
        """Forget that an adapter could not be loaded."""
        self._failures.pop(name, None)

    def forget(self, name: str) -> None:
        """Drop the account of an adapter."""
        self.placed.pop(name, None)
        self._made.pop(name, None)
        self._failures.pop(name, None)

    def rejoin(self) -> None:
        """Adjust the account to a backend that may have restarted.

        After a restart earlier failures count no more. Adapters that the backend does not list are not placed there.
        """
        if self._num_joins != self.backend.health.num_joins:
            self._num_joins = self.backend.health.num_joins
            self._failures.clear()
        self.placed = {name: at for name, at in self.placed.items() if name in self.backend.cards}

    def is_left_out(self, name: str) -> bool:
        """Whether the backend may serve without this adapter, because its load failed too often."""
        failure = self._failures.get(name)
        return failure is not None and failure.num_tries >= MAX_TRIES

    def can_try(self, name: str, now: float) -> bool:
        """Whether a load may be tried: it did not just fail."""
        failure = self._failures.get(name)
        return failure is None or now - failure.at >= AGAIN_S

    def failures_due(self, now: float) -> list[str]:
        """Return the adapters whose failed changes can be tried again."""
        return [name for name, failure in self._failures.items() if now - failure.at >= AGAIN_S]


@dataclass(slots=True, eq=False)
class BackendChanges:
    """Makes changes of adapters on single backends, and accounts for them."""

    config: ProxyConfig  # the time limit
    backends: Backends  # read their lists of models after a change
    log: ChangeLog = field(default_factory=ChangeLog)
    _accounts: dict[Backend, AdapterAccount] = field(default_factory=dict)

    @property
    def accounts(self) -> list[AdapterAccount]:
        """The accounts of all backends."""
        return list(self._accounts.values())

    def account_of(self, backend: Backend) -> AdapterAccount:
        """Return the account of a backend; the account of a backend that leaves is not kept."""
        account = self._accounts.get(backend)
        if account is None:
            account = AdapterAccount(backend)
            if not backend.is_leaving:
                self._accounts[backend] = account
        return account

    def left(self, backend: Backend) -> None:
        """Forget a backend."""
        self._accounts.pop(backend, None)

    def is_current(self, backend: Backend, name: str) -> bool:
        """Whether a backend has made the last change of an adapter; true for models that were never changed."""
        change = self.log.get(name)
        return change is None or self.account_of(backend).has_made(name, change)

    def missed(self, backend: Backend) -> list[tuple[str, Change]]:
        """Return the changes that a backend must make before it gets requests."""
        account = self.account_of(backend)
        return [
            (name, change)
            for name, change in self.log
            if not account.has_made(name, change) and not account.is_left_out(name)
        ]

    def has_lost_one(self, backend: Backend) -> bool:
        """Whether a backend lists an adapter from another path than it had after its last change."""
        account, cards = self.account_of(backend), backend.cards
        return any(one.path is not None and name in cards and account.has_lost(name, one) for name, one in self.log)

    def note_current(self, backend: Backend) -> None:
        """Count a backend among the holders of the adapters that it has, whatever failed before."""
        for name in list(backend.outdated):
            if name != self.account_of(backend).leaving and self.is_current(backend, name):
                self.backends.catalog.show(backend, name)

    async def make(
        self, backend: Backend, changes: Sequence[tuple[str, Change]], *, in_place: bool
    ) -> list[tuple[int, str]]:
        """Make changes on a backend, read its models, and note those made; return as ``load``, for each.

        With ``in_place`` adapters are replaced also where the backend is not known to have them.
        """
        account = self.account_of(backend)

        async def call(name: str, change: Change) -> tuple[int, str]:
            if change.path is None:
                return await self.unload(backend, name)
            return await self.load(backend, name, change.path, in_place=in_place or name in backend.cards)

        answers = await asyncio.gather(*(call(name, change) for name, change in changes))
        await self.backends.update_models(backend)
        for (name, change), (status, text) in zip(changes, answers, strict=True):
            if status == 200 and (name in backend.cards) == (change.path is not None):
                account.note_made(name, change)
                self.backends.catalog.show(backend, name)
                continue
            account.note_failed(name, status, monotonic())
            if self.log.get(name) is change:
                self.backends.catalog.hide(backend, name)
            logger.warning(
                "adapter_failed adapter=%s url=%s status=%d answer=%r", name, backend.url, status, text[:200]
            )
        return answers

    async def load(self, backend: Backend, name: str, path: str, *, in_place: bool) -> tuple[int, str]:
        """Load an adapter on a backend, if asked to in place of the adapter of that name.

        Return status and text of the answer; 502 without an answer.
        """
        body: dict[str, object] = {"lora_name": name, "lora_path": path}
        return await self._call(backend, b"load_lora_adapter", body | ({"load_inplace": True} if in_place else {}))

    async def unload(self, backend: Backend, name: str) -> tuple[int, str]:
        """Unload an adapter from a backend; return as ``load`` does, 200 as well where it was not loaded."""
        status, text = await self._call(backend, b"unload_lora_adapter", {"lora_name": name})
        return (200 if status == 404 else status), text

    async def _call(self, backend: Backend, route: bytes, body: dict[str, object]) -> tuple[int, str]:
        prefix = b"/" if backend.kind is ServerKind.SGLANG else b"/v1/"
        try:
            async with self.account_of(backend).calls:
                status, answer = await backend.call(
                    prefix + route, body, timeout_s=self.config.place_timeout_s, max_bytes=MAX_ANSWER_BYTES
                )
        except FetchFailed as error:
            return 502, str(error)
        return status, answer.decode(errors="replace").strip()
