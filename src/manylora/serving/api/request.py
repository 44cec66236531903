"""The start of every route: the server's parts, and the body of the request, read and checked strictly.

Only ``application/json`` is accepted: clients send it, and a web page of another site cannot send it without a
preflight request.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Generic, TypeVar

import msgspec
from starlette.requests import Request

from manylora.core.config import EngineConfig, ServerConfig
from manylora.core.errors import CapacityError, EngineDead, ModelNotFound
from manylora.serving.api.forms import FormChecks
from manylora.serving.api.json_body import parse
from manylora.serving.api.model_settings import ModelSettings, Settings
from manylora.serving.api.on_demand import OnDemand
from manylora.serving.api.schemas import SamplingFields
from manylora.serving.hosting.fleet.snapshot import Snapshot
from manylora.serving.hosting.spool import AdapterSpool
from manylora.serving.http.access import RetryTimes
from manylora.serving.http.auth import Gate
from manylora.serving.http.errors import HttpError
from manylora.serving.http.room import (
    BodyRoom,
    CallerRoom,
    WaitingAnswers,
    body_parts,
    default_body_bytes,
    room_of_engine,
)
from manylora.serving.http.tenants import TenantBook
from manylora.serving.http.turns import FairWork, LoopTurns, next_turn
from manylora.serving.metrics.prometheus import Metrics
from manylora.serving.metrics.status_report import FunctionState
from manylora.serving.ports import FleetPort
from manylora.serving.text import Tokenizer
from manylora.serving.text.forms import FormProcess, FormSettings

__all__ = [
    "AnswerCall",
    "Context",
    "context_of",
    "gate_of",
    "hidden_from_caller",
    "make_context",
    "read_body",
    "read_call",
]

MAX_MODEL_CHARS = 600  # characters of ``model``: the base's name, a colon and an adapter's

MAX_TEXT_WAITING = 256
"""Long texts that wait for their turn to be tokenized, half of them of one caller; more get a 429."""

MAX_FORMS_WAITING = 64
"""Requests with new forms that wait for their turn to be checked, half of them of one caller; more get a 429."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """The server's parts, in the state of the application."""

    engine_config: EngineConfig
    config: ServerConfig
    fleet: FleetPort
    tokenizer: Tokenizer  # the base model's tokenizer
    settings: ModelSettings  # sampling defaults and chat templates, by model
    metrics: Metrics  # shown by ``/metrics`` and ``/status``
    lora_roots: tuple[Path, ...]  # directories from which adapters may be loaded at run time
    spool: AdapterSpool | None  # takes adapters that come with requests; ``None`` if none may
    serves_base: bool  # whether the base is a model of its own
    # Returns the states of isolated functions, for ``/status`` and ``/metrics``.
    functions: Callable[[], Sequence[FunctionState]]
    gate: Gate  # checks API keys
    text_work: FairWork  # takes long texts off the event loop, in turns
    forms: FormChecks  # checks forms of answers
    callers: CallerRoom  # bounds the answers under way of each caller, where keys tell callers apart
    on_demand: OnDemand | None  # loads adapters that requests name; ``None`` if none may be
    fingerprint: str  # digest of all that answers depend on besides the adapter, for ``system_fingerprint``
    retries: RetryTimes = field(default_factory=RetryTimes)  # tells refused clients when to try again
    bodies: BodyRoom = field(default_factory=BodyRoom)  # the bytes of bodies that arrive
    # Share the event loop between requests that need it for milliseconds.
    turns: LoopTurns = field(default_factory=LoopTurns)
    waiting_answers: WaitingAnswers = field(default_factory=WaitingAnswers)  # the long ones
    started_at: int = field(default_factory=lambda: int(time.time()))  # start of the server, in seconds since the epoch
    epoch_s: Callable[[], float] = time.time  # returns the time in seconds since the epoch
    monotonic_s: Callable[[], float] = time.monotonic  # returns a time in seconds that never steps back
    # The answers of ``/v1/models``, made or under way, under the number of changes of the adapters at the time and
    # whether they show paths; routers ask for them every few seconds.
    model_lists: dict[tuple[int, bool], asyncio.Task[bytes]] = field(default_factory=dict)

    @property
    def max_model_len(self) -> int:
        """Tokens of a prompt and its answer together, at most."""
        return self.fleet.engines.info.max_model_len

    def check_room(self, tenant: str) -> None:
        """Raise ``CapacityError`` if no engine would take a request now, or none of this tenant."""
        self.fleet.requests.check_room()
        self.callers.check(tenant)

    def may_call(self, tenant: str, model: str) -> bool:
        """Return whether a caller may see and call the base or adapter of that name; each may without tenants."""
        one = self.gate.tenant(tenant)
        return one is None or one.may_call(model)

    def check_model(self, tenant: str, model: str) -> None:
        """Raise ``ModelNotFound``, as for a name that does not exist, unless a caller may call a model or version.

        Names that it may not call are told by their text alone, in a time that does not depend on what there is.
        """
        if self.gate.tenants is None:
            return
        # An adapter that is not loaded yet may be named behind the base's name, too.
        name = model.removeprefix(f"{self.fleet.served_name}:")
        if self.may_call(tenant, name) or self.may_call(tenant, name.rpartition("@")[0]):
            version = None if model == self.fleet.served_name else self.fleet.adapters.find(model)
            if self.may_call(tenant, name if version is None else version.name):
                return
        raise ModelNotFound(f"The model {model[:200]!r} does not exist", param="model")

    async def snapshots(self, num_adapters: int | None = None, *, only_in_use: bool = False) -> Mapping[int, Snapshot]:
        """Return the snapshots of the fleet's engines; none while no engine serves."""
        try:
            return await self.fleet.engines.snapshots(num_adapters, only_in_use=only_in_use)
        except (CapacityError, EngineDead):
            return {}


