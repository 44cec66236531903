"""The tree of commands. An error prints one line and sets the exit code, without a traceback."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Collection
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from platform import python_version
from typing import Annotated

import typer

from manylora.cli.views.terminal import fail
from manylora.core import __version__
from manylora.core.errors import ManyloraError
from manylora.serving.hosting.engine.startup import TORCH_BUILDER, end_prestarted, prestart_engine

__all__ = ["main", "make_app"]

_DEBUG = "MANYLORA_DEBUG"

_PANELS = {
    "Serve": {
        "demo": "demo:demo",
        "serve": "serve:serve",
        "route": "route:route",
        "top": "top:top",
        "generate": "generate:generate",
        "tenant": "tenant:tenant_app",
        "usage": "tenant:usage",
        "check": "check:check",
        "check-vllm": "check_vllm:check_vllm",
    },
    "Plan": {
        "simulate": "simulate:simulate_command",
        "compare": "simulate:compare_command",
        "plan": "plan:plan_command",
        "calibrate": "calibrate:calibrate",
    },
    "Measure": {
        "bench": "bench:bench_app",
        "experiment": "experiment:experiment_app",
    },
    "Isolated functions": {
        "functions": "functions:functions_app",
        "backbone": "functions:backbone",
    },
}
"""Commands by panel of the help and by name: a module below ``commands``, and in it a function or a tree."""

_COMMANDS = {name: (panel, place) for panel, commands in _PANELS.items() for name, place in commands.items()}


def make_app(names: Collection[str] = tuple(_COMMANDS)) -> typer.Typer:
    """Return the tree of these commands, and import no others: a server does not wait for the imports of a simulator.

    Of several commands, those are left out whose libraries are not installed; one alone raises ``ModuleNotFoundError``.
    """
    app = typer.Typer(
        name="manylora",
        help="Serve many LoRA adapters of one base model from shared hardware.",
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_options)
    for name in names:
        panel, place = _COMMANDS[name]
        module, _, attribute = place.partition(":")
        try:
            found = getattr(import_module(f"manylora.cli.commands.{module}"), attribute)
        except ModuleNotFoundError:
            if len(names) == 1:
                raise
            continue
        if isinstance(found, typer.Typer):
            app.add_typer(found, name=name, rich_help_panel=panel)
        else:
            app.command(name=name, cls=getattr(found, "command_class", None), rich_help_panel=panel)(found)
    app.command(name="version", rich_help_panel="Serve")(show_version)
    return app


_OTHER_ENGINES = """
    -h --help --builder --config --device --devices --in-process --max-replicas --replicas --simulate
"""
_NO_EARLY_ENGINE = frozenset(_OTHER_ENGINES.split())
"""Options of `serve` with which the first engine may differ, or there is none."""


def show_version() -> None:
    """Print the versions that a bug report needs."""
    lines = [f"manylora {__version__}", f"python {python_version()}"]
    for package in ("torch", "transformers", "tokenizers", "numba", "llguidance"):
        try:
            lines.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            lines.append(f"{package} not installed")
    typer.echo("\n".join(lines))


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


def _show_tracebacks(wanted: bool) -> None:
    if wanted:
        os.environ[_DEBUG] = "1"


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


def _usage_error(error: Exception) -> str | None:
    """Return the line for a wrong command line, empty if the help was printed; ``None`` for another error.

    typer brings a copy of click, so its errors are known by what they have.
    """
    context, describe = getattr(error, "ctx", None), getattr(error, "format_message", None)
    if describe is None:
        return None
    line = str(describe()).rstrip(".")
    return f"{line} (see `{context.command_path} --help`)" if line and context is not None else line


def main() -> None:
    """Run the command line.

    Exit codes: 0 success, 1 failure, 2 invalid options, model or adapter, 130 interrupted.
    """
    asked = next((arg for arg in sys.argv[1:] if not arg.startswith("-")), "")
    is_simple = not _NO_EARLY_ENGINE.intersection(arg.partition("=")[0] for arg in sys.argv)
    if asked == "serve" and is_simple and find_spec("torch") is not None:
        prestart_engine(TORCH_BUILDER)
    names = (asked,) if asked in _COMMANDS else () if asked == "version" else tuple(_COMMANDS)
    try:
        # typer returns the code of an exit that a command asked for; the commands themselves return nothing.
        sys.exit(make_app(names)(standalone_mode=False) or 0)
    except Exception as error:
        if isinstance(error, typer.Abort):
            sys.exit(1)
        if (line := _usage_error(error)) is not None:
            if line:
                fail(line, code=2)
            sys.exit(2)
        if os.environ.get(_DEBUG):
            raise
        if isinstance(error, ManyloraError):
            fail(str(error), code=2 if error.status < 500 else 1)
        if isinstance(error, ModuleNotFoundError) and not (error.name or "manylora").startswith("manylora"):
            what = f"`manylora {asked}` needs {error.name}, which is not installed"
            fail(f"{what}: manylora-light leaves it out, manylora brings it", code=1)
        if isinstance(error, OSError) and error.filename is not None:  # a path of an option, or below one
            fail(f"{error.filename}: {error.strerror}", code=2)
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            fail(f"the output is incomplete: {error.strerror}", code=1)
        notes = "".join(f", {note}" for note in getattr(error, "__notes__", ()))  # the plug-in that raised it
        fail(f"{type(error).__name__}: {error}{notes} (run `manylora --debug ...` to see where)", code=1)
    finally:
        end_prestarted()
