"""The ASGI application of the router: routes that are passed on, the union of the models, adapters, its own state."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from manylora.core import __version__
from manylora.core.errors import ConfigError, ManyloraError, ModelNotFound
from manylora.route.backend import Backend
from manylora.route.config import ProxyConfig
from manylora.route.fleet.adapters import RoutedAdapters
from manylora.route.fleet.members import Backends
from manylora.route.fleet.sources import Sources
from manylora.serving.http.auth import Gate, without_foreign_pages
from manylora.serving.http.errors import HttpError, error_response, json_response, on_error, on_http_exception
from manylora.serving.http.page import LivePage, PageAction
from manylora.serving.http.room import short_struct

__all__ = ["PASSED_ON", "RouterRoutes", "make_app"]

_PASSED_ON = """
    /v1/completions /v1/chat/completions /v1/responses /v1/messages /v1/embeddings /v1/score /v1/rerank
    /tokenize /detokenize /pooling /classify
"""
PASSED_ON = tuple(_PASSED_ON.split())
"""Routes whose JSON body names a model. All others of a backend stay behind the router, its admin routes above all."""

MAX_BODY_BYTES = 64 * 1024  # longest body of a request to change adapters or backends

logger = logging.getLogger(__name__)


class RoutedLoadBody(msgspec.Struct, kw_only=True):
    """``POST /v1/load_lora_adapter``, and ``/adapters`` by SageMaker's names."""

    lora_name: str = ""
    lora_path: str = ""
    load_inplace: bool | None = None
    name: str = ""
    src: str = ""


class RoutedBackendBody(msgspec.Struct, kw_only=True):
    """``POST`` and ``DELETE /backends``: a server, and the key that it gets in place of the client's."""

    url: str
    key: str | None = None


@dataclass(slots=True, eq=False)
class RouterRoutes:
    """The routes that the router answers itself."""

    config: ProxyConfig  # whether the router manages adapters
    gate: Gate  # knows the keys of callers
    backends: Backends
    adapters: RoutedAdapters  # loads and unloads adapters on all backends
    metrics: Callable[[], Awaitable[bytes]]  # returns the router's own
    sources: Sources  # takes backends in and out
    is_stopping: bool = False
    _started_at: float = field(default_factory=time.time)

    def routes(self) -> list[Route]:
        """Return the routes."""
        unload = PageAction("DELETE", "/adapters/{name:path}", self._unload)
        page = LivePage(self.gate, self._page_snapshot, lambda: self.is_stopping, [unload])
        return [
            *page.routes(),
            Route("/v1/models", self._list_models, methods=["GET"]),
            Route("/v1/models/{name:path}", self._get_model, methods=["GET"]),
            Route("/v1/load_lora_adapter", self._load, methods=["POST"]),
            Route("/v1/unload_lora_adapter", self._unload, methods=["POST"]),
            Route("/adapters", self._load, methods=["POST"]),
            Route("/adapters/{name:path}", self._unload, methods=["DELETE"]),
            Route("/backends", self._list_backends, methods=["GET"]),
            Route("/backends", self._add_backend, methods=["POST"]),
            Route("/backends", self._remove_backend, methods=["DELETE"]),
            Route("/health", self._health, methods=["GET"]),
            Route("/ping", self._health, methods=["GET", "POST"]),
            Route("/version", self._version, methods=["GET"]),
            Route("/metrics", self._read_metrics, methods=["GET"]),
            Route("/status", self._status, methods=["GET"]),
        ]

    async def _list_models(self, request: Request) -> Response:
        tenant = self.gate.tenant(self.gate.check_inference(request))
        if not len(self.backends.catalog):
            raise self.backends.none_up()
        return Response(self.backends.catalog.listing(tenant), media_type="application/json")

    async def _get_model(self, request: Request) -> Response:
        tenant = self.gate.tenant(self.gate.check_inference(request))
        name = request.path_params["name"]
        card = self.backends.catalog.card(name, tenant)
        if card is None:
            raise ModelNotFound(f"The model `{name[:200]}` does not exist.", param="model")
        return Response(bytes(card), media_type="application/json")

    async def _health(self, request: Request) -> Response:
        if not self.backends.num_up:
            raise self.backends.none_up()
        return json_response({"status": "serving", "backends": self.backends.num_up})

    async def _version(self, request: Request) -> Response:
        return json_response({"version": __version__})

    async def _read_metrics(self, request: Request) -> Response:
        self.gate.check_metrics(request)
        return Response(await self.metrics(), media_type=CONTENT_TYPE_LATEST)

    async def _status(self, request: Request) -> Response:
        self.gate.check_admin(request)
        return json_response(self._state())

    def _state(self) -> dict[str, Any]:
        return {
            "version": __version__,
            "time": time.time(),
            "started_at": self._started_at,
            "router": self.config.router,
            "models": len(self.backends.catalog),
            "bases": self.backends.catalog.bases,
            "backends": [_status_of(backend, monotonic()) for backend in self.backends],
        }

    async def _page_snapshot(self) -> bytes:
        return msgspec.json.encode({"route": {**self._state(), "manages_adapters": self.config.manage_adapters}})

    async def _list_backends(self, request: Request) -> Response:
        self.gate.check_admin(request)
        return json_response({"backends": [_status_of(backend, monotonic()) for backend in self.backends]})

    async def _add_backend(self, request: Request) -> Response:
        """Add a server that the body names; it gets requests once its first poll is good."""
        self._check_admin_key(request)
        body = await short_struct(request, RoutedBackendBody, MAX_BODY_BYTES)
        try:
            address = self.sources.add(body.url, body.key)
        except ConfigError as error:
            raise _invalid(str(error), "url") from None
        return json_response({"url": address.url}, 202)

    async def _remove_backend(self, request: Request) -> Response:
        """Remove the server that the body names: it gets no more requests, and those under way go on to their end."""
        self._check_admin_key(request)
        body = await short_struct(request, RoutedBackendBody, MAX_BODY_BYTES)
        found = next((one for one in self.backends if one.url == body.url.rstrip("/")), None)
        if found is None or not self.sources.remove(found.url):
            raise HttpError(404, f"There is no backend '{body.url[:200]}'.", param="url")
        return json_response({"url": found.url, "in_flight": found.num_in_flight}, 202)

    async def _load(self, request: Request) -> Response:
        """Load an adapter, or replace it in place."""
        self._check_admin(request)
        body = await short_struct(request, RoutedLoadBody, MAX_BODY_BYTES)
        name, path = body.lora_name or body.name, body.lora_path or body.src
        if not name or not path:
            raise _invalid("Both 'lora_name' and 'lora_path' must be provided.", "lora_path" if name else "lora_name")
        if name in self.backends.catalog.bases:
            raise _invalid(f"The name '{name[:200]}' is the base model's; an adapter needs another one.", "lora_name")
        await self.adapters.load(name, path, in_place=bool(body.load_inplace))
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    async def _unload(self, request: Request) -> Response:
        """Unload the adapter that the path names, or the body."""
        self._check_admin(request)
        name = request.path_params.get("name")
        if name is None:
            name = (await short_struct(request, RoutedLoadBody, MAX_BODY_BYTES)).lora_name
        if not name:
            raise _invalid("'lora_name' must be provided.", "lora_name")
        await self.adapters.unload(name)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")

    def _check_admin_key(self, request: Request) -> None:
        """Refuse programs of this machine as well: a server that they add would get prompts and the backends' key."""
        self.gate.check_admin(request)
        if self.config.admin_key is None:
            raise HttpError(403, "Backends are changed with an admin key; start the router with --admin-key.")

    def _check_admin(self, request: Request) -> None:
        self.gate.check_admin(request)
        if not self.config.manage_adapters:
            raise HttpError(403, "This router does not manage adapters; start it with --manage-adapters.")


