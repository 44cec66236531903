"""The set of backends, and the models of all of them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import monotonic

import msgspec

from manylora.core.errors import CapacityError
from manylora.route.backend import Backend
from manylora.route.choice import Choice
from manylora.route.config import ProxyConfig
from manylora.route.fleet.names import Arm, arms_in_order
from manylora.route.report import Card, ServerKind, read_models
from manylora.route.upstream.address import Address
from manylora.route.upstream.pool import FetchFailed
from manylora.serving.http.tenants import Tenant

__all__ = ["MAX_BACKENDS", "Backends", "Catalog", "Found"]

REFRESH_S = 1.0  # least time between two reads of all lists of models for requests with unknown names
MAX_BACKENDS = 256  # further addresses are left out
MAX_MODELS_BYTES = 32 * 1024 * 1024
MAX_LISTINGS = 32  # lists of models that are kept for tenants

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Found:
    """A model that requests may name."""

    name: str  # as backends list it
    base: str | None  # the base of an adapter; ``None`` for a base
    holders: Sequence[Backend]  # the backends that list it
    only_at: str | None = None  # the URL of the only backend that it may be asked of; ``None`` for any
    arm: str = ""  # the version that answers a public name, for clients to see; empty for a model that was named itself

    @property
    def adapter(self) -> str:
        """The adapter's name; empty for a base."""
        return "" if self.base is None else self.name

    def name_at(self, backend: Backend) -> str:
        """Return the name that a backend knows the model by: SGLang answers from the base to an adapter's bare name."""
        return self.name if self.base is None or backend.kind is not ServerKind.SGLANG else f"{self.base}:{self.name}"


class Catalog:
    """Models by name; ``bases`` are the models without a parent, ``names`` the versions behind each public name."""

    def __init__(self) -> None:
        self.bases: Sequence[str] = ()
        self.names: Mapping[str, tuple[Arm, ...]] = {}
        self._holders: dict[str, dict[Backend, Card]] = {}
        self._listings: dict[Tenant | None, bytes] = {}  # made since the last change, by tenant

    def __len__(self) -> int:
        """Return the number of models."""
        return len(self._holders)

    def update(self, backend: Backend, cards: Mapping[str, Card], raw: Mapping[str, msgspec.Raw]) -> None:
        """Replace a backend's list; an empty one removes the backend."""
        for name in backend.cards.keys() - cards.keys():
            self._drop(name, backend)
        for name, card in cards.items():
            if name not in backend.outdated:
                self._holders.setdefault(name, {})[backend] = card
        backend.cards, backend.raw_cards = cards, raw
        self.bases = [name for name, holders in self._holders.items() if _card_of(holders).parent is None]
        self._listings.clear()

    def hide(self, backend: Backend, adapter: str) -> None:
        """Take a backend from the holders of an adapter, whatever it lists: it has another version, or none."""
        backend.outdated.add(adapter)
        self._drop(adapter, backend)
        self._listings.clear()

    def show(self, backend: Backend, adapter: str) -> None:
        """Count a backend among the holders of an adapter, if it lists it."""
        backend.outdated.discard(adapter)
        card = backend.cards.get(adapter)
        if card is not None:
            self._holders.setdefault(adapter, {})[backend] = card
            self._listings.clear()

    def find(self, model: str | None) -> Found | None:
        """Return the model that a request names, also as ``base:adapter``; ``None`` without it is the only base."""
        base, name = self._split(model)
        if name is None or (holders := self._holders.get(name)) is None:
            return None
        found = Found(name, _card_of(holders).parent, list(holders))
        return found if base in (None, found.base) else None

    def rename(self, names: Mapping[str, tuple[Arm, ...]]) -> None:
        """Replace the public names."""
        self.names = names
        self._listings.clear()

    def find_arm(self, name: str, key: bytes) -> Found | None:
        """Return the version of one of ``names`` that answers a conversation: of those with a backend that is up.

        The ``key`` is that of ``conversation_key``.
        """
        listed: Found | None = None
        for arm in arms_in_order(name, self.names[name], key):
            found = self.find(arm.model)
            if found is None:
                continue
            holders = [one for one in found.holders if arm.url in (None, one.url)]
            found = replace(found, holders=holders, only_at=arm.url, arm=str(arm))
            if any(one.health.is_up for one in holders):
                return found
            listed = listed or (found if holders else None)
        return listed

    def bare_name(self, model: str | None) -> str | None:
        """Return the name by which a tenant may call a model or not, whether it exists or not: an adapter's own."""
        return self._split(model)[1]

    def of_base(self, base: str) -> list[Backend]:
        """Return the backends that list a base."""
        return list(self._holders.get(base, ()))

    def card(self, name: str, tenant: Tenant | None = None) -> msgspec.Raw | None:
        """Return an entry of the list of models as its first holder sent it; of a public name the router's own.

        A tenant does not see the backend's path, and gets ``None`` for a model that it may not call.
        """
        if tenant is not None and not tenant.may_call(name):
            return None
        if name in self.names:
            own = {"id": name, "object": "model", "owned_by": "manylora-route", "parent": None, "root": None}
            return msgspec.Raw(msgspec.json.encode(own))
        holders = self._holders.get(name)
        if holders is None:
            return None
        raw = next(iter(holders)).raw_cards[name]
        return raw if tenant is None else msgspec.Raw(msgspec.json.encode(msgspec.json.decode(raw) | {"root": name}))

    def source(self, adapter: str) -> str | None:
        """Return the path that an adapter was loaded from, by its first holder that says."""
        return next((card.root for card in self._holders.get(adapter, {}).values() if card.root), None)

    def listing(self, tenant: Tenant | None = None) -> bytes:
        """Return the answer to ``/v1/models``: bases, adapters, public names; to a tenant those that it may call."""
        if tenant not in self._listings:
            if len(self._listings) >= MAX_LISTINGS:
                self._listings.clear()
            cards = [self.card(name, tenant) for name in sorted({**self._holders, **self.names}, key=self._place)]
            self._listings[tenant] = msgspec.json.encode({"object": "list", "data": [one for one in cards if one]})
        return self._listings[tenant]

    def _split(self, model: str | None) -> tuple[str | None, str | None]:
        """Return the base that a request names before an adapter, if it does, and the model's own name."""
        if model is None:
            return None, self.bases[0] if len(self.bases) == 1 else None
        if model not in self._holders and model not in self.names:
            for base in self.bases:
                if model.startswith(base + ":"):
                    return base, model[len(base) + 1 :]
        return None, model

    def _place(self, name: str) -> tuple[int, str]:
        return 2 if name in self.names else int(_card_of(self._holders[name]).parent is not None), name

    def _drop(self, name: str, backend: Backend) -> None:
        holders = self._holders.get(name, {})
        holders.pop(backend, None)
        if not holders:
            self._holders.pop(name, None)


