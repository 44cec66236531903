"""`manylora bench`: benchmarks of a server, and of manylora's own parts."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.markdown import Markdown

from manylora.cli.commands.bench_serve import BenchServeCommand, bench_serve
from manylora.cli.options.adapter_folders import collect_adapters
from manylora.cli.options.fields import Chosen, flags_of, with_flags
from manylora.cli.options.shared import LoraDirs, LoraModules, ModelArgument, resolve_model
from manylora.cli.views.terminal import note, notes, out
from manylora.core.config import AdapterConfig, EngineConfig, MemoryConfig, ModelConfig
from manylora.core.errors import ConfigError
from manylora.core.plugins import find_factory
from manylora.core.scheduling import POLICIES
from manylora.lab.measure.tables import FigureTable

__all__ = ["bench_app"]

bench_app = typer.Typer(
    help="Benchmark a server, or manylora's parts against their lower bounds.", no_args_is_help=True
)

bench_app.command("serve", cls=BenchServeCommand)(bench_serve)

SaveTo = Annotated[
    str | None, typer.Option("--save", metavar="NAME", help="Write NAME.json and NAME.md.", show_default=False)
]

Rounds = Annotated[int, typer.Option(min=1, help="Runs of each case; a result that is written needs five.")]


def save(name: str, report: object, table: str, refused: str | None = None) -> None:
    """Write a report as NAME.json and its table as NAME.md, unless there is a reason to refuse it.

    Raises:
        ConfigError: It is not worth keeping.
    """
    if refused is not None:
        raise ConfigError(f"Nothing was written: {refused}")
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
    path.with_suffix(".md").write_text(table)
    note(f"wrote {path.with_suffix('.json')} and {path.with_suffix('.md')}")


@bench_app.command("http")
def bench_http(
    streams: Annotated[int, typer.Option(min=1, help="Concurrent streams.")] = 200,
    steps_per_s: Annotated[
        list[float] | None, typer.Option(help="Steps per second of the engine. Repeatable; by default 20 to 1000.")
    ] = None,
    seconds: Annotated[float, typer.Option(help="Length of each run at the full rate.")] = 5.0,
    rounds: Rounds = 1,
    save_to: SaveTo = None,
) -> None:
    """Measure the latency that HTTP adds to a token, and the tokens per second of one API process.

    Server, an engine without a model, and client run on this machine, which should be otherwise idle.
    """
    from manylora.lab.bench.http import RATES, http_report, http_table, measure_http
    from manylora.lab.bench.rounds import Others, reason_to_refuse

    others = Others()
    results = measure_http(num_streams=streams, rates=tuple(steps_per_s or RATES), seconds=seconds, rounds=rounds)
    busy_share = others.share()
    command = f"manylora bench http --streams {streams} --rounds {rounds}"
    table = http_table(results, command, busy_share)
    out.print(Markdown(table))
    if save_to is not None:
        save(save_to, http_report(results, command, busy_share), table, reason_to_refuse(rounds, busy_share))


@bench_app.command("core")
def bench_core(
    policy: Annotated[
        list[str] | None, typer.Option(metavar="|".join(sorted(POLICIES)), help="Repeatable; by default all.")
    ] = None,
    eviction: Annotated[str, typer.Option(help="Eviction policy of adapters.")] = AdapterConfig().eviction,
    steps: Annotated[int, typer.Option(min=10, help="Steps timed at each scale.")] = 1000,
    rounds: Rounds = 1,
    quick: Annotated[bool, typer.Option("--quick", help="Only the smallest scale.")] = False,
    save_to: SaveTo = None,
) -> None:
    """Measure the time to decide a step: up to 256 requests running, 10,000 waiting, 10,000 adapters.

    The engine's core runs on an executor that does nothing; no model is needed.
    """
    from manylora.lab.bench.core import SCALES, decision_table, measure_decision
    from manylora.lab.bench.rounds import Others, in_turns, reason_to_refuse

    for name in policy or ():
        find_factory("policy", name, POLICIES)  # refuse a wrong name before the first run
    costs = []
    others = Others()
    for scale in SCALES[:1] if quick else SCALES:
        for _, name in in_turns(policy or sorted(POLICIES), rounds, num_warm_up=0):
            with notes.status(f"{name}, {scale.running} running, {scale.waiting:,} waiting"):
                costs.append(measure_decision(name, eviction, scale, num_steps=steps))
    busy_share = others.share()
    command = f"manylora bench core --rounds {rounds}"
    table = decision_table(costs, command=command, eviction=eviction, num_steps=steps, busy_share=busy_share)
    out.print(Markdown(table))
    if save_to is not None:
        report = {"command": command, "busy_share": busy_share, "costs": [asdict(cost) for cost in costs]}
        save(save_to, report, table, reason_to_refuse(rounds, busy_share))


@bench_app.command("offline")
@with_flags(flags_of(ModelConfig, EngineConfig, MemoryConfig, only=("seed", "dtype", "device", "memory_bytes")))
def bench_offline(
    model: ModelArgument,
    chosen: Chosen,
    lora_modules: LoraModules = None,
    lora_dir: LoraDirs = None,
    num_prompts: Annotated[int, typer.Option(min=1, help="Requests a round.")] = 32,
    random_input_len: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 128,
    random_output_len: Annotated[int, typer.Option(min=2, help="Tokens of an answer.")] = 64,
    rounds: Annotated[int, typer.Option(min=1, help="Measured rounds, after one that warms up.")] = 5,
    against_peers: Annotated[
        bool, typer.Option("--against-peers", help="Compare with transformers and PEFT, in turn.")
    ] = False,
    save_to: SaveTo = None,
) -> None:
    """Measure tokens per second without a server: of the base, and of all adapters mixed.

    [bold]manylora bench offline demo --against-peers[/bold]
    """
    import torch

    from manylora.lab.bench.machine import machine
    from manylora.lab.bench.offline import draw_requests, measure_offline
    from manylora.serving.offline import Engine

    checkpoint, _, adapters = resolve_model(model, None, collect_adapters(lora_modules or (), lora_dir or ()))
    settings = chosen.all()
    device, seed = settings["device"], settings.pop("seed")  # the seed is for the requests
    place = device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    with Engine(checkpoint, adapters=adapters, prefix_caching=False, **settings) as engine:
        asked = draw_requests(
            num_prompts, random_input_len, random_output_len, vocab_size=engine.tokenizer.vocab_size, seed=seed
        )
        result = measure_offline(
            engine,
            Path(checkpoint),
            asked,
            adapters={name: Path(path) for name, path in adapters.items()},
            rounds=rounds,
            with_peers=against_peers,
            device=place,
            on_round=lambda name, number, took: note(f"round {number + 1} {name}: {took:.2f} s"),
        )
    rows = [(name, f"{rate:,.1f}") for name, rate in result.tokens_per_s.items()]
    rows += [(name, f"x {ratio}") for name, ratio in result.ratios.items()]
    title = f"{num_prompts} requests of {random_input_len} tokens in and {random_output_len} out on {place}"
    table = FigureTable(title=title, columns=("", "tokens/s"), rows=tuple(rows))
    out.print(table.rich())
    if save_to is not None:
        command = f"manylora bench offline {model}"
        save(save_to, {"command": command, "machine": machine(), **asdict(result)}, table.markdown() + "\n")


@bench_app.command("kernels")
def bench_kernels(
    adapters: Annotated[int, typer.Option(min=1, help="Adapters in the step.")] = 32,
    rank: Annotated[
        list[int] | None, typer.Option(min=1, help="Ranks, assigned in turn. Repeatable; by default 8 to 128.")
    ] = None,
    rows: Annotated[int, typer.Option(min=1, help="Rows of each adapter: 1 is decoding.")] = 1,
    hidden_size: Annotated[int, typer.Option(min=64, help="Width of the model.")] = 768,
    layers: Annotated[int, typer.Option(min=1, help="Layers of the model.")] = 10,
    rounds: Annotated[int, typer.Option(min=1, help="Measured rounds, after one that warms up.")] = 5,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    save_to: SaveTo = None,
) -> None:
    """Measure the time that adapters add to a decode step, per kernel, against the time to read their weights.

    For kernels that run on any device; Triton kernels are measured by bench/gpu.sh.
    """
    from manylora.lab.bench.kernels import kernel_table, measure_kernels
    from manylora.lab.bench.machine import machine
    from manylora.lab.catalog.dims import ModelDims
    from manylora.lab.catalog.models import base_shape

    base = base_shape(
        ModelDims(
            name="synthetic",
            hidden_size=hidden_size,
            num_layers=layers,
            num_heads=max(1, hidden_size // 64),
            num_kv_heads=max(1, hidden_size // 64),
            head_dim=64,
            intermediate_size=hidden_size * 8 // 3,
            vocab_size=1000,
            max_model_len=2048,
            dtype="float32" if device == "cpu" else "bfloat16",
        )
    )
    ranks = tuple(rank or (8, 16, 32, 64, 128))
    result = measure_kernels(base, num_adapters=adapters, ranks=ranks, rows_each=rows, rounds=rounds, device=device)
    title = (
        f"{adapters} adapters of rank {'/'.join(map(str, ranks))}, {rows} row each, {layers} layers of {hidden_size}: "
        f"{result.num_bytes / 1e6:,.0f} MB of weights a step"
    )
    table = kernel_table(result, title)
    out.print(table.rich())
    if save_to is not None:
        report = {"command": f"manylora bench kernels --adapters {adapters}", "machine": machine(), **asdict(result)}
        save(save_to, report, table.markdown() + "\n")
