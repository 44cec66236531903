"""`manylora serve`: the command line as configuration, then the server until it ends."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from manylora.cli import options
from manylora.cli.config_file import read_config_file
from manylora.cli.options import MEMORY_DEFAULTS, MODEL_DEFAULTS, parse_memory, resolve_model
from manylora.cli.panels import panel
from manylora.cli.terminal import note
from manylora.cli.values import collect_adapters, parse_adapter, parse_size
from manylora.cli.vllm_flags import spread_lists, take_out
from manylora.config import AdapterConfig, EngineConfig, MemoryConfig, ModelConfig, SchedulerConfig, ServerConfig
from manylora.errors import ConfigError
from manylora.memory import EVICTION_POLICIES
from manylora.plugins import find_factory
from manylora.scheduling import POLICIES, PREDICTORS, make_predictor

__all__ = ["ServeCommand", "serve"]

_SCHEDULER = SchedulerConfig()
_ADAPTERS = AdapterConfig()
_SERVER = ServerConfig()
_LISTS = ("api_key", "lora_dir", "lora_modules")
_LOG_LEVELS = ("debug", "info", "warning", "error")


class ServeCommand(TyperCommand):
    """A command that also understands the command lines people have for vLLM."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Take out what is vLLM's, tell why, and parse the rest."""
        ours, remarks = take_out(args)
        for remark in remarks:
            note(remark)
        return super().parse_args(ctx, spread_lists(ours))


def _use_config_file(context: typer.Context, path: str | None) -> str | None:
    """Make the file's values the defaults of this command, before any other option is looked at."""
    if path is not None:
        names = [param.name for param in context.command.params if param.name not in (None, "config", "help")]
        context.default_map = read_config_file(path, options=names, lists=_LISTS)
    return path


