"""The state of the server: ``/status``, ``/load``, ``/server_info``, and the end of one engine.

``GET /status`` has the engines and the last minute in one call, for ``manylora top`` and dashboards.

The report names adapters and their use, so it needs the admin key; without one each of several API keys sees the
adapters that it may call. The caller limits the number of adapters, so that a live view that asks every
second costs the engine little.

TRL's ``AsyncGRPOTrainer`` publishes adapters by routes of ``vllm serve``, beside those of ``adapters``::

    GET  /server_info                  may adapters be loaded, how many, of which rank?
    POST /pause                        then POST /v1/load_lora_adapter of ``trl-policy-v7``, POST /resume
    POST /v1/completions               to ``trl-policy-v7``, with token ids and log-probabilities
    POST /v1/unload_lora_adapter       of ``trl-policy-v4``, once nothing can ask for it

Nothing is paused: answers in flight finish on the version that they began with, and a load waits for none of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from importlib import metadata
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from manylora.core.errors import RequestError
from manylora.core.types import Tier
from manylora.serving.api.adapters import adapter_fields, admin_context
from manylora.serving.api.request import Context, context_of, hidden_from_caller
from manylora.serving.hosting.fleet.engines import Replica
from manylora.serving.hosting.fleet.keeper import EngineState
from manylora.serving.hosting.fleet.snapshot import Snapshot, merge_snapshots
from manylora.serving.http.errors import HttpError, hide_paths, json_response
from manylora.serving.metrics.status_report import AdapterRow, ReplicaRow, StatusReport

__all__ = ["process_report", "replica_row", "replicas_in_use", "status_routes"]

NUM_ADAPTERS = 100  # default number of adapters in a report

OF_ENGINE = ("num_running", "num_waiting", "num_pages", "num_free_pages", "num_loads", "num_resident", "fits")
"""Counters of an engine that its row shows."""


async def status(request: Request) -> Response:
    """``GET /status?adapters=100``; answers in every state, with ``engine`` null while no engine serves."""
    context = admin_context(request)
    num_adapters = _number(request.query_params.get("adapters"), "adapters", NUM_ADAPTERS)
    hidden, shows_paths = hidden_from_caller(context, request), context.gate.is_admin(request)
    report = process_report(context, num_adapters, hidden, shows_paths=shows_paths)
    snapshots = await context.snapshots(None if hidden else num_adapters)
    if hidden:
        snapshots = _visible(snapshots, hidden)
    if not snapshots:  # the report of the API process alone
        return json_response(report)
    stats, statuses = merge_snapshots(snapshots.values(), num_adapters)
    now = context.monotonic_s()
    report = msgspec.structs.replace(
        report,
        time=context.epoch_s(),
        page_bytes=context.fleet.engines.info.page_bytes,
        engine=stats,
        adapters=tuple(
            AdapterRow(
                **adapter_fields(one, shows_paths=shows_paths),
                latency=context.metrics.latency.of_adapter(one.name, now),
            )
            for one in statuses[:num_adapters]
        ),
        replicas=tuple(
            replica_row(one, snapshots.get(one.index), num_adapters)
            for one in replicas_in_use(context)
            if not hidden or one.index in snapshots
        ),
    )
    return json_response(report)


def _visible(snapshots: Mapping[int, Snapshot], hidden: Collection[str]) -> dict[int, Snapshot]:
    """Return snapshots without hidden adapters, and none of engines that have no others: those of other tenants."""
    found = {}
    for index, (stats, statuses) in snapshots.items():
        visible = [one for one in statuses if one.name not in hidden]
        if visible or not statuses:
            found[index] = (stats, tuple(visible))
    return found


def process_report(context: Context, num_functions: int, hidden: Collection[str], *, shows_paths: bool) -> StatusReport:
    """Return the report of the API process, without the engines."""
    fleet, latency, now = context.fleet, context.metrics.latency, context.monotonic_s()
    functions = [one for one in context.functions() if one.name not in hidden][:num_functions]
    if not shows_paths:
        functions = [msgspec.structs.replace(one, error=one.error and hide_paths(one.error)) for one in functions]
    return StatusReport(
        state=fleet.engines.state.value,
        model=fleet.served_name,
        version=metadata.version("manylora"),
        time=context.epoch_s(),
        started_at=context.started_at,
        num_restarts=sum(one.num_restarts for one in fleet.engines.replicas()),
        num_in_flight=fleet.requests.in_progress.num,
        window_s=latency.window_s,
        latency=latency.total(now),
        base=latency.of_adapter("", now),
        replicas=() if hidden else tuple(replica_row(one, None, 0) for one in replicas_in_use(context)),
        resumes=fleet.resumes,
        generation_defaults=context.settings.base.defaults.given(),
        scaling=fleet.scaling,
        functions=tuple(functions),
    )


def replicas_in_use(context: Context) -> list[Replica]:
    """Return the engines without those that scaling has not started."""
    return [one for one in context.fleet.engines.replicas() if one.state is not EngineState.IDLE]


def replica_row(replica: Replica, snapshot: Snapshot | None, num_adapters: int) -> ReplicaRow:
    """Return an engine's row, with at most ``num_adapters`` names of each kind."""
    row = ReplicaRow(**{**dataclasses.asdict(replica), "state": replica.state.value})
    if snapshot is None:
        return row
    stats, statuses = snapshot
    by_use = sorted(statuses, key=lambda one: -one.num_requests)
    return msgspec.structs.replace(
        row,
        **{name: getattr(stats, name) for name in OF_ENGINE},
        placed=tuple(one.name for one in by_use if one.tier is Tier.DEVICE)[:num_adapters],
        pinned=tuple(one.name for one in by_use if one.is_pinned)[:num_adapters],
    )


