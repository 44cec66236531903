"""`manylora serve`: make the configuration from the command line, and run the server."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from manylora.cli.options.adapter_folders import collect_adapters
from manylora.cli.options.config_file import config_option
from manylora.cli.options.fields import Chosen, flags_of, with_flags
from manylora.cli.options.values import (
    LogLevel,
    LoraModules,
    ModelArgument,
    log_to_stderr,
    panel,
    parse_adapter,
    parse_cache_dir,
    read_template,
    resolve_model,
)
from manylora.cli.options.vllm import exposure_warning, near_names, spread_lists, take_out, with_vllm_environment
from manylora.cli.views.terminal import note
from manylora.core.adapters.folder import CONFIG_FILE
from manylora.core.config import AdapterConfig, EngineConfig, MemoryConfig, ModelConfig, SchedulerConfig, ServerConfig
from manylora.core.errors import AdapterNotFound, ConfigError
from manylora.core.memory import EVICTION_POLICIES
from manylora.core.plugins import options_for, options_of
from manylora.core.routing import ROUTERS
from manylora.core.scheduling import POLICIES, PREDICTORS, make_predictor, make_step_composition
from manylora.core.server_config import FleetConfig, PublishConfig, TlsConfig, TraceConfig, WebConfig

__all__ = ["ServeCommand", "serve"]

_FLAGS = flags_of(
    *(ModelConfig, AdapterConfig, MemoryConfig, SchedulerConfig),
    *options_of(POLICIES).values(),
    *options_of(PREDICTORS).values(),
    *options_of(EVICTION_POLICIES).values(),
    *options_of(ROUTERS).values(),
    *(EngineConfig, FleetConfig, PublishConfig, ServerConfig, WebConfig, TlsConfig, TraceConfig),
)
_PANELS = ("Model", "Adapters", "Scheduling", "Memory", "Replicas", "HTTP", "Tenants", "Debugging", "Simulation")


class ServeCommand(TyperCommand):
    """A command that also accepts the flags of `vllm serve`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Remove vLLM's flags with a remark for each, and parse the rest."""
        ours, remarks = take_out(args)
        for remark in remarks:
            note(remark)
        try:
            return super().parse_args(ctx, spread_lists(ours))
        except Exception as error:
            if hasattr(error, "possibilities"):  # click's error of an unknown option; typer brings a copy of click
                names = [name for param in self.params for name in param.opts if name.startswith("--")]
                error.possibilities = near_names(getattr(error, "option_name", ""), names)
            raise


@with_flags(_FLAGS, panels=_PANELS)
def serve(
    model: ModelArgument,
    chosen: Chosen,
    config: Annotated[
        str | None,
        config_option(
            _FLAGS, "Read options from a TOML file, by the same names, with the model and a table of lora-modules."
        ),
    ] = None,
    lora_modules: LoraModules = None,
    log_level: LogLevel = "info",
    download_dir: Annotated[
        str | None,
        panel("Model", "Folder for models from the hub; by default that of Hugging Face's library.", metavar="DIR"),
    ] = None,
    builder: Annotated[str | None, typer.Option(metavar="MODULE:FUNCTION", hidden=True)] = None,
) -> None:
    """Serve a model and its adapters over HTTP, with OpenAI's API.

    The `model` field of a request names its adapter, or the base.

    Flags of `vllm serve` that are not needed are accepted with a remark.

    [bold]manylora serve /models/llama --lora-dir /adapters --port 8000[/bold]
    """
    if download_dir is not None:  # before that library is imported, here and in the engines
        os.environ["HF_HUB_CACHE"] = str(Path(download_dir).expanduser())
    cache = chosen.make(AdapterConfig)
    server = _server_config(chosen, cache)
    if warning := exposure_warning(server):
        note(warning)
    roots = [os.path.realpath(folder) for folder in (*server.lora_dirs, *server.allowed_lora_paths)]
    typed = collect_adapters(lora_modules or (), server.lora_dirs, roots, cache.registries)
    base = chosen.of(ModelConfig)
    checkpoint, base["served_model_name"], adapters = resolve_model(model, base["served_model_name"], typed)
    engine = chosen.make(
        EngineConfig,
        model=ModelConfig(model=checkpoint, **base),
        memory=chosen.make(MemoryConfig),
        scheduler=chosen.make(SchedulerConfig),
        adapters=cache,
        cache_dir=parse_cache_dir(chosen.of(EngineConfig)["cache_dir"]),
    )
    log_to_stderr(log_level, "api")
    named = dict(map(parse_adapter, lora_modules or ()))
    _check_early(engine, server, named)
    note(f"starting {model} with {len(adapters)} adapters; its address follows when it is ready")
    from manylora.serving.server import LoraModule, run  # imports torch and the web framework

    # Adapters from --lora-dir are in `typed` and not in `named`; the demo's own are in neither.
    modules = [
        LoraModule(name, path, is_required=name in named or name not in typed) for name, path in adapters.items()
    ]
    sys.exit(run(engine, server, modules, builder=builder))


