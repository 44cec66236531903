"""The HTTP server over a fleet: the tokenizer, the application, its routes and the responses to errors.

Importing this takes seconds, most of them in the libraries of the tokenizer: ``serve`` does it while the engines start.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from manylora.core.adapters.request_files import names_of_base
from manylora.core.config import EngineConfig, ServerConfig
from manylora.core.errors import CapacityError, ManyloraError
from manylora.serving.api.adapters import admin_routes
from manylora.serving.api.chat import chat_routes
from manylora.serving.api.completions import completion_routes
from manylora.serving.api.docs import docs_routes
from manylora.serving.api.invocations import invocation_routes
from manylora.serving.api.model_settings import ModelSettings
from manylora.serving.api.models import model_routes, tokenizer_routes
from manylora.serving.api.page import live_page
from manylora.serving.api.publishing import publish_routes
from manylora.serving.api.request import Context, context_of, make_context
from manylora.serving.api.respond import DIGEST_HEADER, VERSION_HEADER
from manylora.serving.api.responses import response_routes
from manylora.serving.api.status import status_routes
from manylora.serving.hosting.fleet.fleet import Fleet
from manylora.serving.hosting.spool import AdapterSpool
from manylora.serving.http.access import AccessLayer, Refusals, request_id_of
from manylora.serving.http.auth import without_foreign_pages
from manylora.serving.http.connections import ConnectionBounds, within_open_files
from manylora.serving.http.errors import HttpError, error_response, on_http_exception
from manylora.serving.http.http_protocol import ChunkWritingProtocol
from manylora.serving.http.listening import HttpServer
from manylora.serving.http.tenants import TenantBook
from manylora.serving.http.tls import server_tls
from manylora.serving.http.traces import TraceLayer, Traces
from manylora.serving.metrics.prometheus import Metrics
from manylora.serving.text import Tokenizer
from manylora.serving.text.model_files import load_generation_defaults

__all__ = ["connection_bounds", "make_app", "make_http_server"]

ANSWER_ROUTES = (*completion_routes, *chat_routes, *response_routes, *invocation_routes)
ROOM_PATHS = frozenset(route.path for route in ANSWER_ROUTES)  # routes whose requests go to an engine
LAST_WRITES_S = 2.0  # time that clients have to read the last bytes of failed answers, in seconds
FILES_BESIDE_CONNECTIONS = 64  # files that the server opens at once, beside connections and engines

FILES_PER_ENGINE = 32
"""Files that an engine takes here: its sockets, its pipe, and those of the next while it is replaced."""

logger = logging.getLogger(__name__)


def make_http_server(
    engine: EngineConfig,
    server: ServerConfig,
    *,
    fleet: Fleet,
    metrics: Metrics,
    named_paths: Sequence[str],
    spool: AdapterSpool | None,
    on_listening: Callable[[], None],
    tenants: TenantBook | None = None,
    traces: Traces | None = None,
) -> HttpServer:
    """Load the tokenizer and return the server, which does not listen yet.

    ``named_paths`` are folders of adapters named at the start, which may be loaded again, ``spool`` takes adapters that
    come with requests, ``tenants`` are those of a file, ``traces`` take the spans of requests. ``ConfigError`` if there
    is no such tokenizer, or TLS cannot be set up.
    """
    model, web = engine.model, server.web
    tokenizer = Tokenizer.load(model.tokenizer or model.model, revision=model.revision, chat_template=web.chat_template)
    # A simulated engine reads only the tokenizer of its model, which may be all there is.
    named = model if engine.simulate is None else replace(model, model=model.tokenizer or model.model)
    # An adapter named at start may be loaded again from its directory; those found are below a folder of adapters.
    roots = [*server.lora_dirs, *server.allowed_lora_paths, *named_paths]
    context = make_context(
        engine,
        server,
        fleet=fleet,
        tokenizer=tokenizer,
        settings=ModelSettings(
            base_defaults=load_generation_defaults(named),
            base_name=fleet.served_name,
            adapters=fleet.adapters.loaded,
            tokenizer=tokenizer,
            trusts_templates=server.trust_adapter_templates,
            base_names=names_of_base(model.model, fleet.served_name, *web.aliases),
            roots=engine.adapters.real_roots,
        ),
        metrics=metrics,
        lora_roots=tuple(dict.fromkeys(Path(root) for root in roots)),
        spool=spool,
        tenants=tenants,
    )
    app = make_app(context)
    return HttpServer(
        app if traces is None else TraceLayer(app, traces, ROOM_PATHS),
        connection_bounds(server),
        on_listening,
        drain_s=LAST_WRITES_S,
        protocol=functools.partial(ChunkWritingProtocol, refusals=_refusals(context)),
        tls=server_tls(web.tls),
        root_path=web.root_path,
        on_shutdown=context.forms.close,
    )


def _refusals(context: Context) -> Refusals | None:
    """Return the refusals without a task; ``None`` if a line is to be logged for each request."""
    web = context.config.web
    if web.log_requests:
        return None
    return Refusals(
        paths=ROOM_PATHS,
        check_room=context.fleet.requests.check_room,
        callers=context.callers,
        gate=context.gate,
        retries=context.retries,
        count=context.metrics.count_response,
        count_refusal=context.metrics.count_refusal,
        monotonic_s=context.monotonic_s,
        names_all=web.request_id_headers,
    )


def connection_bounds(config: ServerConfig) -> ConnectionBounds:
    """Return the bounds of connections, fewer than the files that this process may open."""
    files_beside = FILES_BESIDE_CONNECTIONS + FILES_PER_ENGINE * config.fleet.num_places
    max_connections = within_open_files(config.max_connections, files_beside=files_beside)
    if max_connections < config.max_connections:
        logger.warning("fewer_connections max_connections=%d reason=%r", max_connections, "the limit of open files")
    per_address = min(config.max_connections_per_address, config.max_connections)
    return ConnectionBounds(
        max_connections=max_connections,
        # Callers over a Unix socket have no address. Of fewer connections, an address has the same share.
        max_per_address=max_connections
        if config.web.uds
        else max(1, per_address * max_connections // config.max_connections),
        header_timeout_s=config.header_timeout_s,
        body_timeout_s=config.body_timeout_s,
        write_timeout_s=config.write_timeout_s,
        keep_alive_s=config.keep_alive_s,
    )


async def _on_error(request: Request, error: Exception) -> Response:
    """Answer with a ``ManyloraError``; Starlette calls this."""
    assert isinstance(error, ManyloraError)
    context, scope = context_of(request), request.scope
    if error.status == 429 and scope["path"].removeprefix(scope.get("root_path", "")) in ROOM_PATHS:
        context.metrics.count_refusal(error)
    if isinstance(error, CapacityError):
        error.retry_after_s = context.retries.after_s(error, context.monotonic_s())
    return error_response(error)


async def _on_bug(request: Request, error: Exception) -> Response:
    """Answer an unexpected exception; its details are logged and not sent."""
    logger.error("bug path=%s request_id=%s error=%r", request.scope["path"], request_id_of(request.scope), error)
    return error_response(HttpError(500, "The server failed on this request; see its log."))


def make_app(context: Context) -> ASGIApp:
    """Return the application that serves ``context``."""
    web = context.config.web
    routes = [*ANSWER_ROUTES, *publish_routes, *admin_routes, *model_routes, *status_routes]
    if web.tokenizer_info:
        routes += tokenizer_routes
    if not web.disable_docs:
        routes += docs_routes(routes, root_path=web.root_path)
    if not web.disable_ui:
        routes = [*routes, *live_page(context).routes()]
    app = Starlette(
        routes=routes,
        exception_handlers={ManyloraError: _on_error, HTTPException: on_http_exception, Exception: _on_bug},
    )
    app.state.context = context
    inner: ASGIApp = app
    if web.allowed_origins:
        inner = CORSMiddleware(
            app,
            allow_origins=web.allowed_origins,
            allow_methods=web.allowed_methods or ("*",),
            allow_headers=web.allowed_headers or ("*",),
            allow_credentials=web.allow_credentials,
            expose_headers=("X-Request-Id", VERSION_HEADER, DIGEST_HEADER),
        )
    inner = without_foreign_pages(
        inner,
        host=context.config.host if web.uds is None else "",
        is_keyed=context.gate.is_keyed,
        allowed_hosts=web.allowed_hosts,
        allowed_origins=web.allowed_origins,
    )
    return AccessLayer(
        app=inner,
        paths=frozenset(route.path for route in routes),
        routes={route.endpoint: route.path for route in routes if route.param_convertors},
        count=context.metrics.count_response,
        monotonic_s=context.monotonic_s,
        names_all=web.request_id_headers,
        logs_all=web.log_requests,
    )
