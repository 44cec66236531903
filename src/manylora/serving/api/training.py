"""The routes of ``vllm serve`` by which TRL's ``AsyncGRPOTrainer`` publishes adapters, beside those of ``adapters``.

::

    GET  /server_info                  may adapters be loaded, how many, of which rank?
    POST /pause                        then POST /v1/load_lora_adapter of ``trl-policy-v7``, POST /resume
    POST /v1/completions               to ``trl-policy-v7``, with token ids and log-probabilities
    POST /v1/unload_lora_adapter       of ``trl-policy-v4``, once nothing can ask for it

Nothing is paused: answers in flight finish on the version that they began with, and a load waits for none of them.
"""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from manylora.core.errors import RequestError
from manylora.serving.api.adapters import admin_context
from manylora.serving.api.request import Context
from manylora.serving.http.errors import json_response

__all__ = ["training_routes", "vllm_config"]


def vllm_config(context: Context) -> dict[str, Any]:
    """Return what trainers read of vLLM's configuration in ``/server_info``; a load reaches all engines."""
    adapters = context.engine_config.adapters
    # An adapter of a rank has more bytes than that: there is no other bound.
    lora = {"max_lora_rank": adapters.max_adapter_bytes, "max_loras": adapters.max_registered}
    parallel = {"data_parallel_size": 1, "tensor_parallel_size": 1}
    return {"lora_config": lora, "parallel_config": parallel, "weight_transfer_config": None}


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


training_routes = [Route("/pause", pause, methods=["POST"]), Route("/resume", resume, methods=["POST"])]
