"""`manylora bench`: benchmarks that users run: of a server, and of an engine on their own machine."""

from __future__ import annotations

import json
import statistics
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

bench_app = typer.Typer(help="Benchmark a server, or an engine on this machine.", no_args_is_help=True)

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