def serve(
    model: options.ModelArgument,
    config: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Options from a TOML file, by the same names; the model and a table of lora-modules too.",
            is_eager=True,
            callback=_use_config_file,
        ),
    ] = None,
    served_model_name: Annotated[str | None, panel("Model", "The base's name in the API.")] = None,
    tokenizer: options.Tokenizer = None,
    revision: options.Revision = None,
    dtype: options.Dtype = MODEL_DEFAULTS.dtype,
    device: options.Device = MODEL_DEFAULTS.device,
    max_model_len: options.MaxModelLen = None,
    seed: options.Seed = 0,
    trust_remote_code: options.TrustRemoteCode = False,
    lora_modules: options.LoraModules = None,
    lora_dir: Annotated[
        list[str] | None,
        panel(
            "Adapters",
            "Load every adapter folder below DIR, named after itself (a broken one is left out, and the log says "
            "why), and let the API load others from there. Repeatable.",
            metavar="DIR",
        ),
    ] = None,
    max_loras: Annotated[
        int | None,
        panel("Adapters", "Most distinct adapters in one step; by default no limit."),
    ] = None,
    max_cpu_loras: Annotated[int | None, panel("Adapters", "Most adapters kept in host memory.")] = None,
    host_memory: Annotated[
        str, panel("Adapters", "Host memory for adapters.", metavar="SIZE")
    ] = f"{_ADAPTERS.host_bytes // 2**30}GiB",
    adapter_dtype: options.AdapterDtype = _ADAPTERS.adapter_dtype,
    eviction: Annotated[
        str,
        panel(
            "Adapters",
            "Which idle adapter or prefix makes room first; or one of your own, as module:Name or file.py:Name.",
            metavar="|".join(sorted(EVICTION_POLICIES)),
        ),
    ] = _ADAPTERS.eviction,
    look_ahead: Annotated[
        int,
        panel("Adapters", "Waiting requests whose adapters are brought to the device before their turn."),
    ] = _ADAPTERS.look_ahead,
    forecast: Annotated[
        bool,
        panel(
            "Adapters",
            "Bring adapters that are due by their past as well, before anybody waits for them.",
            "--forecast",
        ),
    ] = _ADAPTERS.forecast,
    lora_kernel: options.LoraKernel = MODEL_DEFAULTS.lora_kernel,
    policy: Annotated[
        str,
        panel(
            "Scheduling",
            "Which waiting request goes first; or one of your own, as module:Name or file.py:Name.",
            metavar="|".join(sorted(POLICIES)),
        ),
    ] = _SCHEDULER.policy,
    max_num_seqs: Annotated[int, panel("Scheduling", "Most requests running at once.")] = _SCHEDULER.max_num_seqs,
    max_num_batched_tokens: Annotated[
        int,
        panel("Scheduling", "Most tokens in one step; longer prompts are cut to it."),
    ] = _SCHEDULER.max_num_batched_tokens,
    step_target: Annotated[
        float | None,
        panel(
            "Scheduling",
            "Cut prompts so that a step takes no longer, by costs learnt while serving; and shorter where memory "
            "runs short.",
            metavar="SECONDS",
        ),
    ] = _SCHEDULER.step_target_s,
    max_waiting: Annotated[int, panel("Scheduling", "Most requests waiting; more get a 429.")] = _SCHEDULER.max_waiting,
    no_chunked_prefill: Annotated[
        bool,
        panel("Scheduling", "Run each prompt whole, however long the step becomes.", "--no-chunked-prefill"),
    ] = False,
    no_mixed_steps: Annotated[
        bool,
        panel("Scheduling", "Let decoding wait while prompts run, as S-LoRA does.", "--no-mixed-steps"),
    ] = False,
    no_overlap_loads: Annotated[
        bool,
        panel(
            "Scheduling", "Let steps wait for the adapters of those they admit, as S-LoRA does.", "--no-overlap-loads"
        ),
    ] = False,
    reserve_output: Annotated[
        bool,
        panel(
            "Scheduling",
            "Reserve pages for the longest answer on admission: nobody is pre-empted, and fewer run.",
            "--reserve-output",
        ),
    ] = _SCHEDULER.reserve_output,
    steps_between_admissions: Annotated[
        int,
        panel("Scheduling", "Steps that run before anybody else is admitted, while anybody runs."),
    ] = _SCHEDULER.steps_between_admissions,
    plan_ahead: Annotated[
        bool | None,
        panel(
            "Scheduling",
            "Plan each step while the one before it runs, so that the device does not wait for it; by default "
            "on a GPU.",
            "--plan-ahead/--no-plan-ahead",
            show_default=False,
        ),
    ] = _SCHEDULER.plan_ahead,
    predictor: Annotated[
        str,
        panel("Scheduling", "What guesses the length of answers, for policies that ask.", metavar="|".join(PREDICTORS)),
    ] = _SCHEDULER.predictor,
    request_log: Annotated[
        str | None,
        panel(
            "Scheduling",
            "Append a line per finished request: sizes, no text.",
            metavar="FILE",
        ),
    ] = None,
    ageing: Annotated[
        float,
        panel("Scheduling", "Under sjf: predicted tokens that a second of waiting makes up for.", metavar="TOKENS"),
    ] = _SCHEDULER.ageing_tokens_per_s,
    request_size: Annotated[
        str,
        panel("Scheduling", "Under chameleon: what the size of a request is.", metavar="degree-2|degree-1|output"),
    ] = _SCHEDULER.request_size,
    queue_criterion: Annotated[
        str,
        panel("Scheduling", "Under chameleon: how the number of queues is chosen.", metavar="elbow|wcss"),
    ] = _SCHEDULER.queue_criterion,
    queue_refresh: Annotated[
        float,
        panel("Scheduling", "Under chameleon: how often queues and quotas are set anew.", metavar="SECONDS"),
    ] = _SCHEDULER.refresh_s,
    slo: Annotated[
        float | None,
        panel(
            "Scheduling",
            "What a request may take, for chameleon's quotas; by default five times the mean.",
            metavar="SECONDS",
        ),
    ] = None,
    memory: options.Memory = None,
    gpu_memory_utilization: Annotated[
        float,
        panel("Memory", "Share of the GPU this process may take, without --memory."),
    ] = MEMORY_DEFAULTS.gpu_memory_utilization,
    block_size: Annotated[int, panel("Memory", "Tokens of KV in a page.")] = MEMORY_DEFAULTS.block_size,
    num_pages: options.NumPages = None,
    no_prefix_caching: Annotated[
        bool,
        panel("Memory", "Forget the KV of finished prompts.", "--no-prefix-caching"),
    ] = False,
    host: Annotated[str, panel("HTTP", "Address to listen on.")] = _SERVER.host,
    port: Annotated[int, panel("HTTP", "0 picks a free one.")] = _SERVER.port,
    api_key: Annotated[
        list[str] | None,
        panel(
            "HTTP",
            "A key that clients must send. Repeatable; none leaves the API open.",
            envvar="MANYLORA_API_KEY",
            show_envvar=True,
        ),
    ] = None,
    admin_key: Annotated[
        str | None,
        panel(
            "HTTP",
            "The key for loading and unloading adapters; without it an API key, or a caller on this machine.",
            envvar="MANYLORA_ADMIN_KEY",
        ),
    ] = None,
    drain_timeout: Annotated[
        float,
        panel("HTTP", "Seconds that SIGTERM waits for requests in flight."),
    ] = _SERVER.drain_timeout_s,
    hang_timeout: Annotated[
        float,
        panel("HTTP", "Seconds without a step or a turn after which the engine is restarted; 0 is never."),
    ] = _SERVER.hang_timeout_s,
    adapter_histograms: Annotated[
        bool,
        panel("HTTP", "Latencies by adapter in the metrics: some sixty series for each.", "--adapter-histograms"),
    ] = False,
    in_process: Annotated[
        bool,
        panel("Debugging", "One process instead of two, for a debugger.", "--in-process"),
    ] = False,
    log_level: Annotated[
        str, panel("Debugging", "The least serious messages to write.", metavar="|".join(_LOG_LEVELS))
    ] = "info",
    simulate: Annotated[
        str | None,
        panel(
            "Simulation",
            "Answer with made-up tokens at the pace of a cost profile (the file that [bold]manylora "
            "calibrate[/bold] wrote, or hardware:model, as a40:llama-7b); of MODEL only the tokenizer is read.",
            metavar="PROFILE",
        ),
    ] = None,
    step_log: Annotated[
        str | None,
        panel(
            "Simulation",
            "Append a line per step and per load, for [bold]manylora calibrate[/bold]; some hundred bytes each.",
            metavar="FILE",
        ),
    ] = None,
    builder: Annotated[str | None, typer.Option(metavar="MODULE:FUNCTION", hidden=True)] = None,
) -> None:
    """Serve a model and its adapters over HTTP, by OpenAI's API.

    A request says by its `model` field which adapter answers; the base has a name as well.

    Flags of `vllm serve` that are not needed here are accepted and explained.

    [bold]manylora serve /models/llama --lora-dir /adapters --port 8000[/bold]
    """
    typed = collect_adapters(lora_modules or (), lora_dir or ())
    checkpoint, served_name, adapters = resolve_model(model, served_model_name, typed)
    engine = EngineConfig(
        model=ModelConfig(
            model=checkpoint,
            tokenizer=tokenizer,
            served_model_name=served_name,
            dtype=dtype,
            device=device,
            max_model_len=max_model_len,
            lora_kernel=lora_kernel,
            revision=revision,
            trust_remote_code=trust_remote_code,
        ),
        memory=MemoryConfig(
            block_size=block_size,
            num_pages=num_pages,
            memory_bytes=parse_memory(memory),
            gpu_memory_utilization=gpu_memory_utilization,
            prefix_caching=not no_prefix_caching,
        ),
        scheduler=SchedulerConfig(
            policy=policy,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            step_target_s=step_target,
            max_loras=max_loras,
            max_waiting=max_waiting,
            chunked_prefill=not no_chunked_prefill,
            mixed_steps=not no_mixed_steps,
            overlap_loads=not no_overlap_loads,
            reserve_output=reserve_output,
            steps_between_admissions=steps_between_admissions,
            plan_ahead=plan_ahead,
            predictor=predictor,
            slo_s=slo,
            ageing_tokens_per_s=ageing,
            request_size=request_size,
            queue_criterion=queue_criterion,
            refresh_s=queue_refresh,
        ),
        adapters=AdapterConfig(
            eviction=eviction,
            host_bytes=parse_size(host_memory),
            max_cpu_loras=max_cpu_loras,
            adapter_dtype=adapter_dtype,
            look_ahead=look_ahead,
            forecast=forecast,
        ),
        seed=seed,
        request_log=request_log,
        step_log=step_log,
        simulate=simulate,
    )
    server = ServerConfig(
        host=host,
        port=port,
        api_keys=tuple(api_key or ()),
        admin_key=admin_key,
        lora_dirs=tuple(str(Path(folder).expanduser()) for folder in lora_dir or ()),
        in_process=in_process,
        drain_timeout_s=drain_timeout,
        hang_timeout_s=hang_timeout,
        adapter_histograms=adapter_histograms,
    )
    _log_to_stderr(log_level)
    _check_early(engine)
    note(f"starting {model} with {len(adapters)} adapters; its address follows when it is ready")
    from manylora.server import LoraModule, run  # torch and the web framework are wanted only now

    named = {parse_adapter(text)[0] for text in lora_modules or ()}
    # What was typed and not named was found in a folder; the demo's own were not typed at all.
    modules = [
        LoraModule(name, path, is_required=name in named or name not in typed) for name, path in adapters.items()
    ]
    sys.exit(run(engine, server, modules, builder=builder))


def _check_early(engine: EngineConfig) -> None:
    """Refuse what would fail only after a model has been loaded, for minutes perhaps."""
    from manylora.execution.model.checkpoint import check_checkpoint  # the hub's library is wanted only now

    # Of a model that is simulated nothing but the tokenizer is read.
    simulated = engine.model.tokenizer if engine.simulate is not None else None
    check_checkpoint(simulated or engine.model.model, engine.model.revision)
    find_factory("policy", engine.scheduler.policy, POLICIES)
    find_factory("eviction", engine.adapters.eviction, EVICTION_POLICIES)
    make_predictor(engine.scheduler, engine.seed)
    for option, path in (("--request-log", engine.request_log), ("--step-log", engine.step_log)):
        try:
            if path is not None:
                open(path, "a").close()
        except OSError as error:
            raise ConfigError(f"Got {option} {path!r}, which cannot be written: {error.strerror}") from None


def _log_to_stderr(level: str) -> None:
    if level not in _LOG_LEVELS:
        raise typer.BadParameter(f"Got {level!r}, expected one of {', '.join(_LOG_LEVELS)}", param_hint="--log-level")
    logging.basicConfig(level=level.upper(), format="%(asctime)s %(levelname)s api %(name)s %(message)s")
