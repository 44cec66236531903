"""`manylora top`: a live view of a server."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import termios
import time
import tty
from collections import deque
from typing import Annotated, Any, TextIO

import typer
from rich.live import Live

from manylora.cli.views.status_source import Away, Rates, StatusSource, rates_between
from manylora.cli.views.terminal import out
from manylora.cli.views.top_view import NARROW_LINES_ABOVE, frame
from manylora.core.config import ServerConfig
from manylora.serving.metrics.status_report import StatusReport

__all__ = ["top"]

ROWS_ONCE = 20  # adapters in a frame that is printed once
LINES_ABOVE = 22  # lines of a frame besides the adapters
WIDE_COLUMNS, WIDE_LINES = 120, 34  # size of a terminal from which a frame has every figure
RATES_OVER = 5  # intervals over which rates are averaged


def top(
    url: Annotated[
        str, typer.Argument(metavar="URL", help="Address of the server.")
    ] = f"http://{ServerConfig().host}:{ServerConfig().port}",
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two reports.")] = 1.0,
    once: Annotated[
        bool, typer.Option("--once", help="Print one frame and exit; the default without a terminal.")
    ] = False,
    key: Annotated[
        str | None,
        typer.Option(
            envvar=["MANYLORA_ADMIN_KEY", "MANYLORA_API_KEY"],
            help="The server's admin key, or an API key if it has no admin key.",
        ),
    ] = None,
) -> None:
    """Watch a server: memory by owner, adapters by tier, queues, latency, loads and evictions per second.

    Rates need two reports, so they appear after one interval. The key q ends it.

    [bold]manylora top http://127.0.0.1:8000[/bold]
    """
    source = StatusSource(url, key)
    if once or not sys.stdout.isatty():
        before = source.fetch(0)
        time.sleep(interval)
        report = source.fetch(ROWS_ONCE)
        out.print(frame(report, rates_between(before, report), url=source.url, num_rows=ROWS_ONCE))
        return
    try:
        _watch(source, interval)
    except KeyboardInterrupt:
        return


def _watch(source: StatusSource, interval_s: float) -> None:
    """Show frames until ``q`` or an interrupt; retry while the server does not answer."""
    recent: deque[StatusReport] = deque(maxlen=RATES_OVER + 1)
    with Keys(sys.stdin) as keys, Live(console=out, screen=True, auto_refresh=False) as live:
        while True:
            is_narrow = out.width < WIDE_COLUMNS or out.height < WIDE_LINES
            num_rows = max(0, out.height - (NARROW_LINES_ABOVE if is_narrow else LINES_ABOVE))
            problem: str | None = None
            try:
                recent.append(source.fetch(num_rows))
            except Away as error:
                problem = str(error)
            report = recent[-1] if recent else None
            rates = None if problem else _rates(recent)
            shown = frame(report, rates, url=source.url, num_rows=num_rows, problem=problem, is_narrow=is_narrow)
            live.update(shown, refresh=True)
            if keys.pressed(interval_s) in ("q", "Q"):
                return


def _rates(recent: deque[StatusReport]) -> Rates | None:
    """Return the rates since the oldest report of the same engine."""
    newest = recent[-1]
    found = (rates_between(older, newest) for older in recent)
    return next((rates for rates in found if rates is not None), None)


class Keys:
    """Reads the keys that are pressed at a terminal, one at a time and not shown; no keys of another input."""

    def __init__(self, source: TextIO) -> None:
        self._file = source.fileno() if source.isatty() else None
        self._before: list[Any] | None = None

    def __enter__(self) -> Keys:
        """Switch the terminal to single keys; Ctrl-C stays an interrupt."""
        if self._file is not None:
            self._before = termios.tcgetattr(self._file)
            tty.setcbreak(self._file, termios.TCSADRAIN)
        return self

    def __exit__(self, *error: object) -> None:
        """Restore the mode of the terminal."""
        if self._file is not None and self._before is not None:
            with contextlib.suppress(termios.error):  # the terminal is gone
                termios.tcsetattr(self._file, termios.TCSADRAIN, self._before)

    def pressed(self, timeout_s: float) -> str | None:
        """Return the next key that is pressed, or ``None`` if none is pressed for a time in seconds."""
        if self._file is None:
            time.sleep(timeout_s)
            return None
        if not select.select([self._file], [], [], timeout_s)[0]:
            return None
        key = os.read(self._file, 1)
        if not key:  # the terminal is gone
            time.sleep(timeout_s)
        return key.decode("latin-1") or None
