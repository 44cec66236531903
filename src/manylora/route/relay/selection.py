"""The backend of a request: a router's choice among the backends that can take it, and the load of its adapter there.

Candidates are the backends that list the model and were not tried yet. With ``manage_adapters`` the backends of the
same base are candidates as well: if the router wants one of them, the adapter is loaded there. The request waits for
the load where no other backend has the adapter; otherwise another backend takes it, and the load is for later requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from time import monotonic

from starlette.types import Scope

from manylora.core.errors import CapacityError, ManyloraError
from manylora.route.backend import Backend
from manylora.route.choice import Choice, PromptText, Ticket
from manylora.route.config import ProxyConfig
from manylora.route.fleet.adapters import AdapterPlacement
from manylora.route.fleet.changes import BackendChanges
from manylora.route.fleet.members import Backends, Found
from manylora.route.relay.exchange import Client
from manylora.route.relay.tenants import TenantCall
from manylora.serving.http.errors import HttpError

__all__ = ["RelayedRequest", "Selection"]

MAX_LOST = 2  # backends that a request may be lost on


@dataclass(slots=True)
class RelayedRequest:
    """A request on its way."""

    scope: Scope  # its line and headers
    model: str | None  # the model's name in its body; ``None`` if it has none
    prompt: PromptText
    found: Found
    body: bytes  # its body, until the first byte of its answer
    # Backends that are not asked again: it was sent there, or its adapter could not be loaded there.
    tried: list[Backend] = field(default_factory=list)
    num_sent: int = 0  # times that it was sent
    num_lost: int = 0  # backends that died on it
    refusal: ManyloraError | None = None  # the last answer that sent it elsewhere, or an error for the lack of one
    call: TenantCall | None = None  # the tenant's side of it; ``None`` without tenants


@dataclass(slots=True, eq=False)
class Selection:
    """Chooses backends for requests."""

    config: ProxyConfig  # limits
    backends: Backends
    choice: Choice  # the router
    changes: BackendChanges  # knows which backends have the present version of an adapter
    placement: AdapterPlacement

    async def choose(self, request: RelayedRequest, client: Client) -> Ticket:
        """Choose a backend and count the request there, also while its adapter is loaded.

        ``ClientClosed`` if the client went meanwhile; another error says why there is no backend left.
        """
        while True:
            client.waits_for(None)
            holders, candidates = self._candidates(request)
            ticket = self._take(request, candidates)
            if not request.found.adapter or ticket.member in holders:
                return ticket
            placing = self.placement.place(ticket.member, request.found.name)
            if holders:
                ticket.end()
                return self._take(request, holders)
            if await self._is_placed(placing, ticket, client):
                return ticket
            request.tried.append(ticket.member)

    def can_retry(self, request: RelayedRequest) -> bool:
        """Whether a backend that lists the model is left for a request, and a try."""
        return len(request.tried) <= self.config.retries and bool(self._available(request.found.holders, request))

    def none_up(self) -> CapacityError:
        """Return the error for a request whose backends are all down."""
        return self.backends.none_up("No backend of this model")

    def _candidates(self, request: RelayedRequest) -> tuple[list[Backend], list[Backend]]:
        """Return the backends that have the model, and all that may be chosen."""
        found = request.found
        if request.num_lost >= MAX_LOST:
            raise HttpError(500, f"{request.num_lost} backends were lost while they worked on this request.")
        if len(request.tried) > self.config.retries:
            raise self._last_refusal(request)
        holders = candidates = self._available(found.holders, request)
        if found.base is not None and self.config.manage_adapters:
            others = [
                one
                for one in self.backends.catalog.of_base(found.base)
                if found.only_at in (None, one.url) and self.placement.can_place(one, found.name)
            ]
            candidates = [*holders, *self._available(others, request)]
        if not candidates:
            holders = candidates = self._regardless_of_health(request)
        if not candidates:
            raise self._last_refusal(request)
        return holders, candidates

    async def _is_placed(self, placing: asyncio.Task[bool], ticket: Ticket, client: Client) -> bool:
        """Wait for the load of an adapter; return whether it worked, else the ticket has ended."""
        is_placed = False
        try:
            is_placed = await asyncio.shield(placing)
            client.waits_for(None)
            return is_placed
        finally:
            if not is_placed or client.is_gone:
                ticket.end()

    def _take(self, request: RelayedRequest, among: Sequence[Backend]) -> Ticket:
        return self.choice.choose(request.found.adapter, request.prompt, among)

    def _available(self, among: Iterable[Backend], request: RelayedRequest) -> list[Backend]:
        """Return the backends that can take the request; slow starts and requests to wait count if others are left."""
        now = monotonic()
        left = [one for one in among if one not in request.tried]
        return [one for one in left if one.can_take(now)] or [one for one in left if one.can_be_forced()]

    def _regardless_of_health(self, request: RelayedRequest) -> list[Backend]:
        """Return backends that are down, while too many are: the signs may be wrong about some of them.

        Backends that are up come first, and up to their bounds: a request that meets a dead backend loses a try.
        """
        found = request.found
        num_up = sum(one.health.is_up for one in found.holders)
        if 100 * num_up >= self.config.panic_threshold * len(found.holders):
            return []
        left = [one for one in found.holders if one not in request.tried and one.can_be_tried()]
        return [one for one in left if not found.adapter or self.changes.is_current(one, found.name)]

    def _last_refusal(self, request: RelayedRequest) -> ManyloraError:
        """Return the error for a request that no backend is left for."""
        if request.refusal is not None:
            return request.refusal
        up = [one for one in request.found.holders if one.health.is_up]
        if not up and not request.num_lost:
            return self.none_up()
        if request.num_sent:
            return HttpError(502, f"No backend answered; tried {request.num_sent}.", kind="BadGatewayError")
        if up:
            return CapacityError("All backends of this model are at their limit of requests; please try again.")
        return self.none_up()
