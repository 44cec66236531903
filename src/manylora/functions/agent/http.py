"""The HTTP server of an agent: the server's own application for each backbone, behind one address."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from starlette.types import ASGIApp

from manylora.core.config import EngineConfig, ModelConfig, ServerConfig
from manylora.demo import demo_model_path
from manylora.functions.agent.dispatch import Dispatch
from manylora.functions.deployment import BackboneSpec
from manylora.functions.node.backbone_fleet import BackboneFleet
from manylora.functions.node.node import FunctionNode
from manylora.serving.api.form_checks import FormChecks
from manylora.serving.api.model_settings import ModelSettings
from manylora.serving.api.request import Context
from manylora.serving.http.auth import Gate
from manylora.serving.http.bounds import default_body_bytes
from manylora.serving.http.listening import HttpServer
from manylora.serving.metrics.prometheus import Metrics
from manylora.serving.server.http_server import connection_bounds, make_app
from manylora.serving.text import Tokenizer
from manylora.serving.text.model_files import load_generation_defaults

__all__ = ["BackboneApp", "backbone_apps", "http_server"]

LONGEST_BODY = default_body_bytes(262_144)
"""Bytes of a body that is read for the name of its model, before the limit of a backbone's own context holds."""

DRAIN_S = 2.0
"""Time that clients have to read the last bytes of answers once the agent stops, in seconds."""


@dataclass(frozen=True, slots=True)
class BackboneApp:
    """The application of a backbone, and its parts."""

    app: ASGIApp
    fleet: BackboneFleet
    metrics: Metrics
    forms: FormChecks


def backbone_apps(
    node: FunctionNode, backbones: Mapping[str, BackboneSpec], config: ServerConfig
) -> dict[str, BackboneApp]:
    """Return the application of each backbone; reads tokenizers, and no weights.

    Raises:
        ConfigError: A model lacks its configuration or its tokenizer.
    """
    return {name: _backbone_app(name, spec, node, config) for name, spec in backbones.items()}


def _backbone_app(name: str, spec: BackboneSpec, node: FunctionNode, config: ServerConfig) -> BackboneApp:
    folder = str(demo_model_path() if spec.model == "demo" else Path(spec.model))
    engine = EngineConfig(model=ModelConfig(model=folder, served_model_name=name, dtype=spec.dtype, device="cpu"))
    fleet = BackboneFleet(name, node, folder)
    tokenizer = Tokenizer.load(folder)
    metrics = Metrics(
        engine,
        has_adapter_histograms=config.adapter_histograms,
        served_name=name,
        epoch_s=time.time,
        monotonic_s=time.monotonic,
    )
    context = Context(
        engine_config=engine,
        config=config,
        fleet=fleet,
        tokenizer=tokenizer,
        # Folders of tenants are read in their functions alone: defaults and templates in them have no effect.
        settings=ModelSettings(
            load_generation_defaults(engine.model),
            base_name=name,
            adapters={},
            tokenizer=tokenizer,
            trusts_templates=False,
            base_names=frozenset(),
        ),
        metrics=metrics,
        serves_base=False,
        functions=fleet.functions,
    )
    return BackboneApp(make_app(context), fleet, metrics, context.forms)


def http_server(
    apps: Mapping[str, BackboneApp], node: FunctionNode, config: ServerConfig, on_listening: Callable[[], None]
) -> HttpServer:
    """Return the server of all backbones."""

    def backbone_of(model: str) -> str | None:
        if model in apps:
            return model
        function = node.functions.get(model) or node.functions.get(model.partition(":")[2])
        return None if function is None else function.host.name

    def close() -> None:
        for one in apps.values():
            one.forms.close()

    app = Dispatch(
        {name: one.app for name, one in apps.items()},
        backbone_of,
        gate=Gate(config.api_keys, config.admin_key),
        max_body_bytes=config.max_body_bytes or LONGEST_BODY,
    )
    return HttpServer(app, connection_bounds(config), on_listening, drain_s=DRAIN_S, on_shutdown=close)
