"""Routes about the served models and the server: models, tokens, health, version, metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from importlib import metadata
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from manylora.core.errors import ModelNotFound, RequestError
from manylora.serving.api.chat import chat_tokens, template_of
from manylora.serving.api.request import Context, context_of, read_body
from manylora.serving.api.sampling import check_token_ids
from manylora.serving.api.schemas import INLINE_CHARS, TOKENIZE_CONTEXTS, DetokenizeBody, TokenizeBody
from manylora.serving.api.tools import read_tool_use
from manylora.serving.hosting.fleet.adapter_book import LoadedAdapter
from manylora.serving.http.errors import json_response
from manylora.serving.http.tenants import Tenant
from manylora.serving.http.turns import next_turn
from manylora.serving.metrics.prometheus import choose_format

__all__ = ["model_routes", "tokenizer_routes"]

CARDS_AT_ONCE = 512  # adapters in the list of models that become JSON at once, in a millisecond or two


def _card(context: Context, name: str, adapter: LoadedAdapter | None = None, *, shows_paths: bool) -> dict[str, Any]:
    """Return the entry of an adapter, or of the base, in the list of models."""
    root = context.engine_config.model.model if adapter is None else adapter.path
    return {
        "id": name,
        "object": "model",
        "created": context.started_at if adapter is None else adapter.loaded_at,
        "owned_by": "manylora",
        "root": root if shows_paths else name,
        "parent": None if adapter is None else context.fleet.served_name,
        "max_model_len": context.max_model_len,
    }


async def list_models(request: Request) -> Response:
    """``GET /v1/models``: the base first, then adapters in the order of loading."""
    context = context_of(request)
    tenant = context.gate.check_inference(request)
    context.fleet.engines.check_serving()
    shows_paths = context.gate.is_admin(request)
    hidden, known = context.fleet.hidden_from(tenant), context.gate.tenant(tenant)
    if hidden or (known is not None and known.models is not None):
        context.turns.enter(partial(context.gate.caller_of, request))
        made_for_it = await _list(context, hidden, shows_paths=shows_paths, tenant=known)
        return Response(made_for_it, media_type="application/json")
    made, wanted = context.model_lists, (context.fleet.adapters.num_changes, shows_paths)
    if wanted not in made:
        for outdated in [one for one in made if one[0] != wanted[0]]:
            del made[outdated]  # requests that came before the change get it still
        context.turns.enter(partial(context.gate.caller_of, request))
        made[wanted] = asyncio.create_task(_list(context, hidden, shows_paths=shows_paths))
    # A client that leaves does not end it for the others.
    return Response(await asyncio.shield(made[wanted]), media_type="application/json")


async def _list(context: Context, hidden: frozenset[str], *, shows_paths: bool, tenant: Tenant | None = None) -> bytes:
    """Return the list of models that exist for a tenant, made in slices."""
    loaded = [one for one in context.fleet.adapters.loaded.items() if one[0] not in hidden]
    name = context.fleet.served_name
    served = (name, *context.config.web.aliases) if context.serves_base else ()
    if tenant is not None and not tenant.may_call(name):
        served = ()
    cards = [_card(context, name, shows_paths=shows_paths) for name in served]
    parts = [msgspec.json.encode(cards)[1:-1]] if cards else []
    for first in range(0, len(loaded), CARDS_AT_ONCE):
        await next_turn()
        some = loaded[first : first + CARDS_AT_ONCE]
        if tenant is not None:
            some = [one for one in some if tenant.may_call(one[0])]
        cards = [_card(context, *one, shows_paths=shows_paths) for one in some]
        if cards:
            parts.append(msgspec.json.encode(cards)[1:-1])
    return b'{"object":"list","data":[%b]}' % b",".join(parts)


async def get_model(request: Request) -> Response:
    """``GET /v1/models/{id}``, also of ``base:adapter``."""
    context = context_of(request)
    tenant = context.gate.check_inference(request)
    context.fleet.engines.check_serving()
    hidden = context.fleet.hidden_from(tenant)
    name, served_name, loaded = request.path_params["name"], context.fleet.served_name, context.fleet.adapters.loaded
    shows_paths = context.gate.is_admin(request)
    is_base = name == served_name or name in context.config.web.aliases
    context.check_model(tenant, served_name if is_base else name)
    if context.serves_base and is_base:
        return json_response(_card(context, name, shows_paths=shows_paths))
    for known in (name, name.removeprefix(f"{served_name}:")):
        if known in loaded and known not in hidden and context.may_call(tenant, known):
            return json_response(_card(context, known, loaded[known], shows_paths=shows_paths))
    version = context.fleet.adapters.find(name)
    if version is not None and version.name not in hidden and context.may_call(tenant, version.name):
        card = _card(context, version.label, loaded[version.name], shows_paths=shows_paths)
        return json_response(card | {"root": version.path if shows_paths else version.label})
    raise ModelNotFound(f"The model `{name[:200]}` does not exist.", param="model")


async def tokenize(request: Request) -> Response:
    """``POST /tokenize``: the tokens of a prompt or a conversation."""
    context = context_of(request)
    tenant = context.gate.check_inference(request)
    body = await read_body(request, TokenizeBody)
    if body.model:
        context.check_model(tenant, body.model)
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("Expected exactly one of prompt and messages", param="prompt")
    tokenizer, limit = context.tokenizer, TOKENIZE_CONTEXTS * context.max_model_len
    tokens: Sequence[int]
    if (text := body.prompt) is not None:
        tokenizer.check_chars(len(text), limit)
        encode = partial(tokenizer.encode_within, text, limit, add_special_tokens=body.add_special_tokens is not False)
        tokens = encode() if len(text) <= INLINE_CHARS else await context.text_work.run(request, encode)
    else:
        template = template_of(context, await context.settings.of(body.model or ""), body)
        use = await read_tool_use(request, context, body.tools, "none", None, parser=None)
        template = replace(template, variables={**template.variables, **use.template_variables})
        tokens = await chat_tokens(request, context, body.messages or [], template, limit=limit)

    def describe() -> Response:
        strings = [tokenizer.token_name(token) for token in tokens] if body.return_token_strs else None
        return json_response(
            {"count": len(tokens), "max_model_len": context.max_model_len, "tokens": tokens, "token_strs": strings}
        )

    return describe() if len(tokens) <= INLINE_CHARS else await context.text_work.run(request, describe)


async def detokenize(request: Request) -> Response:
    """``POST /detokenize``: the text of tokens."""
    context = context_of(request)
    context.gate.check_inference(request)
    body = await read_body(request, DetokenizeBody)
    tokenizer, limit = context.tokenizer, TOKENIZE_CONTEXTS * context.max_model_len
    if len(body.tokens) > limit:
        raise RequestError(f"Got {len(body.tokens)} tokens, expected at most {limit}", param="tokens")
    check_token_ids(body.tokens, tokenizer.vocab_size, "tokens")
    if len(body.tokens) <= INLINE_CHARS:
        return json_response({"prompt": tokenizer.decode(body.tokens)})
    text = await context.text_work.run(request, lambda: tokenizer.decode(body.tokens))
    return json_response({"prompt": text})


async def tokenizer_info(request: Request) -> Response:
    """``GET /tokenizer_info``: the settings of the tokenizer and its chat template."""
    context = context_of(request)
    context.gate.check_inference(request)
    return Response(context.tokenizer.settings_json, media_type="application/json")


async def health(request: Request) -> Response:
    """``GET /health``, ``/ping``: 200 only while requests are accepted."""
    engines = context_of(request).fleet.engines
    engines.check_serving()
    return json_response({"status": engines.state.value})


async def version(request: Request) -> Response:
    """``GET /version``."""
    return json_response({"version": metadata.version("manylora")})


async def metrics(request: Request) -> Response:
    """``GET /metrics``: Prometheus text, or OpenMetrics."""
    context = context_of(request)
    context.gate.check_metrics(request)
    kind = choose_format(request.headers.get("accept", ""))

    async def scrape() -> bytes:
        snapshots = await context.snapshots(only_in_use=True)
        return await context.metrics.render(context.fleet, snapshots, context.functions(), kind=kind)

    return Response(await context.metrics.scrapes[kind].get(scrape), media_type=kind)


model_routes = [
    Route("/v1/models", list_models, methods=["GET"]),
    Route("/v1/models/{name:path}", get_model, methods=["GET"]),
    Route("/tokenize", tokenize, methods=["POST"]),
    Route("/detokenize", detokenize, methods=["POST"]),
    Route("/health", health, methods=["GET"]),
    Route("/ping", health, methods=["GET", "POST"]),
    Route("/version", version, methods=["GET"]),
    Route("/metrics", metrics, methods=["GET"]),
]
tokenizer_routes = [Route("/tokenizer_info", tokenizer_info, methods=["GET"])]