def _number(text: str | None, param: str, default: float) -> int:
    if text is None:
        return int(default)
    if not (text.isascii() and text.isdecimal() and len(text) <= 9):
        raise RequestError(f"Got {param} = {text[:20]!r}, expected a whole number", param=param)
    return int(text)


async def load(request: Request) -> Response:
    """``GET /load``: HTTP requests that are being answered, as vLLM's ``server_load``."""
    context = context_of(request)
    context.gate.check_metrics(request)
    return json_response({"server_load": context.fleet.requests.in_progress.num})


async def server_info(request: Request) -> Response:
    """``GET /server_info``: versions and the configuration, without keys."""
    context = admin_context(request)
    if not context.gate.is_admin(request):
        raise HttpError(403, "The configuration has paths of the server; without --admin-key no API key sees them.")
    packages = ("manylora", "torch", "transformers", "tokenizers", "starlette", "uvicorn")
    server = dataclasses.asdict(context.config)
    server["api_keys"] = len(context.config.api_keys)
    for key in ("admin_key", "router_key", "metrics_key"):
        server[key] = server[key] is not None
    return json_response(
        {
            "versions": {package: _version(package) for package in packages},
            "engine": dataclasses.asdict(context.engine_config),
            "server": server,
            "vllm_config": _vllm_config(context),
        }
    )


def _vllm_config(context: Context) -> dict[str, Any]:
    """Return what trainers read of vLLM's configuration in ``/server_info``; a load reaches all engines."""
    adapters = context.engine_config.adapters
    # An adapter of a rank has more bytes than that: there is no other bound.
    lora = {"max_lora_rank": adapters.max_adapter_bytes, "max_loras": adapters.max_registered}
    parallel = {"data_parallel_size": 1, "tensor_parallel_size": 1}
    return {"lora_config": lora, "parallel_config": parallel, "weight_transfer_config": None}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


async def drain_replica(request: Request) -> Response:
    """``POST /replicas/{index}/drain?timeout=30``: end one engine; its requests finish in that time, or move on."""
    context = admin_context(request)
    timeout_s = _number(request.query_params.get("timeout"), "timeout", context.config.drain_timeout_s)
    index = _number(request.path_params["index"], "replica", 0)
    await context.fleet.engines.drain_replica(index, timeout_s)
    return json_response({"replica": index, "state": "stopped"})


async def pause(request: Request) -> Response:
    """``POST /pause?mode=keep``: begin an update of an adapter, which stops nothing."""
    admin_context(request)
    mode = request.query_params.get("mode", "abort")
    if mode != "keep":
        raise RequestError(f"Got mode = {mode[:20]!r}, expected 'keep': requests in flight always finish", param="mode")
    return json_response({"status": "running", "reason": "answers finish on their version while another one loads"})


async def resume(request: Request) -> Response:
    """``POST /resume``: end an update."""
    admin_context(request)
    return json_response({"status": "running"})


status_routes = [
    Route("/status", status, methods=["GET"]),
    Route("/load", load, methods=["GET"]),
    Route("/server_info", server_info, methods=["GET"]),
    Route("/replicas/{index}/drain", drain_replica, methods=["POST"]),
    Route("/pause", pause, methods=["POST"]),
    Route("/resume", resume, methods=["POST"]),
]