serve.command_class = ServeCommand  # type: ignore[attr-defined]


def _server_config(chosen: Chosen, cache: AdapterConfig) -> ServerConfig:
    """Return the server's configuration, with folders of this user and what vLLM's environment asks for."""
    web = chosen.make(WebConfig, tls=chosen.make(TlsConfig), traces=chosen.make(TraceConfig))
    web = replace(web, chat_template=read_template(web.chat_template))
    publish = chosen.make(PublishConfig)
    server = chosen.make(ServerConfig, fleet=chosen.make(FleetConfig), web=web, publish=publish)
    server = replace(
        server,
        lora_dirs=tuple(str(Path(folder).expanduser()) for folder in server.lora_dirs),
        allowed_lora_paths=tuple(str(Path(folder).expanduser()) for folder in server.allowed_lora_paths),
    )
    return with_vllm_environment(server, os.environ, cache.registries)


def _check_early(engine: EngineConfig, server: ServerConfig, named: Mapping[str, str]) -> None:
    """Raise errors of the configuration before a model is loaded, which may take minutes.

    ``named`` are paths by name of the adapters that must load.
    """
    if server.lora_on_demand and not engine.adapters.registries:
        raise ConfigError("Got --lora-on-demand without --lora-registry URL, expected where to look for adapters")
    for name, folder in named.items():
        if os.path.isdir(folder) and not os.path.lexists(os.path.join(folder, CONFIG_FILE)):
            raise AdapterNotFound(name, f"there is no {CONFIG_FILE} in {folder!r}")
    if (uds := server.web.uds) is not None and not Path(uds).absolute().parent.is_dir():
        raise ConfigError(f"Got --uds {uds!r}, and there is no such folder for the socket")
    # A simulated engine reads the tokenizer alone.
    simulated = engine.model.tokenizer if engine.simulate is not None else None
    if not Path(checkpoint := simulated or engine.model.model).is_dir():
        from manylora.execution.checkpoint.files import check_checkpoint  # imports the hub's library

        check_checkpoint(checkpoint, engine.model.revision)
    options_for("policy", engine.scheduler.policy, POLICIES, engine.scheduler.policy_options)
    options_for("eviction", engine.adapters.eviction, EVICTION_POLICIES, engine.adapters.eviction_options)
    make_predictor(engine.scheduler, engine.seed)
    make_step_composition(engine.scheduler.step_composition)
    options_for("router", server.fleet.router, ROUTERS, server.fleet.router_options)
    if engine.step_log is not None:
        try:
            open(engine.step_log, "a").close()
        except OSError as error:
            reason = f"which cannot be written: {error.strerror}"
            raise ConfigError(f"Got --step-log {engine.step_log!r}, {reason}") from None
