"""The HTTP side of an agent: the server's own application for each backbone, behind one address.

Each backbone has an application of its own, with its tokenizer and its functions. A request that names a model goes to
the application of the model's backbone. With one backbone, and for requests that name no model, the first application
answers; ``?backbone=NAME`` chooses another. The list of models is that of all backbones, and so are the metrics.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from urllib.parse import parse_qs

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from prometheus_client.core import Metric
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from manylora.core.config import EngineConfig, ModelConfig, ServerConfig
from manylora.demo import demo_model_path
from manylora.functions.deployment import BackboneSpec
from manylora.functions.node.backbone_fleet import BackboneFleet
from manylora.functions.node.node import FunctionNode
from manylora.serving.api.model_settings import ModelSettings
from manylora.serving.api.request import Context, gate_of, make_context
from manylora.serving.http.auth import Gate
from manylora.serving.http.errors import HttpError, error_response, json_response
from manylora.serving.http.listening import HttpServer
from manylora.serving.http.room import BodyRoom, CallerRoom, default_body_bytes, room_of_engine
from manylora.serving.http.tenants import TenantBook
from manylora.serving.metrics.merged import merged_text
from manylora.serving.metrics.prometheus import Metrics
from manylora.serving.metrics.usage import UsageLedger
from manylora.serving.server.http_server import connection_bounds, make_app
from manylora.serving.text import Tokenizer
from manylora.serving.text.model_files import load_generation_defaults

__all__ = ["Dispatch", "agent_server"]

MAX_BODY_BYTES = default_body_bytes(262_144)
"""Bytes of a body that is read for the name of its model, before the limit of a backbone's own context holds."""

DRAIN_S = 2.0  # time that clients have to read the last bytes of answers once the agent stops, in seconds


def agent_server(
    node: FunctionNode,
    backbones: Mapping[str, BackboneSpec],
    config: ServerConfig,
    on_listening: Callable[[], None],
    *,
    tenants: TenantBook | None = None,
    usage: UsageLedger | None = None,
) -> tuple[HttpServer, list[BackboneFleet]]:
    """Return the server of all backbones, and the functions of each; reads tokenizers, and no weights.

    ``tenants`` are those of a file, and ``usage`` takes what they used.
    ``ConfigError`` if a model lacks its configuration or its tokenizer.
    """
    fleets = [BackboneFleet(name, node, _folder_of(spec)) for name, spec in backbones.items()]
    contexts = {one.served_name: _context(one, backbones[one.served_name], node, config, tenants) for one in fleets}
    first = next(iter(contexts.values()))
    # A tenant's limits hold over all backbones.
    callers = CallerRoom(
        room_of_engine(first.engine_config.scheduler),
        lambda: sum(one.num_serving for one in fleets),
        limits_of=first.gate.limits_of,
    )
    contexts = {name: replace(one, callers=callers) for name, one in contexts.items()}
    for name, one in contexts.items():
        node.subscribe(name, one.metrics.observe)
        if usage is not None:
            node.subscribe(name, usage.observe)

    def backbone_of(model: str, caller: str) -> str | None:
        if model in contexts:
            return model
        function = node.functions.get(model) or node.functions.get(model.partition(":")[2])
        if function is None or not function.spec.may_call(caller) or not first.may_call(caller, function.name):
            return None
        return function.host.name

    def close() -> None:
        for one in contexts.values():
            one.forms.close()

    app = Dispatch(
        {name: make_app(one) for name, one in contexts.items()},
        backbone_of,
        gate=gate_of(config, tenants),
        max_body_bytes=config.max_body_bytes or MAX_BODY_BYTES,
    )
    return HttpServer(app, connection_bounds(config), on_listening, drain_s=DRAIN_S, on_shutdown=close), fleets


def _folder_of(spec: BackboneSpec) -> str:
    return str(demo_model_path() if spec.model == "demo" else Path(spec.model))


def _context(
    fleet: BackboneFleet, spec: BackboneSpec, node: FunctionNode, config: ServerConfig, tenants: TenantBook | None
) -> Context:
    """Return the context of a backbone's application."""
    name, folder = fleet.served_name, _folder_of(spec)
    model = ModelConfig(
        model=folder, served_model_name=name, dtype=spec.dtype, base_dtype=spec.base_dtype, device="cpu"
    )
    engine = EngineConfig(model=model)
    tokenizer = Tokenizer.load(folder)
    metrics = Metrics(engine, has_adapter_histograms=config.adapter_histograms, served_name=name)
    return make_context(
        engine,
        config,
        fleet=fleet,
        tokenizer=tokenizer,
        # Folders of tenants are read in their functions alone: defaults and templates in them have no effect.
        settings=ModelSettings(
            base_defaults=load_generation_defaults(engine.model),
            base_name=name,
            adapters={},
            tokenizer=tokenizer,
            trusts_templates=False,
            base_names=frozenset(),
        ),
        metrics=metrics,
        serves_base=False,
        functions=fleet.functions,
        tenants=tenants,
    )


