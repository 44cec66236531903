"""`manylora tenant key`: a new key for a tenant, and the line for the file of tenants."""

from __future__ import annotations

import hashlib
import sys

import typer

__all__ = ["tenant_app"]

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
