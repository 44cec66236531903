"""``/openapi.json`` and ``/docs``: the routes and the structs that decode their bodies, as they are.

Both are made once, at the first request, and sent as bytes. The page has no script and nothing from other servers.
"""

from __future__ import annotations

import functools
import html
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from manylora.serving.api.adapters import LoadBody, SageMakerBody, UnloadBody
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
}
"""The struct of a route's body."""

_STREAMED = ("/v1/completions", "/v1/chat/completions", "/v1/responses")
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
    structs = [*map(_without_raw, dict.fromkeys(BODIES.values())), Error]
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
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


@functools.cache
def _without_raw(struct: type[msgspec.Struct]) -> type[msgspec.Struct]:
    """Return a struct of the same fields, those of any JSON as such: schemas are made of no ``Raw``."""
    fields: list[tuple[str, Any, Any]] = []
    for one in msgspec.structs.fields(struct):
        default: Any = msgspec.field(name=one.encode_name)
        if one.default_factory is not msgspec.NODEFAULT:
            default = msgspec.field(default_factory=one.default_factory, name=one.encode_name)
        elif one.default is not msgspec.NODEFAULT:
            default = None if isinstance(one.default, msgspec.Raw) else one.default
            default = msgspec.field(default=default, name=one.encode_name)
        fields.append((one.name, _type_without_raw(one.type), default))
    return msgspec.defstruct(struct.__name__, fields, kw_only=True, namespace={"__doc__": struct.__doc__})


def _type_without_raw(kind: Any) -> Any:
    if kind is msgspec.Raw:
        return Any
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return _without_raw(kind)
    parts = tuple(map(_type_without_raw, typing.get_args(kind)))
    origin = typing.get_origin(kind)
    if not parts or origin is typing.Literal:
        return kind
    return typing.Union[parts] if origin in (types.UnionType, typing.Union) else origin[parts]  # noqa: UP007


def _operation(route: Route, method: str) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {}}
    if route.path in _STREAMED:
        content["text/event-stream"] = {}
    operation: dict[str, Any] = {
        "operationId": f"{route.endpoint.__name__}_{method.lower()}",
        "summary": _summary(route.endpoint),
        "parameters": [
            {
                "name": name,
                "in": "path",
                "required": True,
                "schema": {"type": "integer" if kind == "int" else "string"},
            }
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
    if (body := BODIES.get((method, route.path))) is not None:
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

    return [
        Route("/openapi.json", openapi_json, methods=["GET"]),
        Route("/docs", docs, methods=["GET"]),
    ]


def _page(document: Mapping[str, Any]) -> str:
    schemas = document["components"]["schemas"]
    parts = [_HEAD.format(version=html.escape(document["info"]["version"]))]
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            summary = html.escape(operation["summary"])
            body = operation.get("requestBody")
            fields = _fields(body["content"]["application/json"]["schema"], schemas) if body else ""
            parts.append(f"<h2><b>{method.upper()}</b> {html.escape(path)}</h2><p>{summary}</p>{fields}")
    return "".join(parts)


def _fields(schema: Mapping[str, Any], schemas: Mapping[str, Any]) -> str:
    made = schemas[schema["$ref"].removeprefix(_REF)]
    required = made.get("required", ())
    rows = "".join(
        f"<tr><td><code>{html.escape(name)}</code></td><td>{html.escape(_kind(one))}</td>"
        f"<td>{'required' if name in required else html.escape(_default(one))}</td></tr>"
        for name, one in made["properties"].items()
    )
    return f"<table>{rows}</table>"


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


_HEAD = """<!doctype html><html lang="en"><meta charset="utf-8"><title>manylora</title><style>
body{{font:16px/1.5 system-ui,sans-serif;max-width:50em;margin:2em auto;padding:0 1em}}
h2{{font-size:1em;font-family:monospace;border-top:1px solid #ccc;padding-top:1em}}
td{{padding:0 1.5em 0 0;vertical-align:top}}</style>
<h1>manylora {version}</h1><p>The API of OpenAI with vLLM's extensions; <a href="openapi.json">openapi.json</a> has the
same for programs.</p>"""
