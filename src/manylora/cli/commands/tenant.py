"""`manylora tenant key`, a new key for a tenant; `manylora usage`, the usage of tenants."""

from __future__ import annotations

import csv
import hashlib
import sys
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["tenant_app", "usage"]

tenant_app = typer.Typer(help="Keys of tenants.", no_args_is_help=True)


@tenant_app.callback()
def _group() -> None:
    """Make `key` a sub-command, although it is the only one."""


@tenant_app.command()
def key() -> None:
    """Print a new key, which is stored nowhere, and its digest for the file of [bold]--tenants[/bold].

    [bold]manylora tenant key[/bold]
    """
    from manylora.serving.http.tenants import new_key  # with a web framework, which the help does without

    made = new_key()
    sys.stdout.write(f'{made}\n{{ sha256 = "{hashlib.sha256(made.encode()).hexdigest()}" }}\n')


def usage(
    ledger: Annotated[Path, typer.Argument(metavar="FILE", help="The file of a server's --usage.")],
    by: Annotated[str, typer.Option(metavar="KEYS", help="Some of day, tenant and adapter.")] = "tenant,adapter",
    since: Annotated[str, typer.Option(metavar="DAY", help="The first day, as 2026-01-31.")] = "",
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV.")] = False,
) -> None:
    """Sum up requests, tokens and engine seconds of a server's tenants and adapters; the server may be running.

    [bold]manylora usage usage.db --by tenant --since 2026-01-01 --csv[/bold]
    """
    from manylora.serving.metrics.usage import COLUMNS, read_usage

    keys = tuple(one.strip() for one in by.split(","))
    rows = [(*keys, *COLUMNS), *read_usage(ledger, keys, since)]
    if as_csv:
        csv.writer(sys.stdout, lineterminator="\n").writerows(rows)
        return
    shown = [[f"{one:,.1f}" if isinstance(one, float) else str(one) for one in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    for row in shown:
        padded = zip(row, widths, strict=True)
        cells = [
            one.ljust(width) if place < len(keys) else one.rjust(width) for place, (one, width) in enumerate(padded)
        ]
        sys.stdout.write("  ".join(cells).rstrip() + "\n")
