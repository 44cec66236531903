"""The data path: a client's request to a backend, and the answer back, byte by byte.

Before the first byte of an answer a request can go to another backend; after it, never. A request that two backends
died on is answered with an error: it is taken to be the cause.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass

import msgspec
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from manylora.core.errors import CapacityError, ManyloraError, ModelNotFound
from manylora.route.backends.backend import Backend
from manylora.route.choice import Choice, Ticket
from manylora.route.config import ProxyConfig
from manylora.route.fleet.adapters import BackendAdapters
from manylora.route.fleet.catalog import Catalog, Found
from manylora.route.fleet.members import Backends
from manylora.route.metrics import AttemptEnd, ProxyMetrics
from manylora.route.relay.body import BodyFields, read_asked, with_model
from manylora.route.relay.client import Client, ClientClosed
from manylora.route.relay.exchange import Exchange
from manylora.route.upstream.connection import Failure, Headers
from manylora.route.upstream.head import answer_headers, request_head
from manylora.route.upstream.pool import CannotConnect
from manylora.serving.http.auth import Gate
from manylora.serving.http.errors import HttpError, error_body, error_response
from manylora.serving.http.http_protocol import chunk_writer, connection_breaker
from manylora.serving.http.room import BodyRoom

__all__ = ["Relay"]

TRY_ELSEWHERE = (429, 502, 503, 504)
FULL_AVOIDED_S = 1.0
"""Time without requests for a backend that was full: its ``Retry-After`` is the turn of one client among many."""

MOST_AVOIDED_S = 10.0
"""Longest ``Retry-After`` that is honoured, in seconds."""
MAX_HELD_BYTES = 1 << 30
"""Bytes of all long bodies until the first byte of their answers, up to which they may be sent again."""

MAX_LOST = 2
"""Backends that a request may be lost on."""

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Work:
    """A request on its way.

    Args:
        asked: Its fields.
        found: The model.
        body: As it came.
        tried: Backends that are not asked again: it was sent there, or its adapter could not be loaded there.
        num_sent: Times that it was sent.
        num_lost: Backends that died on it.
        refusal: The last answer that sent it elsewhere, or its lack.
    """

    scope: Scope
    asked: BodyFields
    found: Found
    body: bytes
    tried: list[Backend]
    num_sent: int = 0
    num_lost: int = 0
    refusal: ManyloraError | None = None


class _Seat:
    """The place of a request at a backend: it counts there from the choice to the end, also while its adapter loads.

    Args:
        ticket: The choice.
        adapter: Its name; empty for the base.
        now: The time in seconds.
    """

    def __init__(self, ticket: Ticket[Backend], adapter: str, now: float) -> None:
        self.ticket = ticket
        self.backend = ticket.member
        self.is_resident = self.backend.is_resident(adapter, now) if adapter else None
        self._adapter = adapter
        self.backend.begin(adapter)

    def leave(self) -> None:
        """Count the request out."""
        self.ticket.end()
        self.backend.end(self._adapter)


class Relay:
    """An ASGI application for the routes that are passed on.

    Args:
        config: Limits and keys.
        backends: All of them.
        catalog: Their models.
        choice: The router.
        adapters: Places adapters.
        metrics: Counts.
        now: Returns the time in seconds.
    """

    def __init__(
        self,
        config: ProxyConfig,
        backends: Backends,
        catalog: Catalog,
        choice: Choice[Backend],
        adapters: BackendAdapters,
        metrics: ProxyMetrics,
        now: Callable[[], float],
    ) -> None:
        self._config = config
        self._backends = backends
        self._catalog = catalog
        self._choice = choice
        self._adapters = adapters
        self._metrics = metrics
        self._now = now
        self._tasks: set[asyncio.Task[None]] = set()
        self._gate = Gate(config.api_keys, config.admin_key)
        self._bodies = BodyRoom(MAX_HELD_BYTES)
        self._authorization = None if config.backend_key is None else b"Bearer " + config.backend_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        client = Client(receive, self._bodies.enter(lambda: self._gate.caller_of(Request(scope))))
        try:
            await self._answer(scope, client, send)
        except ClientClosed:
            self._metrics.refused("client gone")
        except _Refused as refusal:
            await refusal.send(send)
        except ManyloraError as error:
            self._metrics.refused(str(error.status))
            await error_response(error)(scope, receive, send)
        finally:
            client.close()

    async def _answer(self, scope: Scope, client: Client, send: Send) -> None:
        self._gate.check_inference(Request(scope))
        work = await self._read(scope, client)
        while True:
            seat = await self._seat(work, client)
            backend, began_at = seat.backend, self._now()
            work.tried.append(backend)
            work.num_sent += 1
            exchange: Exchange | None = None
            outcome = AttemptEnd.FAILED
            try:
                exchange = await self._attempt(work, backend, client)
                outcome = self._judge(work, backend, exchange)
                if outcome is AttemptEnd.ANSWERED:
                    seat.ticket.started()
                    work.body = b""
                    client.forget_body()
                    if work.found.adapter:
                        self._adapters.used(backend, work.found.name)
                        self._metrics.adapter_request(backend, seat.is_resident)
                    self._metrics.first_byte(backend, self._now() - began_at)
                    await self._pass_on(scope, client, send, exchange)
                    outcome = AttemptEnd.ANSWERED if exchange.is_whole else AttemptEnd.BROKEN
                    if exchange.failure is Failure.STALLED:
                        self._count_stall(backend, exchange)
                    return
            except ClientClosed:
                outcome = AttemptEnd.CANCELLED
                raise
            finally:
                if exchange is not None:
                    exchange.cancel()
                seat.leave()
                self._metrics.attempt(backend, outcome, self._now() - began_at)
            reason = exchange.failure.value if exchange.failure is not None else str(exchange.status)
            logger.info(
                "retry url=%s model=%s reason=%s attempts=%d", backend.url, work.found.name, reason, work.num_sent
            )

    async def _read(self, scope: Scope, client: Client) -> _Work:
        """Return a request, its body read and its model found; errors as of ``Client.body`` and ``_find``."""
        body = await client.body(self._config.max_body_bytes)
        asked = read_asked(body)
        return _Work(scope, asked, await self._find(asked.model), body, [])

    async def _find(self, model: str | None) -> Found:
        """Return a model; of an unknown one, after the lists of models were read anew.

        Raises:
            ModelNotFound: No backend lists it.
            CapacityError: No backend is up.
        """
        found = self._catalog.find(model)
        if found is None:
            await self._backends.refresh()
            found = self._catalog.find(model)
        if found is not None:
            return found
        if not len(self._catalog):
            raise self._nothing_up()
        if model is None:
            raise ModelNotFound("The request names no model, and there is more than one base.", param="model")
        raise ModelNotFound(f"The model `{model[:200]}` does not exist.", param="model")

    # -- choice ------------------------------------------------------------------------------------------------------

    async def _seat(self, work: _Work, client: Client) -> _Seat:
        """Choose a backend and count the request in, and place the adapter there if that is needed.

        Raises:
            ManyloraError: There is none left, and why.
        """
        found = work.found
        client.waits_for(None)
        if work.num_lost >= MAX_LOST:
            raise HttpError(500, f"{work.num_lost} backends were lost while they worked on this request.")
        if len(work.tried) > self._config.retries:
            raise self._last_refusal(work)
        holders = self._available(found.holders, work)
        everywhere = holders
        if found.base is not None and self._config.manage_adapters:
            others = [one for one in self._catalog.of_base(found.base) if self._adapters.wants(one, found.name)]
            everywhere = [*holders, *self._available(others, work)]
        if not everywhere:
            everywhere = holders = self._regardless_of_health(work)
        if not everywhere:
            raise self._last_refusal(work)
        seat = self._take(work, everywhere)
        if found.base is None or seat.backend in holders:
            return seat
        placing = self._adapters.place(seat.backend, found.name)
        if not holders:
            is_placed = False
            try:
                is_placed = await asyncio.shield(placing)
                client.waits_for(None)
                if is_placed:
                    return seat
            finally:
                if not is_placed or client.is_gone:
                    seat.leave()
            work.tried.append(seat.backend)
            return await self._seat(work, client)
        seat.leave()  # the load goes on, for later requests
        return self._take(work, holders)

    def _take(self, work: _Work, among: Sequence[Backend]) -> _Seat:
        adapter = work.found.adapter
        return _Seat(self._choice.choose(adapter, work.asked.num_prompt_tokens, among), adapter, self._now())

    def _available(self, among: Iterable[Backend], work: _Work) -> list[Backend]:
        """Return the backends that can take the request, by their slow starts and requests to wait if any can."""
        now = self._now()
        left = [one for one in among if one not in work.tried]
        return [one for one in left if one.can_take(now)] or [one for one in left if one.can_be_forced()]

    def _regardless_of_health(self, work: _Work) -> list[Backend]:
        """Return backends that are out, while too many are: the fault may lie in the signs and not in all of them.

        Those that are in come first, and up to their bounds: a request that meets a dead backend loses a try.
        """
        holders, name = work.found.holders, work.found.name
        num_up = sum(one.health.is_up for one in holders)
        if 100 * num_up >= self._config.panic_threshold * len(holders):
            return []
        left = [one for one in holders if one not in work.tried and one.can_be_tried()]
        return [one for one in left if not work.found.adapter or self._adapters.is_current(one, name)]

    def _last_refusal(self, work: _Work) -> ManyloraError:
        """Return the error for a request that no backend is left for."""
        if work.refusal is not None:
            return work.refusal
        up = [one for one in work.found.holders if one.health.is_up]
        if not up and not work.num_lost:
            return self._nothing_up()
        if work.num_sent:
            return HttpError(502, f"No backend answered; tried {work.num_sent}.", kind="BadGatewayError")
        if up:
            return CapacityError("All backends of this model are at their limit of requests; please try again.")
        return self._nothing_up()

    def _nothing_up(self) -> CapacityError:
        return CapacityError(
            "No backend of this model is up; please try again.", retry_after_s=self._config.poll_s, status=503
        )

    def _in_background(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # -- one attempt -------------------------------------------------------------------------------------------------

    async def _attempt(self, work: _Work, backend: Backend, client: Client) -> Exchange:
        """Send the request, and wait for the first bytes of the answer's body, its end, or a failure."""
        name = work.found.name_at(backend)
        body = work.body if work.asked.model in (None, name) else with_model(work.body, name)
        scope = work.scope
        query: bytes = scope["query_string"]
        peer = scope.get("client")
        head = request_head(
            backend.address,
            scope["method"].encode(),
            scope["path"].encode() + (b"?" + query if query else b""),
            num_body_bytes=len(body),
            headers=scope["headers"],
            authorization=self._authorization,
            passes_authorization=not self._config.api_keys,
            client=peer[0].encode() if peer else None,
        )
        connection, was_stale = backend.pool.idle(), False
        while True:
            exchange = Exchange(
                backend, first_byte_s=self._config.first_byte_timeout_s, idle_s=self._config.idle_timeout_s
            )
            client.waits_for(exchange)
            if connection is None:
                try:
                    connection = await backend.pool.connect()
                except CannotConnect:
                    # A backend that is gone with its idle connection may have died on this very request.
                    exchange.failed(Failure.LOST if was_stale else Failure.CONNECT)
                    return exchange
                if exchange.is_over:  # the client went, or the backend fell, meanwhile
                    connection.close()
                    client.waits_for(None)
                    return exchange
            exchange.begin(connection, head, body)
            await exchange.started()
            if exchange.failure is Failure.CANCELLED:
                raise ClientClosed
            if exchange.failure is not Failure.STALE:
                return exchange
            connection, was_stale = None, True

    def _judge(self, work: _Work, backend: Backend, exchange: Exchange) -> AttemptEnd:
        """Return whether an answer is for the client; note the others, and count them for the backend's health."""
        if exchange.failure is not None and not exchange.has_body:
            if exchange.failure in (Failure.LOST, Failure.DOWN, Failure.STALLED):
                work.num_lost += 1
            if exchange.failure is Failure.STALLED:
                self._count_stall(backend, exchange)
                work.refusal = _timed_out(self._config.first_byte_timeout_s)
                if not exchange.is_backend_silent:  # it serves others: this request is slow, and would be elsewhere
                    raise work.refusal
                return AttemptEnd.FAILED
            self._metrics.failure(backend, exchange.failure.value)
            if exchange.failure is not Failure.DOWN:
                self._backends.failed(backend, exchange.failure.value)
            return AttemptEnd.FAILED
        if exchange.status == 404 and work.found.adapter:
            # The adapter may be gone from there: another backend may have it, and the list tells later.
            self._in_background(self._backends.refresh())
            if not self._available(work.found.holders, work) or len(work.tried) > self._config.retries:
                return AttemptEnd.ANSWERED
        elif exchange.status not in TRY_ELSEWHERE:
            backend.health.answered()
            return AttemptEnd.ANSWERED
        self._metrics.failure(backend, str(exchange.status))
        if exchange.status == 429:
            backend.avoid_until = self._now() + FULL_AVOIDED_S
        elif exchange.status == 503:
            backend.avoid_until = self._now() + _retry_after_s(exchange.headers)
        if exchange.is_whole:
            work.refusal = _Refused(exchange.status, exchange.headers, b"".join(exchange.held()))
        return AttemptEnd.REFUSED

    def _count_stall(self, backend: Backend, exchange: Exchange) -> None:
        self._metrics.failure(backend, Failure.STALLED.value)
        if exchange.is_backend_silent:
            self._backends.stalled(backend)

    async def _pass_on(self, scope: Scope, client: Client, send: Send, exchange: Exchange) -> None:
        """Send the answer, from its first byte to its end."""
        client.waits_for(exchange)
        headers = answer_headers(exchange.headers)
        await send({"type": "http.response.start", "status": exchange.status, "headers": headers})
        write = chunk_writer(scope)
        while True:
            for piece in exchange.held():
                if not write(piece):
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
            exchange.write_to(write)
            await exchange.more()
            if exchange.is_over:
                break
        for piece in exchange.held():
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        if exchange.failure is Failure.CANCELLED:
            raise ClientClosed
        if exchange.is_whole:
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            return
        if _is_event_stream(exchange.headers) and exchange.last.endswith(b"\n\n"):
            error = HttpError(502, "The backend was lost in the middle of this answer.", kind="BadGatewayError")
            if exchange.failure is Failure.STALLED:
                error = _timed_out(self._config.idle_timeout_s)
            event = b"data: %b\n\ndata: [DONE]\n\n" % msgspec.json.encode(error_body(error))
            await send({"type": "http.response.body", "body": event, "more_body": False})
            return
        connection_breaker(scope)()
        await client.until_gone()


class _Refused(ManyloraError):
    """A backend's refusal that is passed on, since no other backend is left."""

    def __init__(self, status: int, headers: Headers, body: bytes) -> None:
        super().__init__(f"A backend answered {status}")
        self._start = {"type": "http.response.start", "status": status, "headers": answer_headers(headers)}
        self._body = {"type": "http.response.body", "body": body, "more_body": False}

    async def send(self, send: Send) -> None:
        """Pass it on."""
        await send(self._start)
        await send(self._body)


def _is_event_stream(headers: Headers) -> bool:
    return any(name == b"content-type" and value.startswith(b"text/event-stream") for name, value in headers)


def _retry_after_s(headers: Headers) -> float:
    text = next((value for name, value in headers if name == b"retry-after"), b"1")
    return min(MOST_AVOIDED_S, float(text)) if text.isdigit() else 1.0


def _timed_out(limit_s: float) -> HttpError:
    return HttpError(504, f"The backend sent no byte of this answer for {limit_s:g} s.", kind="GatewayTimeoutError")
