"""Requests of a fleet: each goes to an engine, and on to another if that engine is lost."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Container, Iterator, Mapping, Sequence
from dataclasses import replace
from random import Random

from manylora.core.errors import EngineDead, ManyloraError
from manylora.core.types import Request
from manylora.serving.hosting.fleet.adapters import FleetAdapters
from manylora.serving.hosting.fleet.engines import FleetEngines
from manylora.serving.hosting.fleet.resumption import ResumePolicy, Resumer
from manylora.serving.hosting.links.client import EngineClient
from manylora.serving.hosting.links.in_flight import InFlightRequest, OutputStream

__all__ = ["AnswersInProgress", "FleetRequests", "Route"]

AT_ONCE = 256  # requests of one submission that are made ready at once, in a millisecond or two

Route = Callable[[Request, Container[int], int | None], int]
"""Returns the engine for a request, among those that can take it, and counts the request there until it ends.

The last argument is the number of tokens of its answer so far, ``None`` for a new request.
"""


class AnswersInProgress:
    """Counts the answers in progress, each to its last byte."""

    def __init__(self) -> None:
        self.num = 0
        self._none_left = asyncio.Event()
        self._none_left.set()

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Count an answer as in progress for the duration of a ``with`` block."""
        self.num += 1
        self._none_left.clear()
        try:
            yield
        finally:
            self.num -= 1
            if not self.num:
                self._none_left.set()

    async def ended(self) -> None:
        """Wait until no answer is in progress."""
        while self.num:
            await self._none_left.wait()


