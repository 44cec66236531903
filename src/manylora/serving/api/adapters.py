"""Adapters at run time: list, load, replace, pin, warm, unload, with vLLM's bodies, texts and status codes.

``lora_path`` is not trusted: with its links resolved it must be in one of the directories that the server was started
with, or it is a URL below a registry that it was started with. Without any there is no loading at run time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from manylora.core.adapters.sources import check_name, is_url, resolve_path, resolve_url
from manylora.core.engine.status import AdapterStatus
from manylora.core.errors import (
    AdapterError,
    AdapterExists,
    AdapterForbidden,
    AdapterNotFound,
    AdapterUnavailable,
    RequestError,
)
from manylora.serving.api.request import Context, context_of, hidden_from_caller, read_body
from manylora.serving.hosting.fleet.adapter_book import UnavailableAdapter
from manylora.serving.hosting.fleet.snapshot import merge_snapshots
from manylora.serving.http.errors import HttpError, hide_paths, json_response
from manylora.serving.ports import AdaptersPort

__all__ = ["LoadBody", "SageMakerBody", "UnloadBody", "adapter_fields", "admin_context", "admin_routes", "status_json"]


UNAVAILABLE_RETRY_S = 5  # seconds after which a load may be tried again whose registry did not answer

OF_ADAPTER = ("name", "state", "generation", "num_running", "num_waiting", "num_requests", "num_hits", "last_used_s")
"""Fields of an adapter's status that are shown as they are."""


class LoadBody(msgspec.Struct, kw_only=True):
    """``POST /v1/load_lora_adapter``."""

    lora_name: str | None = None
    lora_path: str | None = None
    load_inplace: bool | None = None
    base_model_name: str | None = None
    is_3d_lora_weight: bool | None = None


class UnloadBody(msgspec.Struct, kw_only=True):
    """``POST /v1/unload_lora_adapter``."""

    lora_name: str | None = None
    lora_int_id: int | None = None


class SageMakerBody(msgspec.Struct, kw_only=True):
    """``POST /adapters``."""

    name: str | None = None
    src: str | None = None


def admin_context(request: Request) -> Context:
    """Return the server's parts; raises ``HttpError`` unless the request may use the admin routes."""
    context = context_of(request)
    context.gate.check_admin(request)
    return context


def _invalid(message: str, param: str) -> HttpError:
    return HttpError(400, message, param=param, kind="InvalidUserInput")


def _unknown(name: str, param: str = "name") -> HttpError:
    return HttpError(404, f"The lora adapter '{name[:200]}' cannot be found.", param=param)


async def _load(
    context: Context, name: str | None, path: str | None, fields: tuple[str, str], *, in_place: bool = False
) -> Response:
    """Load an adapter; ``fields`` are the names of its name and its path in the body."""
    name_field, path_field = fields
    if not name or not path:
        raise _invalid(f"Both '{name_field}' and '{path_field}' must be provided.", path_field if name else name_field)
    try:
        check_name(name)
    except AdapterError as error:
        raise _invalid(str(error), name_field) from None
    if not is_url(path) and not context.lora_roots:
        raise AdapterForbidden(
            name,
            "loading adapters at run time is off; start the server with --lora-dir DIR or --allowed-lora-path DIR to "
            "allow it from there",
        )
    try:
        if is_url(path):
            resolved = resolve_url(name, path, context.engine_config.adapters.registries)
        else:
            resolved = str(await asyncio.to_thread(resolve_path, path, context.lora_roots))
        await context.fleet.adapters.load(name, resolved, replace_existing=in_place)
    except AdapterExists:
        reason = (
            f"The name '{name}' is the base model's; an adapter needs another one."
            if name == context.fleet.served_name
            else f"The lora adapter '{name}' has already been loaded. "
            "If you want to load the adapter in place, set 'load_inplace' to True."
        )
        raise _invalid(reason, name_field) from None
    except AdapterError as error:
        message, headers = str(error), {}
        # vLLM answers 500 to an invalid adapter, and tests of its clients expect that.
        status = error.status if isinstance(error, AdapterForbidden | AdapterNotFound | AdapterUnavailable) else 500
        if isinstance(error, AdapterForbidden) and not is_url(path):
            message += " (--lora-dir and --allowed-lora-path allow them)"
        elif isinstance(error, AdapterUnavailable):
            headers["Retry-After"] = str(UNAVAILABLE_RETRY_S)
        raise HttpError(status, message, param=path_field, headers=headers) from None
    return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")


async def _unload(context: Context, name: str, field: str) -> Response:
    try:
        await context.fleet.adapters.unload(name)
    except AdapterNotFound:
        raise _unknown(name, field) from None
    return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")


async def load_lora_adapter(request: Request) -> Response:
    """``POST /v1/load_lora_adapter``."""
    context = admin_context(request)
    body = await read_body(request, LoadBody)
    names = ("lora_name", "lora_path")
    return await _load(context, body.lora_name, body.lora_path, names, in_place=bool(body.load_inplace))


