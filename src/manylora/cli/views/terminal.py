"""What every command says to a person: answers on standard output, everything else on standard error."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from rich.console import Console
from rich.text import Text

__all__ = ["fail", "is_interactive", "note", "notes", "out"]

PLAIN_WIDTH = 120
"""Columns where there is no terminal to ask: a log, a pipe, a file."""

out = Console(highlight=False, width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else PLAIN_WIDTH)
notes = Console(stderr=True, highlight=False)


def note(message: str) -> None:
    """Print a remark that is no part of the answer."""
    notes.print(Text(message, style="dim"), soft_wrap=True)


def fail(message: str, *, code: int) -> NoReturn:
    """Print one line that says what is wrong, and leave.

    Args:
        message: The cause, with the value and the place.
        code: Exit code of the process.
    """
    notes.print(Text.assemble(("error: ", "bold red"), (message, "red")), soft_wrap=True)
    sys.exit(code)


def is_interactive() -> bool:
    """Whether a person sits at both ends: standard input and standard output are terminals."""
    return sys.stdin.isatty() and sys.stdout.isatty()
