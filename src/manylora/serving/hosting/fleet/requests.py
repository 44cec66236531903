"""Requests of a fleet: each goes to an engine, and on to another if that engine is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Container, Iterable, Mapping, Sequence
from dataclasses import replace
from random import Random

from manylora.core.errors import EngineDead, ManyloraError
from manylora.core.types import Request
from manylora.serving.hosting.fleet.resumption import ResumePolicy, Resumer, ResumeStats
from manylora.serving.hosting.links.client import EngineClient
from manylora.serving.hosting.links.in_flight import EngineLoss, InFlightRequest, OutputStream

__all__ = ["FleetRequests", "Route"]

AT_ONCE = 256
"""Requests of one submission that are made ready at once, in a millisecond or two."""

Route = Callable[[Request, Container[int], int | None], int]
"""Returns the engine for a request, among those that can take it, and counts the request there until it ends.

The number is that of its tokens so far, ``None`` for a new request.
"""


class FleetRequests:
    """Submits, cancels and resumes requests. For the event loop's thread alone.

    Args:
        serving: Returns the engines that take new requests, by number; raises ``CapacityError`` if none does.
        going_on: Returns the engines that take the rest of answers, by number, none if none does; raises
            ``EngineDead`` if none will again.
        everywhere: Returns every engine that may hold requests.
        route: Chooses among several engines; ``None`` for one engine.
        seed: Seeds the draws of requests that bring no seed; ``None`` leaves the draws to the engine.
        resumes: When a request goes on elsewhere.
    """

    def __init__(
        self,
        serving: Callable[[], Mapping[int, EngineClient]],
        going_on: Callable[[], Mapping[int, EngineClient]],
        everywhere: Callable[[], Iterable[EngineClient]],
        *,
        route: Route | None,
        seed: int | None,
        resumes: ResumePolicy,
    ) -> None:
        self._serving = serving
        self._going_on = going_on
        self._everywhere = everywhere
        self._route = route
        self._rng = None if seed is None else Random(seed)
        self._resumer = Resumer(self._place, self._is_open, resumes)
        self._unanswered: dict[
            str, InFlightRequest
        ] = {}  # sent on to an engine that has not answered; not the cancelled

    @property
    def resumes(self) -> ResumeStats:
        """Counters of resumed requests."""
        return self._resumer.stats

    def check_room(self) -> None:
        """Raise ``CapacityError`` if every engine would refuse a new request, by its last turn."""
        refusal: ManyloraError | None = None
        for client in self._serving().values():
            refusal = client.refusal
            if refusal is None:
                return
        if refusal is not None:
            raise refusal

    async def submit(
        self, requests: Sequence[Request], stream: OutputStream, *, each: bool
    ) -> dict[str, ManyloraError]:
        """Submit every request to its engine; with ``each`` return the errors of those that were refused, by id.

        Raises:
            CapacityError: No engine serves.
            EngineDead: Engines died before they had answered; no request is left.
            ManyloraError: Unless ``each``, the first error of a request; no request is left.
        """
        self._serving()
        flights = []
        for request in requests:
            if self._rng is not None and request.seed is None and request.sampling.seed is None:
                request = replace(request, seed=self._rng.getrandbits(63))
            flights.append(InFlightRequest(request, stream))
            if len(flights) % AT_ONCE == 0:
                await asyncio.sleep(0)
        clients = self._serving()
        # A router weighs loads and adapters. One that prefers a full engine must not cost a 429 while another has room.
        with_room = {index: client for index, client in clients.items() if client.refusal is None}
        submitted = [
            asyncio.ensure_future(self._carried(client, share, client.submit(share, each=each), each))
            for client, share in self._shares(flights, with_room or clients)
        ]
        refused: dict[str, ManyloraError] = {}
        try:
            for errors in await asyncio.gather(*submitted):
                refused |= errors
        except BaseException:
            for submission in submitted:  # one whose engine is lost yet must not go on elsewhere
                submission.cancel()
            self.cancel([request.request_id for request in requests])
            raise
        return refused

    def cancel(self, request_ids: Sequence[str], *, stopped: bool = False) -> None:
        """Cancel requests, as ``EngineClient.cancel``, wherever they are."""
        for client in self._everywhere():
            client.cancel(request_ids, stopped=stopped)
        for request_id in request_ids:
            self._unanswered.pop(request_id, None)
        self._resumer.cancel(request_ids)

    def lost(self, flights: list[InFlightRequest], loss: EngineLoss) -> None:
        """Take over the requests of a lost engine."""
        self._resumer.lose(flights, loss)

    def wake(self) -> None:
        """Look again for an engine: one begins to serve, or will not serve again."""
        self._resumer.wake()

    def close(self, error: ManyloraError) -> None:
        """End the requests that wait for an engine, or for its answer."""
        self._resumer.close(error)
        while self._unanswered:
            self._unanswered.popitem()[1].fail(error)

    async def _carried(
        self,
        client: EngineClient,
        flights: Sequence[InFlightRequest],
        answer: Awaitable[dict[str, ManyloraError]],
        each: bool,
    ) -> dict[str, ManyloraError]:
        """Wait for the answer to a submission, from another engine if this one is lost before."""
        try:
            return await answer
        except EngineDead:
            if client.loss is None:
                raise
            return await self._resumer.carry(flights, client.loss, each=each)

    def _place(self, flights: Sequence[InFlightRequest]) -> Awaitable[dict[str, ManyloraError]]:
        """Send the rests of answers to engines; await the result for the errors of those that were refused."""
        shares = self._shares(flights, self._going_on())
        self._unanswered.update((flight.request_id, flight) for flight in flights)
        return self._placed(shares, [client.submit(share, each=True) for client, share in shares])

    async def _placed(
        self,
        shares: Sequence[tuple[EngineClient, Sequence[InFlightRequest]]],
        answers: Sequence[Awaitable[dict[str, ManyloraError]]],
    ) -> dict[str, ManyloraError]:
        refused: dict[str, ManyloraError] = {}
        results = await asyncio.gather(*answers, return_exceptions=True)
        for (client, flights), result in zip(shares, results, strict=True):
            # An engine that hangs answers after minutes or never, and clients leave meanwhile.
            held = [flight for flight in flights if self._unanswered.pop(flight.request_id, None) is not None]
            if isinstance(result, EngineDead) and client.loss is not None:
                self._resumer.lose(held, client.loss)
            elif isinstance(result, ManyloraError):
                refused |= dict.fromkeys((flight.request_id for flight in held), result)
            elif isinstance(result, BaseException):
                raise result
            else:
                for flight in held:
                    if flight.request_id in result:
                        refused[flight.request_id] = result[flight.request_id]
                    else:
                        flight.accepted()
        return refused

    def _is_open(self) -> bool | None:
        try:
            return bool(self._going_on())
        except EngineDead:
            return None

    def _shares(
        self, flights: Sequence[InFlightRequest], clients: Mapping[int, EngineClient]
    ) -> list[tuple[EngineClient, list[InFlightRequest]]]:
        """Return the requests of each engine, as the router chooses."""
        if self._route is None:
            return [(client, list(flights)) for client in clients.values()]
        shares: dict[int, list[InFlightRequest]] = {}
        for flight in flights:
            shares.setdefault(self._route(flight.request, clients, flight.num_answered), []).append(flight)
        return [(clients[engine], share) for engine, share in shares.items()]
