"""The routes of the router that load and unload adapters on all backends."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from manylora.core.errors import RequestError
from manylora.route.config import ProxyConfig
from manylora.route.fleet.adapters import BackendAdapters
from manylora.route.fleet.catalog import Catalog
from manylora.serving.http.auth import Gate
from manylora.serving.http.errors import HttpError

__all__ = ["AdapterRoutes"]

MAX_BODY_BYTES = 64 * 1024


class RoutedLoadBody(msgspec.Struct, kw_only=True):
    """``POST /v1/load_lora_adapter``, and ``/adapters`` by SageMaker's names."""

    lora_name: str = ""
    lora_path: str = ""
    load_inplace: bool | None = None
    name: str = ""
    src: str = ""


class AdapterRoutes:
    """Handlers of requests by an operator.

    Args:
        config: Whether the router manages adapters.
        gate: Knows the admin key.
        catalog: The models.
        adapters: Makes the changes.
    """

    def __init__(self, config: ProxyConfig, gate: Gate, catalog: Catalog, adapters: BackendAdapters) -> None:
        self._config = config
        self._gate = gate
        self._catalog = catalog
        self._adapters = adapters

    async def load(self, request: Request) -> Response:
        """Load an adapter, or replace it in place."""
        self._check(request)
        body = await _body(request)
        name, path = body.lora_name or body.name, body.lora_path or body.src
        if not name or not path:
            raise _invalid("Both 'lora_name' and 'lora_path' must be provided.", "lora_path" if name else "lora_name")
        if name in self._catalog.bases:
            raise _invalid(f"The name '{name[:200]}' is the base model's; an adapter needs another one.", "lora_name")
        await self._adapters.load(name, path, in_place=bool(body.load_inplace))
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    async def unload(self, request: Request) -> Response:
        """Unload the adapter that the path names, or the body."""
        self._check(request)
        name = request.path_params.get("name")
        if name is None:
            name = (await _body(request)).lora_name
        if not name:
            raise _invalid("'lora_name' must be provided.", "lora_name")
        await self._adapters.unload(name)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")

    def _check(self, request: Request) -> None:
        self._gate.check_admin(request)
        if not self._config.manage_adapters:
            raise HttpError(403, "This router does not manage adapters; start it with --manage-adapters.")


async def _body(request: Request) -> RoutedLoadBody:
    body = b""
    async for piece in request.stream():
        body += piece
        if len(body) > MAX_BODY_BYTES:
            raise HttpError(413, f"The body is larger than {MAX_BODY_BYTES} bytes.")
    try:
        return msgspec.json.decode(body, type=RoutedLoadBody)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"The body is not as expected: {error}") from None


def _invalid(message: str, param: str) -> HttpError:
    return HttpError(400, message, param=param, kind="InvalidUserInput")
