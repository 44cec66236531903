"""Adapters at run time: list, load, replace, pin, warm, unload; vLLM's request shapes, texts and codes.

``lora_path`` comes from a caller and is hostile until proven otherwise: it must lie, links resolved, in one of the
directories the server was started with. With none there is no run-time loading by path at all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from manylora.adapters.sources import check_name, resolve_path
from manylora.engine.status import AdapterStatus
from manylora.errors import AdapterError, AdapterExists, AdapterForbidden, AdapterNotFound, RequestError
from manylora.server.api.context import Context, context_of
from manylora.server.api.models import json_response
from manylora.server.api.schemas import read_body
from manylora.server.errors import HttpError

__all__ = ["admin_routes"]


class LoadBody(msgspec.Struct, kw_only=True):
    """``POST /v1/load_lora_adapter``."""

    lora_name: str | None = None
    lora_path: str | None = None
    load_inplace: bool | None = None
    base_model_name: str | None = None


class UnloadBody(msgspec.Struct, kw_only=True):
    """``POST /v1/unload_lora_adapter``."""

    lora_name: str | None = None


class SageMakerBody(msgspec.Struct, kw_only=True):
    """``POST /adapters``."""

    name: str | None = None
    src: str | None = None


def _invalid(message: str, param: str) -> HttpError:
    return HttpError(400, message, param=param, kind="InvalidUserInput")


async def _load(
    context: Context, name: str, path: str, *, in_place: bool, name_field: str, path_field: str
) -> Response:
    try:
        check_name(name)
    except AdapterError as error:
        raise _invalid(str(error), name_field) from None
    if not context.lora_roots:
        raise AdapterForbidden(
            name, "loading adapters at run time is off; start the server with --lora-dir DIR to allow it from there"
        )
    try:
        resolved = await asyncio.to_thread(resolve_path, path, context.lora_roots)
        await context.fleet.adapters.load(name, str(resolved), replace_existing=in_place)
    except AdapterExists:
        if name == context.fleet.served_name:
            raise _invalid(
                f"The name '{name}' is the base model's; an adapter needs another one.", name_field
            ) from None
        raise _invalid(
            f"The lora adapter '{name}' has already been loaded. "
            "If you want to load the adapter in place, set 'load_inplace' to True.",
            name_field,
        ) from None
    except (AdapterNotFound, AdapterForbidden) as error:
        raise HttpError(error.status, str(error), param=path_field) from None
    except AdapterError as error:
        # Not the caller's 400: vLLM answers 500 to an illegal adapter, and its clients' tests expect that.
        raise HttpError(500, str(error), param=path_field) from None
    return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")


async def _unload(context: Context, name: str, field: str) -> Response:
    try:
        await context.fleet.adapters.unload(name)
    except AdapterNotFound:
        raise HttpError(404, f"The lora adapter '{name}' cannot be found.", param=field) from None
    return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")


async def load_lora_adapter(request: Request) -> Response:
    """``POST /v1/load_lora_adapter``."""
    context = context_of(request)
    context.gate.check_admin(request)
    body = await read_body(request, LoadBody, max_bytes=context.config.max_body_bytes)
    if not body.lora_name or not body.lora_path:
        raise _invalid(
            "Both 'lora_name' and 'lora_path' must be provided.", "lora_path" if body.lora_name else "lora_name"
        )
    return await _load(
        context,
        body.lora_name,
        body.lora_path,
        in_place=bool(body.load_inplace),
        name_field="lora_name",
        path_field="lora_path",
    )


async def unload_lora_adapter(request: Request) -> Response:
    """``POST /v1/unload_lora_adapter``."""
    context = context_of(request)
    context.gate.check_admin(request)
    body = await read_body(request, UnloadBody, max_bytes=context.config.max_body_bytes)
    if not body.lora_name:
        raise _invalid("'lora_name' needs to be provided to unload a LoRA adapter.", "lora_name")
    return await _unload(context, body.lora_name, "lora_name")


async def create_adapter(request: Request) -> Response:
    """``POST /adapters``: SageMaker's name for loading."""
    context = context_of(request)
    context.gate.check_admin(request)
    body = await read_body(request, SageMakerBody, max_bytes=context.config.max_body_bytes)
    if not body.name or not body.src:
        raise _invalid("Both 'name' and 'src' must be provided.", "src" if body.name else "name")
    return await _load(context, body.name, body.src, in_place=False, name_field="name", path_field="src")


