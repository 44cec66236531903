"""``/openapi.json`` and ``/docs``: the routes and the structs that decode their bodies, as they are.

Both are made once, at the first request, and sent as bytes. The page has no script and nothing from other servers.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from typing import Any

import jinja2
import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from manylora.serving.api.adapters import LoadBody, SageMakerBody, UnloadBody
from manylora.serving.api.publishing import PublishBody
from manylora.serving.api.responses import ResponsesBody
from manylora.serving.api.schemas import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody

__all__ = ["docs_routes", "openapi"]

BODIES: Mapping[tuple[str, str], type[msgspec.Struct]] = {
    ("POST", "/v1/completions"): CompletionBody,
    ("POST", "/v1/chat/completions"): ChatBody,
    ("POST", "/v1/responses"): ResponsesBody,
    ("POST", "/tokenize"): TokenizeBody,
    ("POST", "/detokenize"): DetokenizeBody,
    ("POST", "/v1/load_lora_adapter"): LoadBody,
    ("POST", "/v1/unload_lora_adapter"): UnloadBody,
    ("POST", "/adapters"): SageMakerBody,
    ("PUT", "/adapters/{name}"): PublishBody,
}
"""The struct of a route's body."""

_STREAMED = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/invocations")
_REF = "#/components/schemas/"
_PARAMETER = re.compile(r"\{(\w+)(?::(\w+))?\}")
_MARKUP = re.compile(r"``([^`]*)``")


class ErrorDetail(msgspec.Struct):
    """An error: a message, its kind, the field at fault, and the HTTP status."""

    message: str
    type: str
    param: str | None
    code: int


class Error(msgspec.Struct):
    """The body of every error."""

    error: ErrorDetail


def openapi(routes: Sequence[Route], *, root_path: str) -> dict[str, Any]:
    """Return the description of routes in OpenAPI 3.1."""
    structs = [*dict.fromkeys(BODIES.values()), Error]
    _, schemas = msgspec.json.schema_components(structs, ref_template=_REF + "{name}")
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        path = _PARAMETER.sub(r"{\1}", route.path)
        for method in sorted((route.methods or set()) - {"HEAD"}):
            paths.setdefault(path, {})[method.lower()] = _operation(route, method)
    return {
        "openapi": "3.1.0",
        "info": {"title": "manylora", "version": metadata.version("manylora")},
        "servers": [{"url": root_path or "/"}],
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"key": []}],
    }


def _operation(route: Route, method: str) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {}}
    if route.path in _STREAMED:
        content["text/event-stream"] = {}
    operation: dict[str, Any] = {
        "operationId": f"{route.endpoint.__name__}_{method.lower()}",
        "summary": _summary(route.endpoint),
        "parameters": [
            {"name": name, "in": "path", "required": True, "schema": {"type": "integer" if kind == "int" else "string"}}
            for name, kind in _PARAMETER.findall(route.path)
        ],
        "responses": {
            "200": {"description": "The answer.", "content": content},
            "default": {
                "description": "An error.",
                "content": {"application/json": {"schema": {"$ref": _REF + "Error"}}},
            },
        },
    }
    if (body := BODIES.get((method, _PARAMETER.sub(r"{\1}", route.path)))) is not None:
        schema = {"$ref": _REF + body.__name__}
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return operation


def _summary(endpoint: Callable[..., Any]) -> str:
    """Return the first line of a route's docstring, without its own name."""
    line = (endpoint.__doc__ or "").strip().partition("\n")[0]
    _, _, text = line.partition(": ")
    return _MARKUP.sub(r"\1", text or line).strip()


def docs_routes(routes: Sequence[Route], *, root_path: str) -> list[Route]:
    """Return the routes of the description of ``routes``."""

    @functools.cache
    def described() -> tuple[bytes, bytes]:
        document = openapi(routes, root_path=root_path)
        return msgspec.json.encode(document), _page(document).encode()

    async def openapi_json(request: Request) -> Response:
        """``GET /openapi.json``: this description."""
        return Response(described()[0], media_type="application/json")

    async def docs(request: Request) -> Response:
        """``GET /docs``: the same for readers."""
        headers = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'"}
        return Response(described()[1], media_type="text/html; charset=utf-8", headers=headers)

    return [Route("/openapi.json", openapi_json, methods=["GET"]), Route("/docs", docs, methods=["GET"])]


def _page(document: Mapping[str, Any]) -> str:
    page = jinja2.Environment(autoescape=True, trim_blocks=True).from_string(_PAGE)
    schemas = {_REF + name: schema for name, schema in document["components"]["schemas"].items()}
    return page.render(document, schemas=schemas, kind=_kind, default=_default)


def _kind(schema: Mapping[str, Any]) -> str:
    """Return a type in words; ``null`` is left out, since nearly every field may be."""
    if "anyOf" in schema:
        return " or ".join(_kind(one) for one in schema["anyOf"] if one.get("type") != "null")
    if "$ref" in schema:
        return str(schema["$ref"]).removeprefix(_REF)
    if "enum" in schema:
        return ", ".join(map(str, schema["enum"]))
    if schema.get("type") == "array":
        return f"list of {_kind(schema.get('items') or {})}"
    return str(schema.get("type", "JSON"))


def _default(schema: Mapping[str, Any]) -> str:
    default = schema.get("default")
    return "" if default is None or default == {} else msgspec.json.encode(default).decode()


_PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>manylora</title><style>
body{font:16px/1.5 system-ui,sans-serif;max-width:50em;margin:2em auto;padding:0 1em}
h2{font-size:1em;font-family:monospace;border-top:1px solid #ccc;padding-top:1em}
td{padding:0 1.5em 0 0;vertical-align:top}</style>
<h1>manylora {{ info.version }}</h1><p>The API of OpenAI with vLLM's extensions;
<a href="openapi.json">openapi.json</a> has the same for programs.</p>
{% for path, operations in paths.items() %}{% for method, operation in operations.items() %}
<h2><b>{{ method | upper }}</b> {{ path }}</h2><p>{{ operation.summary }}</p>
{% if operation.requestBody %}<table>
{% set body = schemas[operation.requestBody.content["application/json"].schema["$ref"]] %}
{% for name, field in body.properties.items() %}
<tr><td><code>{{ name }}</code></td><td>{{ kind(field) }}</td>
<td>{{ "required" if name in body.required else default(field) }}</td></tr>
{% endfor %}</table>{% endif %}
{% endfor %}{% endfor %}"""
