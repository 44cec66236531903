"""The ASGI application: all routes, and the responses to errors."""

from __future__ import annotations

import logging

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from manylora.errors import ManyloraError
from manylora.server.api.adapters import admin_routes
from manylora.server.api.chat import chat_routes
from manylora.server.api.completions import completion_routes
from manylora.server.api.models import model_routes
from manylora.server.api.request import Context
from manylora.server.api.responses import response_routes
from manylora.server.api.status import status_routes
from manylora.server.errors import HttpError, error_response, on_error, on_http_exception

__all__ = ["make_app"]

logger = logging.getLogger(__name__)


async def _on_bug(request: Request, error: Exception) -> Response:
    """Answer an unexpected exception; its details are logged and not sent."""
    logger.error("bug path=%s error=%r", request.scope["path"], error)
    return error_response(HttpError(500, "The server failed on this request; see its log."))


def make_app(context: Context) -> Starlette:
    """Return the application that serves ``context``."""
    app = Starlette(
        routes=[*completion_routes, *chat_routes, *response_routes, *admin_routes, *model_routes, *status_routes],
        exception_handlers={ManyloraError: on_error, HTTPException: on_http_exception, Exception: _on_bug},
    )
    app.state.context = context
    return app
