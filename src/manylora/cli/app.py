"""The tree of commands. An error prints one line and sets the exit code, without a traceback."""

from __future__ import annotations

import errno
import os
from importlib.metadata import PackageNotFoundError, version
from platform import python_version
from typing import Annotated

import typer

from manylora.cli.commands.adapters import adapters_app
from manylora.cli.commands.backbone import backbone
from manylora.cli.commands.bench import bench_app
from manylora.cli.commands.calibrate import calibrate
from manylora.cli.commands.demo import demo
from manylora.cli.commands.experiment import experiment_app
from manylora.cli.commands.functions import functions_app
from manylora.cli.commands.generate import generate
from manylora.cli.commands.plan import plan_command
from manylora.cli.commands.route import route
from manylora.cli.commands.serve import ServeCommand, serve
from manylora.cli.commands.simulate import simulate_command
from manylora.cli.commands.top import top
from manylora.cli.views.terminal import fail
from manylora.errors import ManyloraError

__all__ = ["app", "main"]

_DEBUG = "MANYLORA_DEBUG"

app = typer.Typer(
    name="manylora",
    help="Serve many LoRA adapters of one base model from shared hardware.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(cls=ServeCommand)(serve)
app.command()(route)
app.command()(generate)
app.command()(backbone)
app.add_typer(functions_app, name="functions")
app.add_typer(adapters_app, name="adapters")
app.command()(calibrate)
app.command()(top)
app.command(name="simulate")(simulate_command)
app.command(name="plan")(plan_command)
app.add_typer(experiment_app, name="experiment")
app.add_typer(bench_app, name="bench")
app.command()(demo)


@app.command(name="version")
def show_version() -> None:
    """Print the versions that a bug report needs."""
    lines = [f"manylora {version('manylora')}", f"python {python_version()}"]
    for package in ("torch", "transformers", "tokenizers", "numba", "llguidance"):
        try:
            lines.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            lines.append(f"{package} not installed")
    typer.echo("\n".join(lines))


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(version("manylora"))
        raise typer.Exit


def _show_tracebacks(wanted: bool) -> None:
    if wanted:
        os.environ[_DEBUG] = "1"


@app.callback()
def _options(
    _debug: Annotated[
        bool,
        typer.Option("--debug", callback=_show_tracebacks, help=f"Show the traceback of an error; so does {_DEBUG}=1."),
    ] = False,
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Define the options that come before the command."""


def main() -> None:
    """Run the command line.

    Exit codes: 0 success, 1 failure, 2 invalid options, model or adapter, 130 interrupted.
    """
    try:
        app()
    except Exception as error:
        if os.environ.get(_DEBUG):
            raise
        if isinstance(error, ManyloraError):
            fail(str(error), code=2 if error.status < 500 else 1)
        if isinstance(error, OSError) and error.filename is not None:  # a path of an option, or below one
            fail(f"{error.filename}: {error.strerror}", code=2)
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            fail(f"the output is incomplete: {error.strerror}", code=1)
        fail(f"{type(error).__name__}: {error} (run `manylora --debug ...` to see where)", code=1)
