"""How commands with many options write them: grouped, with the names that can be chosen."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import typer

__all__ = ["SCENARIO_SETS", "SCENARIO_TRACES", "names", "names_or_own", "panel"]

# Of every command that takes a scenario.
SCENARIO_TRACES: Any = typer.Option(metavar="DIR", help="Folder of the traces that the scenario names.")
SCENARIO_SETS: Any = typer.Option(
    "--set",
    metavar="KEY=VALUE",
    help="Anything a scenario can say, such as workload.lengths.scale=0.5. Repeatable.",
)


def panel(name: str, help: str, *flags: str, **settings: Any) -> Any:
    """Return an option that stands in a panel of its command's help.

    Args:
        name: The panel's.
        help: What the option does.
        flags: How it is written, where that does not follow from its parameter's name.
        settings: As ``typer.Option`` takes them.
    """
    return typer.Option(*flags, help=help, rich_help_panel=name, **settings)


def names(choices: Iterable[str]) -> str:
    """Return what can be chosen, in order, as words of a help text."""
    return ", ".join(sorted(choices))


def names_or_own(choices: Iterable[str]) -> str:
    """Return what can be chosen where something of one's own can be as well."""
    return f"{names(choices)}; or your own, as module:Name or file.py:Name"