def make_context(
    engine_config: EngineConfig,
    config: ServerConfig,
    *,
    fleet: FleetPort,
    tokenizer: Tokenizer,
    settings: ModelSettings,
    metrics: Metrics,
    lora_roots: tuple[Path, ...] = (),
    spool: AdapterSpool | None = None,
    serves_base: bool = True,
    functions: Callable[[], Sequence[FunctionState]] = tuple,
    tenants: TenantBook | None = None,
) -> Context:
    """Return the parts of a server; the arguments are fields of ``Context``, and the tenants of a file."""
    model = engine_config.model
    gate = gate_of(config, tenants)
    form_turns = FairWork("new forms", gate.caller_of, max_waiting=MAX_FORMS_WAITING, num_at_once=1)
    form_process = FormProcess(FormSettings(model.tokenizer or model.model, model.revision))
    on_demand = OnDemand(fleet, engine_config.adapters.registries, time.monotonic) if config.lora_on_demand else None
    answers_by = f"{metadata.version('manylora')}/{model.model}/{model.revision}/{model.dtype}"
    return Context(
        engine_config=engine_config,
        config=config,
        fleet=fleet,
        tokenizer=tokenizer,
        settings=settings,
        metrics=metrics,
        lora_roots=lora_roots,
        spool=spool,
        serves_base=serves_base,
        functions=functions,
        gate=gate,
        text_work=FairWork("long texts", gate.caller_of, max_waiting=MAX_TEXT_WAITING),
        forms=FormChecks(form_process, form_turns),
        callers=CallerRoom(
            room_of_engine(engine_config.scheduler), lambda: fleet.engines.num_serving, limits_of=gate.limits_of
        ),
        on_demand=on_demand,
        fingerprint=f"fp_{hashlib.blake2b(answers_by.encode(), digest_size=5).hexdigest()}",
    )


def gate_of(config: ServerConfig, tenants: TenantBook | None) -> Gate:
    """Return the checks of a server's keys."""
    return Gate(
        config.api_keys,
        config.admin_key,
        tenants=tenants,
        router_key=config.router_key,
        metrics_key=config.metrics_key,
    )


def context_of(request: Request) -> Context:
    """Return the server's parts."""
    context = request.app.state.context
    assert isinstance(context, Context)
    return context


def hidden_from_caller(context: Context, request: Request) -> frozenset[str]:
    """Return the names of adapters that the caller of an admin route does not see: the administrator sees all."""
    if context.gate.is_admin(request):
        return frozenset()
    return context.fleet.hidden_from(context.gate.check_inference(request))


Fields = TypeVar("Fields", bound=SamplingFields)
Body = TypeVar("Body", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True)
class AnswerCall(Generic[Fields]):
    """A request for answers, its caller, its body, and the settings of its model."""

    http: Request
    context: Context
    tenant: str
    body: Fields
    settings: Settings


async def read_call(
    request: Request, body: type[Fields] | Callable[[bytes], type[Fields]], *, model: str = ""
) -> AnswerCall[Fields]:
    """Check the key of a request for answers and the room for it, then read its body; arguments as of ``read_body``.

    Errors are those of ``read_body`` and ``OnDemand.find``, besides ``HttpError`` for a missing or wrong key (401), and
    ``CapacityError`` if no engine would take a request now, or none of this caller.
    """
    context = context_of(request)
    tenant = context.gate.check_inference(request)
    context.check_room(tenant)
    made = await read_body(request, body, model=model)
    context.check_model(tenant, made.model)
    if context.on_demand is not None and made.model:
        await context.on_demand.find(made.model, tenant)
    return AnswerCall(request, context, tenant, made, await context.settings.of(made.model))


async def read_body(request: Request, body: type[Body] | Callable[[bytes], type[Body]], *, model: str = "") -> Body:
    """Read and check the body of a request; an alias of the base is replaced by its name.

    ``body`` is its type, or finds that in its bytes. ``model``, if any, takes the place of its own.

    ``HttpError`` for another media type (415), above ``max_body_bytes`` (413), if other bodies leave no room (429), or
    the client disconnected (400); ``ModelNotFound`` for a name longer than any; ``RequestError`` with the field.
    """
    context = context_of(request)
    caller_of = partial(context.gate.caller_of, request)
    context.turns.enter(caller_of)
    max_bytes = context.config.max_body_bytes or default_body_bytes(context.max_model_len)
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise HttpError(415, f"Got the media type {media_type[:100]!r}, expected application/json")
    parts: list[bytes] = []
    num_bytes = 0
    arriving = context.bodies.enter(caller_of)
    try:
        async for part in body_parts(request, max_bytes):
            num_bytes += len(part)
            arriving.grow(num_bytes)
            parts.append(part)
        await next_turn()
        data = b"".join(parts)
        kind: type[Body] = body if isinstance(body, type) else body(data)
        made = await parse(data, kind)
    finally:
        arriving.close()
    asked = model or getattr(made, "model", None)
    if isinstance(asked, str):
        made.model = _model_of(context, asked, made)  # type: ignore[attr-defined]
    return made


def _model_of(context: Context, model: str, body: msgspec.Struct) -> str:
    """Return the name under which the engines know a model."""
    served_name = context.fleet.served_name
    if not model and not getattr(body, "needs_model", True):
        return served_name
    if len(model) > MAX_MODEL_CHARS:
        raise ModelNotFound(f"The model `{model[:200]}...` of {len(model)} characters does not exist.", param="model")
    if aliases := context.config.web.aliases:
        name, colon, adapter = model.partition(":")
        if name in aliases and model not in context.fleet.adapters.loaded:
            return served_name + colon + adapter
    return model
