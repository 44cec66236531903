"""`manylora bench`: benchmarks that users run: of a server, of an engine, and of kernels on their own machine."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from manylora.cli.commands.bench_serve import BenchServeCommand, bench_serve
from manylora.cli.options.adapter_folders import collect_adapters
from manylora.cli.options.fields import Chosen, flags_of, with_flags
from manylora.cli.options.values import LoraDirs, LoraModules, ModelArgument, command_line, resolve_model
from manylora.cli.views.terminal import note, out
from manylora.core.config import EngineConfig, MemoryConfig, ModelConfig
from manylora.core.errors import EngineDead
from manylora.lab.measure.tables import FigureTable

__all__ = ["bench_app"]

bench_app = typer.Typer(help="Benchmark a server, an engine, or the kernels on this machine.", no_args_is_help=True)

bench_app.command("serve", cls=BenchServeCommand)(bench_serve)

LEAST_TOKEN = 10  # ids below are left out: many vocabularies begin with tokens that mean something to the engine

SaveTo = Annotated[
    str | None, typer.Option("--save", metavar="NAME", help="Write NAME.json and NAME.md.", show_default=False)
]

Rounds = Annotated[int, typer.Option(min=1, help="Measured rounds, after one that warms up.")]


def save(name: str, report: object, table: FigureTable) -> None:
    """Write a report as NAME.json and its table as NAME.md."""
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(f"{name}.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    Path(f"{name}.md").write_text(table.markdown() + "\n", encoding="utf-8")
    note(f"wrote {name}.json and {name}.md")


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
    rounds: Rounds = 5,
    save_to: SaveTo = None,
) -> None:
    """Measure tokens per second without a server: of the base, and of all adapters mixed.

    [bold]manylora bench offline demo[/bold]
    """
    import numpy as np

    from manylora.core.types import SamplingParams
    from manylora.lab.bench.rounds import machine, time_in_turns
    from manylora.serving.offline import Engine

    checkpoint, _, adapters = resolve_model(model, None, collect_adapters(lora_modules or (), lora_dir or ()))
    settings = chosen.all(ModelConfig, EngineConfig, MemoryConfig)
    rng = np.random.default_rng(settings.pop("seed"))
    sampling = SamplingParams(temperature=0.0, max_tokens=random_output_len, ignore_eos=True)
    # Without a prefix cache: a second round would find its prompts in it.
    with Engine(checkpoint, adapters=adapters, prefix_caching=False, **settings) as engine:
        vocab_size = engine.tokenizer.vocab_size
        shape = num_prompts, random_input_len
        prompts = rng.integers(min(LEAST_TOKEN, vocab_size - 1), vocab_size, shape).tolist()

        def answer(names: list[str] | None) -> None:
            who = None if names is None else [names[index % len(names)] for index in range(num_prompts)]
            answers = engine.generate(prompts, adapter=who, sampling=sampling)
            failed = next((one.error for one in answers if one.error is not None), None)
            if failed is not None:
                raise EngineDead(f"The engine gave up a request: {failed}")

        systems = {"base": lambda: answer(None)}
        if adapters:
            systems["adapters"] = lambda: answer(list(adapters))
        seconds = time_in_turns(
            systems, rounds, on_round=lambda name, number, took: note(f"round {number + 1} {name}: {took:.2f} s")
        )
    num_tokens = num_prompts * random_output_len
    rates = {name: num_tokens / statistics.median(times) for name, times in seconds.items()}
    title = f"{num_prompts} requests of {random_input_len} tokens in and {random_output_len} out"
    rows = tuple((name, f"{rate:,.1f}") for name, rate in rates.items())
    table = FigureTable(title=title, columns=("", "tokens/s"), rows=rows)
    out.print(table.rich())
    if save_to is not None:
        report = {"num_tokens": num_tokens, "tokens_per_s": rates, "seconds": seconds}
        save(save_to, {"command": command_line(), "machine": machine(), **report}, table)


@bench_app.command("kernels")
def bench_kernels(
    adapters: Annotated[int, typer.Option(min=1, help="Adapters in the step.")] = 32,
    rank: Annotated[
        list[int] | None, typer.Option(min=1, help="Ranks, assigned in turn. Repeatable; by default 8 to 128.")
    ] = None,
    rows: Annotated[int, typer.Option(min=1, help="Rows of each adapter: 1 is decoding.")] = 1,
    hidden_size: Annotated[int, typer.Option(min=64, help="Width of the model.")] = 768,
    layers: Annotated[int, typer.Option(min=1, help="Layers of the model.")] = 10,
    rounds: Rounds = 5,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    save_to: SaveTo = None,
) -> None:
    """Measure the time that adapters add to a decode step, per kernel, against the time to read their weights.

    For kernels that run on any device; Triton kernels are measured by bench/gpu.sh.
    """
    from manylora.lab.bench.kernels import kernel_table, measure_kernels
    from manylora.lab.bench.rounds import machine
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
        report = {"command": command_line(), "machine": machine(), **asdict(result)}
        save(save_to, report, table)