class _Named(msgspec.Struct):
    """The part of a body that chooses the application."""

    model: str = ""


@dataclass(eq=False)
class Dispatch:
    """An ASGI application over others."""

    apps: Mapping[str, ASGIApp]  # the application of each backbone, the first one the default
    # Returns the backbone of a model's name; ``None`` if there is no such model for that caller.
    backbone_of: Callable[[str, str], str | None]
    _: KW_ONLY
    gate: Gate  # checks a request's key before its body is read; the default application answers one without
    max_body_bytes: int  # longest body that is read for its model; a longer one goes to the default, which refuses it
    _bodies: BodyRoom = field(default_factory=BodyRoom)

    def __post_init__(self) -> None:
        self._default = next(iter(self.apps.values()))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http" or len(self.apps) == 1:
            await self._default(scope, receive, send)
            return
        path = scope["path"]
        if asked := parse_qs(scope.get("query_string", b"").decode("latin-1")).get("backbone"):
            await self.apps.get(asked[0], self._default)(scope, receive, send)
        elif path == "/v1/models":
            await self._list(scope, receive, send)
        elif path == "/metrics":
            await self._scrape(scope, receive, send)
        elif (caller := self._caller(scope)) is None:
            await self._default(scope, receive, send)
        elif path.startswith("/v1/models/"):
            await self._app_of(path.removeprefix("/v1/models/"), caller)(scope, receive, send)
        elif scope["method"] == "POST":
            try:
                body, rest = await self._read(scope, receive)
            except HttpError as error:
                await error_response(error)(scope, receive, send)
            else:
                await self._app_of(_model_in(body), caller)(scope, rest, send)
        else:
            await self._default(scope, receive, send)

    def _app_of(self, model: str, caller: str) -> ASGIApp:
        return self.apps.get(self.backbone_of(model, caller) or "", self._default)

    def _caller(self, scope: Scope) -> str | None:
        try:
            return self.gate.check_inference(Request(scope))  # the admin key passes as well
        except HttpError:
            return None

    async def _read(self, scope: Scope, receive: Receive) -> tuple[bytes, Receive]:
        """Return the body as far as it may go, and a ``receive`` that begins again.

        ``HttpError`` (429) if other bodies leave no room.
        """
        messages: list[Message] = []
        parts: list[bytes] = []
        num_bytes = 0
        arriving = self._bodies.enter(lambda: self.gate.caller_of(Request(scope)))
        try:
            while num_bytes <= self.max_body_bytes:
                message = await receive()
                messages.append(message)
                if message["type"] != "http.request":
                    break
                parts.append(message.get("body", b""))
                num_bytes += len(parts[-1])
                arriving.grow(num_bytes)
                if not message.get("more_body", False):
                    break
        finally:
            arriving.close()
        messages.reverse()

        async def again() -> Message:
            return messages.pop() if messages else await receive()

        return b"".join(parts), again

    async def _list(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with the models of all applications, or with the first refusal."""
        if (bodies := await self._ask_all(scope, receive, send)) is not None:
            cards = [card for body in bodies.values() for card in msgspec.json.decode(body)["data"]]
            await json_response({"object": "list", "data": cards})(scope, receive, send)

    async def _scrape(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with the metrics of all applications, as Prometheus' text, or with the first refusal."""
        any_format = [one for one in scope["headers"] if one[0] != b"accept"]
        if (bodies := await self._ask_all({**scope, "headers": any_format}, receive, send)) is not None:
            text = await asyncio.to_thread(merged_text, bodies, "backbone", _is_of_process)
            await Response(text, media_type=CONTENT_TYPE_LATEST)(scope, receive, send)

    async def _ask_all(self, scope: Scope, receive: Receive, send: Send) -> dict[str, bytes] | None:
        """Return the answers of all applications, by backbone; pass on the first refusal, and return ``None``."""
        bodies = {}
        for name, app in self.apps.items():
            status, bodies[name] = await _ask(app, Request(scope, receive))
            if status != 200:
                await app(scope, receive, send)
                return None
        return bodies


def _is_of_process(family: Metric) -> bool:
    return family.name.startswith("process_")


async def _ask(app: ASGIApp, request: Request) -> tuple[int, bytes]:
    """Return the status and the body of an application's answer."""
    status = 500
    parts: list[bytes] = []

    async def send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        elif message["type"] == "http.response.body":
            parts.append(message.get("body", b""))

    await app(request.scope, request.receive, send)
    return status, b"".join(parts)


def _model_in(body: bytes) -> str:
    try:
        return msgspec.json.decode(body, type=_Named).model
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return ""  # the default application says why it is wrong
