"""`manylora bench`: measure a server, or our own parts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.markdown import Markdown

from manylora.cli.bench_serve import BenchServeCommand, bench_serve
from manylora.cli.terminal import note, out

__all__ = ["bench_app"]

bench_app = typer.Typer(help="Measure a server, or our own parts against their floors.", no_args_is_help=True)

bench_app.command("serve", cls=BenchServeCommand)(bench_serve)

SaveTo = Annotated[
    str | None, typer.Option("--save", metavar="NAME", help="Write NAME.json and NAME.md.", show_default=False)
]


def save(name: str, report: object, table: str) -> None:
    """Write a report and its table beside each other."""
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
    path.with_suffix(".md").write_text(table)
    note(f"wrote {path.with_suffix('.json')} and {path.with_suffix('.md')}")


@bench_app.command("http")
def bench_http(
    streams: Annotated[int, typer.Option(min=1, help="Concurrent streams.")] = 200,
    steps_per_s: Annotated[
        list[float] | None, typer.Option(help="A pace of the engine. Repeatable; by default a ladder of them.")
    ] = None,
    seconds: Annotated[float, typer.Option(help="Length of each run, were the pace kept.")] = 5.0,
    save_to: SaveTo = None,
) -> None:
    """Measure what HTTP adds to a token's latency, and how many tokens per second one API process can send.

    Server, engine without a model, and client run on this machine; the less else does, the truer the figures.
    """
    from manylora.bench.http import PACES, http_report, http_table, measure_http

    results = measure_http(num_streams=streams, paces=tuple(steps_per_s or PACES), seconds=seconds)
    command = f"manylora bench http --streams {streams}"
    table = http_table(results, command)
    out.print(Markdown(table))
    if save_to is not None:
        save(save_to, http_report(results, command), table)
