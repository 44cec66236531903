"""Output of commands: results on standard output, remarks and errors on standard error."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NoReturn

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from manylora.core.logs import escape

__all__ = ["fail", "is_interactive", "note", "notes", "out", "progress_bar"]

PLAIN_WIDTH = 160  # columns without a terminal: a log, a pipe, a file

# Without markup: names, paths and errors of others may hold brackets.
WIDTH = None if sys.stdout.isatty() or "COLUMNS" in os.environ else PLAIN_WIDTH
out = Console(markup=False, highlight=False, width=WIDTH)
notes = Console(markup=False, highlight=False, stderr=True)


def note(message: str) -> None:
    """Print a remark on standard error."""
    notes.print(Text(message, style="dim"), soft_wrap=True)


def fail(message: str, *, code: int) -> NoReturn:
    """Print an error on one line, and exit with ``code``; names in it may hold a tenant's control characters."""
    line = escape(" ".join(message.splitlines()))
    notes.print(Text.assemble(("error: ", "bold red"), (line, "red")), soft_wrap=True)
    sys.exit(code)


@contextmanager
def progress_bar(label: str, total: float) -> Iterator[Callable[..., None]]:
    """Show a progress bar on a terminal; yield a function with the arguments of ``rich.Progress.update``."""
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn())
    times = (TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, *times, console=notes, transient=True, disable=not notes.is_terminal) as progress:
        yield partial(progress.update, progress.add_task(label, total=total))


def is_interactive() -> bool:
    """Whether standard input and standard output are terminals."""
    return sys.stdin.isatty() and sys.stdout.isatty()