def make_app(config: ProxyConfig, relay: ASGIApp, routes: RouterRoutes) -> ASGIApp:
    """Return the application: ``relay`` answers the routes that are passed on, ``routes`` the others."""
    app = Starlette(
        routes=[*(Route(path, relay, methods=["POST"]) for path in PASSED_ON), *routes.routes()],
        exception_handlers={ManyloraError: on_error, HTTPException: on_http_exception, Exception: _on_bug},
    )
    return without_foreign_pages(
        app, host=config.host, is_keyed=routes.gate.is_keyed, allowed_hosts=config.allowed_hosts
    )


def _status_of(backend: Backend, now: float) -> dict[str, Any]:
    """Return the state of a backend for ``/status``."""
    metrics = backend.metrics
    return {
        "url": backend.url,
        "kind": backend.kind.value,
        "state": backend.health.state.value,
        "reason": backend.health.reason,
        "share": round(backend.health.share(now), 3),
        "in_flight": backend.num_in_flight,
        "load": backend.view.load,
        "models": len(backend.cards),
        "adapters_left_out": len(backend.outdated),
        "adapters_in_flight": dict(backend.view.adapters.most_common(100)),
        "adapters_on_device": None if metrics.on_device is None else len(metrics.on_device),
        "reported": {
            "num_running": metrics.num_running,
            "num_waiting": metrics.num_waiting,
            "kv_usage": metrics.kv_usage,
        },
        "reported_s_ago": None if backend.metrics_at is None else round(now - backend.metrics_at, 3),
    }


def _invalid(message: str, param: str) -> HttpError:
    return HttpError(400, message, param=param, kind="InvalidUserInput")


async def _on_bug(request: Request, error: Exception) -> Response:
    """Answer an unexpected exception; its details are logged and not sent."""
    logger.error("bug path=%s error=%r", request.scope["path"], error)
    return error_response(HttpError(500, "The router failed on this request; see its log."))
