"""The ASGI application: all routes, and the responses to errors."""

from __future__ import annotations

import logging

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from manylora.core.errors import CapacityError, ManyloraError
from manylora.serving.api.adapters import admin_routes
from manylora.serving.api.chat import chat_routes
from manylora.serving.api.completions import completion_routes
from manylora.serving.api.docs import docs_routes
from manylora.serving.api.models import model_routes
from manylora.serving.api.request import Context, context_of
from manylora.serving.api.responses import response_routes
from manylora.serving.api.status import status_routes
from manylora.serving.http.access import AccessLayer, request_id_of
from manylora.serving.http.auth import without_foreign_pages
from manylora.serving.http.errors import HttpError, error_response, on_http_exception

__all__ = ["ROOM_PATHS", "make_app"]

ROOM_PATHS = tuple(route.path for route in (*completion_routes, *chat_routes, *response_routes))
"""Routes whose requests go to an engine."""

logger = logging.getLogger(__name__)


async def _on_error(request: Request, error: Exception) -> Response:
    """Answer with a ``ManyloraError``; Starlette calls this."""
    assert isinstance(error, ManyloraError)
    if isinstance(error, CapacityError):
        context = context_of(request)
        error.retry_after_s = context.retries.after_s(error, context.monotonic_s())
    return error_response(error)


async def _on_bug(request: Request, error: Exception) -> Response:
    """Answer an unexpected exception; its details are logged and not sent."""
    logger.error("bug path=%s request_id=%s error=%r", request.scope["path"], request_id_of(request.scope), error)
    return error_response(HttpError(500, "The server failed on this request; see its log."))


def make_app(context: Context) -> ASGIApp:
    """Return the application that serves ``context``."""
    web = context.config.web
    routes = [*completion_routes, *chat_routes, *response_routes, *admin_routes, *model_routes, *status_routes]
    if not web.disable_docs:
        routes += docs_routes(routes, root_path=web.root_path)
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
            expose_headers=("X-Request-Id",),
        )
    inner = without_foreign_pages(
        inner,
        host=context.config.host if web.uds is None else "",
        api_keys=context.config.api_keys,
        allowed_hosts=web.allowed_hosts,
        allowed_origins=web.allowed_origins,
    )
    return AccessLayer(
        inner,
        paths=[route.path for route in routes],
        routes={route.endpoint: route.path for route in routes if route.param_convertors},
        count=context.metrics.count_response,
        monotonic_s=context.monotonic_s,
        names_all=web.request_id_headers,
        logs_all=web.log_requests,
    )
