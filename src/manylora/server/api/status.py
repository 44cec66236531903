"""``GET /status``: the engines and the last minute in one call, for ``manylora top`` and dashboards.

The report names adapters and their use, so it needs the admin key. The caller limits the number of adapters, so that a
live view that asks every second costs the engine little.
"""

from __future__ import annotations

from importlib import metadata

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from manylora.errors import ManyloraError, RequestError
from manylora.server.api.models import json_response
from manylora.server.api.request import Context, context_of
from manylora.server.metrics.status_report import StatusReport, adapter_row

__all__ = ["status_routes"]

NUM_ADAPTERS = 100
"""Default number of adapters in a report."""


async def status(request: Request) -> Response:
    """``GET /status?adapters=100``; answers in every state, with ``engine`` null while no engine serves."""
    context = context_of(request)
    context.gate.check_admin(request)
    num_adapters = _num_adapters(request.query_params.get("adapters"))
    report = _report(context)
    try:
        stats, statuses = await context.fleet.snapshot(num_adapters)
    except ManyloraError:  # no engine serves: the report of the API process alone
        return json_response(report)
    now = context.monotonic_s()
    report = msgspec.structs.replace(
        report,
        time=context.epoch_s(),
        page_bytes=context.fleet.info.page_bytes,
        engine=stats,
        adapters=tuple(adapter_row(one, context.metrics.latency.of_adapter(one.name, now)) for one in statuses),
    )
    return json_response(report)


def _report(context: Context) -> StatusReport:
    """Return the report of the API process, without the engines."""
    fleet, latency, now = context.fleet, context.metrics.latency, context.monotonic_s()
    return StatusReport(
        state=fleet.state.value,
        model=fleet.served_name,
        version=metadata.version("manylora"),
        time=context.epoch_s(),
        started_at=context.started_at,
        num_restarts=fleet.num_restarts,
        num_in_flight=fleet.num_in_flight,
        window_s=latency.window_s,
        latency=latency.total(now),
        base=latency.of_adapter("", now),
    )


def _num_adapters(text: str | None) -> int:
    if text is None:
        return NUM_ADAPTERS
    if not (text.isascii() and text.isdecimal() and len(text) <= 9):
        raise RequestError(f"Got adapters = {text[:20]!r}, expected a number of adapters", param="adapters")
    return int(text)


status_routes = [Route("/status", status, methods=["GET"])]