class FleetRequests:
    """Submits, cancels and resumes requests. For the event loop's thread alone.

    ``route`` chooses among several engines; it is ``None`` for one engine.
    """

    def __init__(
        self, engines: FleetEngines, adapters: FleetAdapters, *, route: Route | None, policy: ResumePolicy
    ) -> None:
        self.in_progress = AnswersInProgress()
        self._engines = engines
        self._adapters = adapters
        self._route = route
        self._rng = None if policy.seed is None else Random(policy.seed)
        self._resumer = Resumer(self._place, engines.going_on, policy)
        self.resumes = self._resumer.stats
        self.lost, self.wake = self._resumer.lose, self._resumer.wake
        # Sent on to an engine that has not answered; without those that were cancelled.
        self._unanswered: dict[str, InFlightRequest] = {}

    def check_room(self) -> None:
        """Raise ``CapacityError`` if every engine would refuse a new request, by its last turn.

        It costs next to nothing, so that a request beyond all room is refused before its body is read. The engine
        checks a submission again.
        """
        refusal: ManyloraError | None = None
        for client in self._engines.serving().values():
            refusal = client.refusal
            if refusal is None:
                return
        if refusal is not None:
            raise refusal

    async def submit(self, requests: Sequence[Request]) -> OutputStream:
        """Add requests, all or none, and return the stream of their outputs once the engines have accepted them.

        Errors are those of ``EngineClient.submit``; ``CapacityError`` if no engine serves, or an adapter's registry
        does not answer, as well.
        """
        if self._adapters.unavailable:
            for model in {one.model for one in requests}:
                self._adapters.check_available(model)
        stream = OutputStream()
        await self._submit(requests, stream, each=False)
        return stream

    async def submit_each(self, requests: Sequence[Request], stream: OutputStream) -> dict[str, ManyloraError]:
        """Add the valid requests, with outputs on an existing stream; return the errors of the others by request id.

        ``CapacityError`` if no engine serves; after ``EngineDead`` no request is left.
        """
        return await self._submit(requests, stream, each=True)

    def cancel(self, request_ids: Sequence[str], *, stopped: bool = False, refused: bool = False) -> None:
        """Cancel requests wherever they are; no output of them arrives any more.

        Those that have ended are ignored. ``stopped`` and ``refused``: see ``Cancel``.
        """
        for client in self._engines.clients():
            client.cancel(request_ids, stopped=stopped, refused=refused)
        for request_id in request_ids:
            self._unanswered.pop(request_id, None)
        self._resumer.cancel(request_ids)

    def close(self, error: ManyloraError) -> None:
        """End the requests that wait for an engine, or for its answer."""
        self._resumer.close(error)
        while self._unanswered:
            self._unanswered.popitem()[1].fail(error)

    async def _submit(
        self, requests: Sequence[Request], stream: OutputStream, *, each: bool
    ) -> dict[str, ManyloraError]:
        """Submit every request to its engine; with ``each`` return the errors of those that were refused, by id."""
        self._engines.serving()
        in_flight = []
        for request in requests:
            if self._rng is not None and request.seed is None and request.sampling.seed is None:
                request = replace(request, seed=self._rng.getrandbits(63))
            in_flight.append(InFlightRequest(request, stream))
            if len(in_flight) % AT_ONCE == 0:
                await asyncio.sleep(0)
        clients = self._engines.serving()
        # A router weighs loads and adapters. One that prefers a full engine must not cost a 429 while another has room.
        with_room = {index: client for index, client in clients.items() if client.refusal is None}
        submitted = [
            asyncio.ensure_future(self._carried(client, share, client.submit(share, each=each), each))
            for client, share in self._shares(in_flight, with_room or clients)
        ]
        refused: dict[str, ManyloraError] = {}
        try:
            for errors in await asyncio.gather(*submitted):
                refused |= errors
        except BaseException as error:
            for submission in submitted:  # one whose engine is lost yet must not go on elsewhere
                submission.cancel()
            self.cancel([request.request_id for request in requests], refused=isinstance(error, ManyloraError))
            raise
        return refused

    async def _carried(
        self,
        client: EngineClient,
        requests: Sequence[InFlightRequest],
        answer: Awaitable[dict[str, ManyloraError]],
        each: bool,
    ) -> dict[str, ManyloraError]:
        """Wait for the answer to a submission, from another engine if this one is lost before."""
        try:
            return await answer
        except EngineDead:
            if client.loss is None:
                raise
            return await self._resumer.carry(requests, client.loss, each=each)

    def _place(self, requests: Sequence[InFlightRequest]) -> Awaitable[dict[str, ManyloraError]]:
        """Send the rests of answers to engines; await the result for the errors of those that were refused."""
        shares = self._shares(requests, self._engines.going_on())
        self._unanswered.update((one.request_id, one) for one in requests)
        return self._placed(shares, [client.submit(share, each=True) for client, share in shares])

    async def _placed(
        self,
        shares: Sequence[tuple[EngineClient, Sequence[InFlightRequest]]],
        answers: Sequence[Awaitable[dict[str, ManyloraError]]],
    ) -> dict[str, ManyloraError]:
        refused: dict[str, ManyloraError] = {}
        results = await asyncio.gather(*answers, return_exceptions=True)
        for (client, requests), result in zip(shares, results, strict=True):
            # An engine that hangs answers after minutes or never, and clients leave meanwhile.
            held = [one for one in requests if self._unanswered.pop(one.request_id, None) is not None]
            if isinstance(result, EngineDead) and client.loss is not None:
                self._resumer.lose(held, client.loss)
            elif isinstance(result, ManyloraError):
                refused |= dict.fromkeys((one.request_id for one in held), result)
            elif isinstance(result, BaseException):
                raise result
            else:
                for one in held:
                    if one.request_id in result:
                        refused[one.request_id] = result[one.request_id]
                    else:
                        one.accepted()
        return refused

    def _shares(
        self, requests: Sequence[InFlightRequest], clients: Mapping[int, EngineClient]
    ) -> list[tuple[EngineClient, list[InFlightRequest]]]:
        """Return the requests of each engine, as the router chooses."""
        if self._route is None:
            return [(client, list(requests)) for client in clients.values()]
        shares: dict[int, list[InFlightRequest]] = {}
        for one in requests:
            shares.setdefault(self._route(one.request, clients, one.num_answered), []).append(one)
        return [(clients[engine], share) for engine, share in shares.items()]
