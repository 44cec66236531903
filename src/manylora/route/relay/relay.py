"""The data path: a client's request to a backend, and the answer back, byte by byte.

Before the first byte of an answer a request can go to another backend; after it, never. A request that two backends
died on is answered with an error: it is taken to be the cause.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from time import monotonic, time_ns

import msgspec
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from manylora.core.errors import ManyloraError, ModelNotFound
from manylora.route.backend import Backend
from manylora.route.config import ProxyConfig
from manylora.route.fleet.adapters import AdapterPlacement
from manylora.route.fleet.members import Backends, Found
from manylora.route.fleet.names import conversation_key
from manylora.route.metrics import AttemptEnd, ProxyMetrics
from manylora.route.relay.exchange import Client, ClientClosed, Exchange, is_event_stream, read_fields, with_fields
from manylora.route.relay.selection import RelayedRequest, Selection
from manylora.route.relay.tenants import RoutedTenants
from manylora.route.report import ServerKind
from manylora.route.upstream.address import answer_headers, request_head
from manylora.route.upstream.connection import Failure, Headers
from manylora.route.upstream.pool import CannotConnect
from manylora.serving.http.auth import Gate
from manylora.serving.http.errors import HttpError, error_body, error_response
from manylora.serving.http.http_protocol import chunk_writer, connection_breaker
from manylora.serving.http.room import BodyRoom
from manylora.serving.http.traces import TRACE

__all__ = ["Relay", "pass_on"]

TRY_ELSEWHERE = (429, 502, 503, 504)
FULL_AVOIDED_S = 1.0
"""Time without requests for a backend that was full: its ``Retry-After`` is the turn of one client among many."""

MOST_AVOIDED_S = 10.0  # longest ``Retry-After`` that is honoured, in seconds
ARM_HEADER = b"x-manylora-model"  # the version that answered a public name
MAX_BODY_BYTES = 32 << 20
MAX_HELD_BYTES = 1 << 30
"""Bytes of all long bodies until the first byte of their answers, up to which they may be sent again."""

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Relay:
    """An ASGI application for the routes that are passed on."""

    config: ProxyConfig  # limits
    gate: Gate  # knows the keys of callers
    backends: Backends
    selection: Selection  # chooses the backend of a request
    placement: AdapterPlacement  # learns which adapters are used
    metrics: ProxyMetrics
    tenants: RoutedTenants | None = None  # lets the requests of tenants in; ``None`` if there are none
    _bodies: BodyRoom = field(default_factory=lambda: BodyRoom(MAX_HELD_BYTES))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        client = Client(receive, self._bodies.enter(lambda: self.gate.caller_of(Request(scope))))
        request: RelayedRequest | None = None
        try:
            caller = self.gate.check_inference(Request(scope))
            if self.tenants is not None:
                self.tenants.room.check(caller)
            request = await self._read(scope, client, caller)
            while not await self._try(request, client, send):
                pass
        except ClientClosed:
            self.metrics.refused("client gone")
        except _Refused as refusal:
            await refusal.send(send)
        except ManyloraError as error:
            self.metrics.refused(str(error.status))
            await error_response(error)(scope, receive, send)
        finally:
            client.close()
            if request is not None and request.call is not None:
                request.call.close()

    async def _read(self, scope: Scope, client: Client, caller: str) -> RelayedRequest:
        """Read the body of a request and find its model.

        Prompts of two tenants share nothing, and without keys those of two callers that the backends tell apart.
        ``ManyloraError`` if the body is too large or no JSON object, its model cannot be found, or the tenant has no
        room for it.
        """
        body = await client.body(MAX_BODY_BYTES)
        model, prompt = read_fields(body)
        salt = caller.encode() or next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        prompt.salt = b"%d %b %b" % (len(salt), salt, prompt.salt)
        found = await self._find(model, caller, body)
        call = None if self.tenants is None else self.tenants.begin(caller, found, prompt.num_tokens, scope["path"])
        return RelayedRequest(scope, model, prompt, found, body, call=call)

    async def _find(self, model: str | None, caller: str, body: bytes) -> Found:
        """Return a model; for an unknown name the lists of models are read anew first.

        A model that a tenant may not call is refused at once, whether there is one of that name or not.

        ``ModelNotFound`` if no backend lists it or the caller may not call it, ``CapacityError`` if none is up.
        """
        if (found := self._known(model, caller, body)) is None:
            await asyncio.shield(self.backends.refresh())
            found = self._known(model, caller, body)
        if found is not None:
            return found
        if not len(self.backends.catalog):
            raise self.selection.none_up()
        raise _unknown(model)

    def _known(self, model: str | None, caller: str, body: bytes) -> Found | None:
        catalog, tenant = self.backends.catalog, self.gate.tenant(caller)
        name = catalog.bare_name(model)
        if tenant is not None and name is not None and not tenant.may_call(name):
            raise _unknown(model)
        if model is not None and model in catalog.names:  # who may call a name may call its versions by it
            return catalog.find_arm(model, conversation_key(body))
        return catalog.find(model)

    # -- one attempt -------------------------------------------------------------------------------------------------

    async def _try(self, request: RelayedRequest, client: Client, send: Send) -> bool:
        """Send a request to a backend; return whether the client has its answer, else it may be sent elsewhere."""
        trace, headers, span = request.scope.get(TRACE), request.scope["headers"], None
        chosen_since_ns = 0 if trace is None else time_ns()
        ticket = await self.selection.choose(request, client)
        backend, began_at = ticket.member, monotonic()
        if trace is not None:
            trace.add("choice", chosen_since_ns)
            span, headers = trace.relay(backend.url, headers)
        adapter = request.found.adapter
        is_resident = backend.is_resident(adapter, began_at) if adapter else None
        request.tried.append(backend)
        request.num_sent += 1
        exchange: Exchange | None = None
        outcome = AttemptEnd.FAILED
        try:
            exchange = await self._send(request, backend, client, headers)
            outcome = self._judge(request, backend, exchange)
            if outcome is AttemptEnd.ANSWERED:
                ticket.started()
                request.body = b""  # it will not be sent again
                client.forget_body()
                if adapter:
                    self.placement.note_used(backend, adapter)
                self.metrics.begun(backend, ticket.sent, monotonic() - began_at, is_resident)
                if span is not None:
                    span.add_event("first byte")
                if request.found.arm:
                    exchange.headers.append((ARM_HEADER, request.found.arm.encode()))
                await pass_on(request, client, send, exchange, idle_timeout_s=self.config.idle_timeout_s)
                outcome = AttemptEnd.ANSWERED if exchange.is_whole else AttemptEnd.BROKEN
                if exchange.failure is Failure.STALLED:
                    self._count_stall(backend, exchange)
                return True
        except ClientClosed:
            outcome = AttemptEnd.CANCELLED
            raise
        finally:
            if exchange is not None:
                exchange.cancel()
            ticket.end()
            self.metrics.attempt(backend, outcome, monotonic() - began_at)
            if span is not None:
                span.set_attribute("manylora.outcome", outcome.value)
                span.end()
            if request.found.arm:
                self.metrics.arm(request.model or "", request.found.arm, outcome)
        reason = exchange.failure.value if exchange.failure is not None else str(exchange.status)
        logger.info(
            "retry url=%s model=%s reason=%s attempts=%d", backend.url, request.found.name, reason, request.num_sent
        )
        return False

    async def _send(self, request: RelayedRequest, backend: Backend, client: Client, headers: Headers) -> Exchange:
        """Send the request, and wait for the first bytes of the answer's body, its end, or a failure."""
        name, call = request.found.name_at(backend), request.call
        body = request.body
        if call is not None:  # also where it has the name: the backend may read another one of several fields
            body = with_fields(body, name, call.tenant if backend.kind is ServerKind.VLLM else None)
            headers = call.sent_headers(headers)
        elif request.model not in (None, name):
            body = with_fields(body, name)
        scope = request.scope
        query: bytes = scope["query_string"]
        peer = scope.get("client")
        authorization, passes_key = backend.authorization, not self.gate.is_keyed
        if call is not None and (call.passes_key or call.authorization is not None):
            authorization, passes_key = call.authorization, call.passes_key
        head = request_head(
            backend.address,
            scope["method"].encode(),
            scope["path"].encode() + (b"?" + query if query else b""),
            num_body_bytes=len(body),
            headers=headers,
            authorization=authorization,
            passes_authorization=passes_key,
            client=peer[0].encode() if peer else None,
            tenant=None if call is None else call.header,
        )
        connection, was_stale = backend.pool.idle(), False
        while True:
            exchange = Exchange(
                backend,
                first_byte_s=self.config.first_byte_timeout_s,
                idle_s=self.config.idle_timeout_s,
                read=None if call is None else call.read,
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

    def _judge(self, request: RelayedRequest, backend: Backend, exchange: Exchange) -> AttemptEnd:
        """Return whether an answer is for the client; note the others, and count them for the backend's health.

        ``HttpError`` (504) for a request that is slow on a backend that serves others, and would be elsewhere.
        """
        if exchange.failure is not None and not exchange.last:
            if exchange.failure in (Failure.LOST, Failure.DOWN, Failure.STALLED):
                request.num_lost += 1
            if exchange.failure is Failure.STALLED:
                self._count_stall(backend, exchange)
                request.refusal = _timed_out(self.config.first_byte_timeout_s)
                if not exchange.is_backend_silent:
                    raise request.refusal
                return AttemptEnd.FAILED
            self.metrics.failure(backend, exchange.failure.value)
            if exchange.failure is not Failure.DOWN:
                backend.failed(exchange.failure.value)
            return AttemptEnd.FAILED
        if exchange.status == 404 and request.found.adapter:
            # The adapter may be gone from there: another backend may have it, and the list tells later.
            self.backends.refresh()
            if not self.selection.can_retry(request):
                return AttemptEnd.ANSWERED
        elif exchange.status not in TRY_ELSEWHERE:
            backend.health.answered()
            return AttemptEnd.ANSWERED
        self.metrics.failure(backend, str(exchange.status))
        if exchange.status == 429:
            backend.avoid_until = monotonic() + FULL_AVOIDED_S
        elif exchange.status == 503:
            backend.avoid_until = monotonic() + _retry_after_s(exchange.headers)
        if exchange.is_whole:
            request.refusal = _Refused(exchange.status, exchange.headers, b"".join(exchange.held()))
        return AttemptEnd.REFUSED

    def _count_stall(self, backend: Backend, exchange: Exchange) -> None:
        self.metrics.failure(backend, Failure.STALLED.value)
        if exchange.is_backend_silent:
            backend.stalled()


def _unknown(model: str | None) -> ModelNotFound:
    if model is None:
        return ModelNotFound("The request names no model, and there is more than one base.", param="model")
    return ModelNotFound(f"The model `{model[:200]}` does not exist.", param="model")


# -- the answer --------------------------------------------------------------------------------------------------------


async def pass_on(
    request: RelayedRequest, client: Client, send: Send, exchange: Exchange, *, idle_timeout_s: float
) -> None:
    """Send an answer to the client, from its first byte to its end."""
    if not exchange.drops:
        client.waits_for(exchange)
    scope, headers = request.scope, answer_headers(exchange.headers)
    if request.call is not None:
        headers = request.call.headers(headers)
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
    elif is_event_stream(exchange.headers) and exchange.ends_an_event:
        error = HttpError(502, "The backend was lost in the middle of this answer.", kind="BadGatewayError")
        if exchange.failure is Failure.STALLED:
            error = _timed_out(idle_timeout_s)
        event = b"data: %b\n\ndata: [DONE]\n\n" % msgspec.json.encode(error_body(error))
        await send({"type": "http.response.body", "body": event, "more_body": False})
    else:
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


def _retry_after_s(headers: Headers) -> float:
    text = next((value for name, value in headers if name == b"retry-after"), b"1")
    return min(MOST_AVOIDED_S, float(text)) if text.isdigit() else 1.0


def _timed_out(limit_s: float) -> HttpError:
    return HttpError(504, f"The backend sent no byte of this answer for {limit_s:g} s.", kind="GatewayTimeoutError")
