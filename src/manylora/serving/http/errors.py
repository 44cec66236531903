"""Errors as HTTP responses, with vLLM's body, types and status codes, so that clients of vLLM handle them.

``{"error": {"message": ..., "type": ..., "param": ..., "code": ...}}``, with the HTTP status as ``code``; a
``CapacityError`` adds ``Retry-After`` in whole seconds.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from manylora.core.errors import AdapterExists, CapacityError, ContextExceeded, ManyloraError, RequestError

__all__ = ["HttpError", "error_body", "error_response", "hide_paths", "json_response", "on_error", "on_http_exception"]

_PATH = re.compile(
    r"""(?<=')/(?:[^/'\n]+/)+([^/'\n]*)(?=')|(?<=")/(?:[^/"\n]+/)+([^/"\n]*)(?=")"""  # quoted: it may hold spaces
    r"""|(?<![\w./:])/(?:[^\s/'"]+/)+([^\s/'"]*)"""
)

TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    409: "ConflictError",
    413: "RequestTooLargeError",
    415: "UnsupportedMediaTypeError",
    429: "RateLimitError",
    431: "HeadersTooLargeError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}


class HttpError(ManyloraError):
    """An error of the HTTP layer: a key, a body, a media type.

    ``kind`` is the error's ``type`` in the body, if it is not that of the status.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        kind: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.kind = kind
        self.headers = headers or {}


def hide_paths(text: str) -> str:
    """Return a message for an inference client: of a path on this machine only the last part is left."""
    return _PATH.sub(lambda match: match[1] or match[2] or match[3] or "", text)


def error_body(error: ManyloraError) -> dict[str, Any]:
    """Return the JSON object for an error."""
    kind = TYPES.get(error.status, "InternalServerError")
    if isinstance(error, HttpError) and error.kind is not None:
        kind = error.kind
    elif isinstance(error, AdapterExists):
        kind = "InvalidUserInput"
    elif isinstance(error, ContextExceeded):
        kind = "context_length_exceeded"
    param = error.param if isinstance(error, RequestError | HttpError) else None
    return {"error": {"message": str(error), "type": kind, "param": param, "code": error.status}}


def error_response(error: ManyloraError) -> Response:
    """Return the response for an error."""
    headers = dict(error.headers) if isinstance(error, HttpError) else {}
    if isinstance(error, CapacityError):
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    return json_response(error_body(error), error.status, headers)


def json_response(content: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return a JSON response."""
    return Response(msgspec.json.encode(content), status, headers=headers, media_type="application/json")


async def on_error(request: Request, error: Exception) -> Response:
    """Answer with a ``ManyloraError``; Starlette calls this."""
    assert isinstance(error, ManyloraError)
    return error_response(error)


async def on_http_exception(request: Request, error: Exception) -> Response:
    """Answer with an error of Starlette, such as an unknown route, in vLLM's shape."""
    assert isinstance(error, HTTPException)
    path = request.scope["path"]  # request.url fails on a malformed Host
    by_status = {404: f"There is no route {path}.", 405: f"{request.method} is not allowed on {path}."}
    message = by_status.get(error.status_code, error.detail)
    return error_response(HttpError(error.status_code, message, headers=dict(error.headers or {})))