async def unload_lora_adapter(request: Request) -> Response:
    """``POST /v1/unload_lora_adapter``."""
    context = admin_context(request)
    body = await read_body(request, UnloadBody)
    if not body.lora_name:
        raise _invalid("'lora_name' needs to be provided to unload a LoRA adapter.", "lora_name")
    return await _unload(context, body.lora_name, "lora_name")


async def create_adapter(request: Request) -> Response:
    """``POST /adapters``: load, as SageMaker names it."""
    context = admin_context(request)
    body = await read_body(request, SageMakerBody)
    return await _load(context, body.name, body.src, ("name", "src"))


async def delete_adapter(request: Request) -> Response:
    """``DELETE /adapters/{name}``: unload, as SageMaker names it."""
    context = admin_context(request)
    return await _unload(context, request.path_params["name"], "name")


def adapter_fields(status: AdapterStatus, *, shows_paths: bool) -> dict[str, Any]:
    """Return the fields of an adapter that both ``GET /status`` and ``GET /adapters`` show."""
    error = status.error if shows_paths or status.error is None else hide_paths(status.error)
    return {name: getattr(status, name) for name in OF_ADAPTER} | {
        "price": status.price,
        "error": error,
        "tier": status.tier.value,
        "pinned": status.is_pinned,
        "rank": status.version.rank,
        "num_pages": status.version.num_pages,
    }


def status_json(status: AdapterStatus, *, shows_paths: bool) -> dict[str, Any]:
    """Return the fields of an adapter that ``GET /adapters`` shows."""
    version = status.version
    return {
        **adapter_fields(status, shows_paths=shows_paths),
        "version": version.key,
        "source": version.source if shows_paths else status.name,
        "num_modules": version.num_modules,
        "target_modules": list(version.target_modules),
        "weight_bytes": version.weight_bytes,
        "host_bytes": version.host_bytes,
        "disk_bytes": version.disk_bytes,
    }


def _unavailable_json(name: str, one: UnavailableAdapter, *, shows_paths: bool) -> dict[str, Any]:
    wait_s = max(0.0, one.retry_at - asyncio.get_running_loop().time())
    return {
        "name": name,
        "state": "unavailable",
        "pinned": one.entry.is_pinned,
        "source": one.entry.path if shows_paths else name,
        "error": one.reason if shows_paths else hide_paths(one.reason),
        "num_tries": one.num_tries,
        "retry_in_s": round(wait_s, 1),
    }


async def list_adapters(request: Request) -> Response:
    """``GET /adapters``: all adapters by name, with tier and use."""
    context = admin_context(request)
    _, statuses = merge_snapshots((await context.fleet.engines.snapshots()).values())
    hidden, shows_paths = hidden_from_caller(context, request), context.gate.is_admin(request)
    by_name = sorted((one for one in statuses if one.name not in hidden), key=lambda status: status.name)
    data = [status_json(one, shows_paths=shows_paths) for one in by_name]
    for name, unavailable in sorted(context.fleet.adapters.unavailable.items()):
        if name not in hidden:
            data.append(_unavailable_json(name, unavailable, shows_paths=shows_paths))
    return json_response({"object": "list", "data": data})


async def get_adapter(request: Request) -> Response:
    """``GET /adapters/{name}``."""
    context = admin_context(request)
    name, shows_paths = request.path_params["name"], context.gate.is_admin(request)
    if name in hidden_from_caller(context, request):
        raise _unknown(name)
    if (unavailable := context.fleet.adapters.unavailable.get(name)) is not None:
        return json_response(_unavailable_json(name, unavailable, shows_paths=shows_paths))
    _, statuses = merge_snapshots((await context.fleet.engines.snapshots(name=name)).values())
    if not statuses:
        raise _unknown(name)
    return json_response(status_json(statuses[0], shows_paths=shows_paths))


def _action(verb: str, act: Callable[[AdaptersPort, str], Awaitable[AdapterStatus]]) -> Route:
    """Return the route ``POST /adapters/{name}/verb``."""

    async def route(request: Request) -> Response:
        context = admin_context(request)
        name = request.path_params["name"]
        if name in hidden_from_caller(context, request):
            raise _unknown(name)
        try:
            status = await act(context.fleet.adapters, name)
        except AdapterNotFound:
            raise _unknown(name) from None
        except AdapterError as error:
            raise RequestError(str(error), param="name") from None
        return json_response(status_json(status, shows_paths=context.gate.is_admin(request)))

    return Route(f"/adapters/{{name:path}}/{verb}", route, methods=["POST"])


admin_routes = [
    Route("/v1/load_lora_adapter", load_lora_adapter, methods=["POST"]),
    Route("/v1/unload_lora_adapter", unload_lora_adapter, methods=["POST"]),
    Route("/adapters", list_adapters, methods=["GET"]),
    Route("/adapters", create_adapter, methods=["POST"]),
    _action("pin", lambda adapters, name: adapters.pin(name, True)),
    _action("unpin", lambda adapters, name: adapters.pin(name, False)),
    _action("warm", lambda adapters, name: adapters.warm(name)),
    Route("/adapters/{name:path}", get_adapter, methods=["GET"]),
    Route("/adapters/{name:path}", delete_adapter, methods=["DELETE"]),
]