def _card_of(holders: Mapping[Backend, Card]) -> Card:
    return next(iter(holders.values()))


@dataclass(eq=False)
class Backends:
    """The backends, in the order in which they joined, and the ``catalog`` of their models.

    For the event loop's thread alone.
    """

    config: ProxyConfig  # times and limits
    choice: Choice  # gives them slots
    catalog: Catalog = field(default_factory=Catalog)
    _by_url: dict[str, Backend] = field(default_factory=dict)
    _refreshed_at: float = 0.0
    _refreshing: asyncio.Task[None] | None = None

    def __iter__(self) -> Iterator[Backend]:
        """Iterate over a copy: backends may join and leave meanwhile."""
        return iter(list(self._by_url.values()))

    def __len__(self) -> int:
        """Return their number."""
        return len(self._by_url)

    @property
    def num_up(self) -> int:
        """The number of backends that get requests."""
        return sum(backend.health.is_up for backend in self._by_url.values())

    def none_up(self, what: str = "No backend") -> CapacityError:
        """Return the error for a request while no backend is up."""
        return CapacityError(f"{what} is up; please try again.", retry_after_s=self.config.poll_s, status=503)

    def join(self, address: Address, *, is_warm: bool) -> Backend | None:
        """Take in an address; return its backend, or ``None`` if it is there already or there are too many."""
        if address.url in self._by_url or len(self._by_url) >= MAX_BACKENDS:
            return None
        backend = self._by_url[address.url] = Backend(address, self.config, is_warm=is_warm)
        self.choice.join(backend)
        logger.info("backend_joins url=%s", backend.url)
        return backend

    def leave(self, backend: Backend) -> None:
        """Take a backend out; its requests under way go on to their end."""
        logger.info("backend_leaves url=%s in_flight=%d", backend.url, backend.num_in_flight)
        backend.is_leaving = True
        del self._by_url[backend.url]
        self.choice.leave(backend)
        self.catalog.update(backend, {}, {})
        backend.pool.close()

    async def read_models(self, backend: Backend, *, younger_than_s: float = 0.0) -> None:
        """Read a backend's list of models, unless that was done less than ``younger_than_s`` seconds ago.

        ``FetchFailed`` if there is no such list.
        """
        async with backend.reading_models:
            if monotonic() - backend.models_read_at < younger_than_s:
                return
            backend.models_read_at = monotonic()
            status, body = await backend.call(
                b"/v1/models", timeout_s=self.config.poll_timeout_s, max_bytes=MAX_MODELS_BYTES
            )
            if status != 200:
                raise FetchFailed(f"/v1/models answered {status}")
            if backend.is_leaving:
                return
            if body != backend.models_body:
                try:
                    cards, raw, backend.kind = read_models(body)
                except ValueError as error:
                    raise FetchFailed(f"/v1/models: {error}") from None
                self.catalog.update(backend, cards, raw)
                backend.models_body = body
            backend.needs_models = False

    async def update_models(self, backend: Backend) -> None:
        """Read a backend's list of models now; a failure is left to its next poll."""
        with contextlib.suppress(FetchFailed):
            await self.read_models(backend)

    def refresh(self) -> asyncio.Task[None]:
        """Begin to read all lists of models, once a second at most; return the last such task.

        It is for requests with unknown names, however many there are: shield it when it is awaited.
        """
        is_old = monotonic() - self._refreshed_at >= REFRESH_S
        if self._refreshing is None or (is_old and self._refreshing.done()):
            self._refreshed_at = monotonic()
            self._refreshing = asyncio.create_task(self._read_all())
        return self._refreshing

    async def _read_all(self) -> None:
        up = [backend for backend in self if backend.health.is_up]
        await asyncio.gather(*(self.read_models(one, younger_than_s=REFRESH_S) for one in up), return_exceptions=True)