async def delete_adapter(request: Request) -> Response:
    """``DELETE /adapters/{name}``: SageMaker's name for unloading."""
    context = context_of(request)
    context.gate.check_admin(request)
    return await _unload(context, request.path_params["name"], "name")


def _status_json(status: AdapterStatus) -> dict[str, Any]:
    version = status.version
    return {
        "name": status.name,
        "tier": status.tier.value,
        "state": status.state,
        "pinned": status.is_pinned,
        "generation": status.generation,
        "version": version.key,
        "source": version.source,
        "rank": version.rank,
        "num_modules": version.num_modules,
        "target_modules": list(version.target_modules),
        "num_pages": version.num_pages,
        "weight_bytes": version.weight_bytes,
        "host_bytes": version.host_bytes,
        "disk_bytes": version.disk_bytes,
        "num_running": status.num_running,
        "num_waiting": status.num_waiting,
        "num_requests": status.num_requests,
        "num_hits": status.num_hits,
        "last_used_s": status.last_used_s,
        "price": status.price,
    }


async def list_adapters(request: Request) -> Response:
    """``GET /adapters``: every adapter by name, where it is and how much it is used."""
    context = context_of(request)
    context.gate.check_admin(request)
    _, statuses = await context.fleet.snapshot()
    by_name = sorted(statuses, key=lambda status: status.name)
    return json_response({"object": "list", "data": [_status_json(status) for status in by_name]})


async def get_adapter(request: Request) -> Response:
    """``GET /adapters/{name}``."""
    context = context_of(request)
    context.gate.check_admin(request)
    name = request.path_params["name"]
    _, statuses = await context.fleet.snapshot()
    for status in statuses:
        if status.name == name:
            return json_response(_status_json(status))
    raise HttpError(404, f"The lora adapter '{name[:200]}' cannot be found.", param="name")


def _action(act: Callable[[Context, str], Awaitable[AdapterStatus]]) -> Callable[[Request], Awaitable[Response]]:
    async def route(request: Request) -> Response:
        context = context_of(request)
        context.gate.check_admin(request)
        name = request.path_params["name"]
        try:
            status = await act(context, name)
        except AdapterNotFound:
            raise HttpError(404, f"The lora adapter '{name[:200]}' cannot be found.", param="name") from None
        except AdapterError as error:
            raise RequestError(str(error), param="name") from None
        return json_response(_status_json(status))

    return route


admin_routes = [
    Route("/v1/load_lora_adapter", load_lora_adapter, methods=["POST"]),
    Route("/v1/unload_lora_adapter", unload_lora_adapter, methods=["POST"]),
    Route("/adapters", list_adapters, methods=["GET"]),
    Route("/adapters", create_adapter, methods=["POST"]),
    Route(
        "/adapters/{name:path}/pin",
        _action(lambda context, name: context.fleet.adapters.pin(name, True)),
        methods=["POST"],
    ),
    Route(
        "/adapters/{name:path}/unpin",
        _action(lambda context, name: context.fleet.adapters.pin(name, False)),
        methods=["POST"],
    ),
    Route(
        "/adapters/{name:path}/warm",
        _action(lambda context, name: context.fleet.adapters.warm(name)),
        methods=["POST"],
    ),
    Route("/adapters/{name:path}", get_adapter, methods=["GET"]),
    Route("/adapters/{name:path}", delete_adapter, methods=["DELETE"]),
]
