"""The ASGI application of the router: routes that are passed on, the union of the models, adapters, its own state."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from manylora.core.errors import CapacityError, ManyloraError, ModelNotFound
from manylora.route.adapter_routes import AdapterRoutes
from manylora.route.backends.backend import Backend
from manylora.route.config import ProxyConfig
from manylora.route.fleet.adapters import BackendAdapters
from manylora.route.fleet.catalog import Catalog
from manylora.route.fleet.members import Backends
from manylora.route.metrics import ProxyMetrics
from manylora.route.relay.relay import Relay
from manylora.serving.http.auth import Gate, without_foreign_pages
from manylora.serving.http.errors import HttpError, error_response, on_error, on_http_exception

__all__ = ["Parts", "make_app"]

PASSED_ON = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/embeddings",
    "/v1/score",
    "/v1/rerank",
    "/tokenize",
    "/detokenize",
    "/pooling",
    "/classify",
)
"""Routes whose JSON body names a model. All others of a backend stay behind the router, its admin routes above all."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The parts of a router that routes need."""

    config: ProxyConfig
    backends: Backends
    catalog: Catalog
    adapters: BackendAdapters
    relay: Relay
    metrics: ProxyMetrics
    now: Callable[[], float]
    started_at: float


def make_app(parts: Parts) -> ASGIApp:
    """Return the application."""
    config, catalog, backends = parts.config, parts.catalog, parts.backends
    gate = Gate(config.api_keys, config.admin_key)
    adapters = AdapterRoutes(config, gate, catalog, parts.adapters)

    async def list_models(request: Request) -> Response:
        gate.check_inference(request)
        if not len(catalog):
            raise CapacityError("No backend is up; please try again.", retry_after_s=config.poll_s, status=503)
        return Response(catalog.listing(), media_type="application/json")

    async def get_model(request: Request) -> Response:
        gate.check_inference(request)
        card = catalog.card(request.path_params["name"])
        if card is None:
            raise ModelNotFound(f"The model `{request.path_params['name'][:200]}` does not exist.", param="model")
        return Response(bytes(card), media_type="application/json")

    async def health(request: Request) -> Response:
        if not backends.num_up:
            raise CapacityError("No backend is up; please try again.", retry_after_s=config.poll_s, status=503)
        return _json({"status": "serving", "backends": backends.num_up})

    async def version(request: Request) -> Response:
        return _json({"version": metadata.version("manylora")})

    async def metrics(request: Request) -> Response:
        return Response(parts.metrics.render(backends), media_type=CONTENT_TYPE_LATEST)

    async def status(request: Request) -> Response:
        gate.check_admin(request)
        now = parts.now()
        return _json(
            {
                "version": metadata.version("manylora"),
                "time": time.time(),
                "started_at": parts.started_at,
                "router": config.router,
                "models": len(catalog),
                "bases": catalog.bases,
                "backends": [_row(backend, now) for backend in backends],
            }
        )

    app = Starlette(
        routes=[
            *(Route(path, parts.relay, methods=["POST"]) for path in PASSED_ON),
            Route("/v1/models", list_models, methods=["GET"]),
            Route("/v1/models/{name:path}", get_model, methods=["GET"]),
            Route("/v1/load_lora_adapter", adapters.load, methods=["POST"]),
            Route("/v1/unload_lora_adapter", adapters.unload, methods=["POST"]),
            Route("/adapters", adapters.load, methods=["POST"]),
            Route("/adapters/{name:path}", adapters.unload, methods=["DELETE"]),
            Route("/health", health, methods=["GET"]),
            Route("/ping", health, methods=["GET", "POST"]),
            Route("/version", version, methods=["GET"]),
            Route("/metrics", metrics, methods=["GET"]),
            Route("/status", status, methods=["GET"]),
        ],
        exception_handlers={ManyloraError: on_error, HTTPException: on_http_exception, Exception: _on_bug},
    )
    return without_foreign_pages(app, host=config.host, api_keys=config.api_keys, allowed_hosts=config.allowed_hosts)


def _row(backend: Backend, now: float) -> dict[str, Any]:
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
        "adapters_in_flight": dict(backend.in_flight_by_adapter.most_common(100)),
        "adapters_on_device": None if metrics.on_device is None else len(metrics.on_device),
        "reported": metrics.load,
        "reported_s_ago": None if backend.metrics_at is None else round(now - backend.metrics_at, 3),
    }


def _json(content: object) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")


async def _on_bug(request: Request, error: Exception) -> Response:
    """Answer an unexpected exception; its details are logged and not sent."""
    logger.error("bug path=%s error=%r", request.scope["path"], error)
    return error_response(HttpError(500, "The router failed on this request; see its log."))
