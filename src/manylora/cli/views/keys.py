"""Keys that are pressed at a terminal, one at a time and not shown."""

from __future__ import annotations

import contextlib
import os
import select
import termios
import time
import tty
from types import TracebackType
from typing import Any, TextIO

__all__ = ["Keys"]


class Keys:
    """Reads keys of a terminal while entered; of another input none.

    Args:
        source: Standard input.
    """

    def __init__(self, source: TextIO) -> None:
        self._file = source.fileno() if source.isatty() else None
        self._before: list[Any] | None = None

    def __enter__(self) -> Keys:
        """Switch the terminal to single keys; Ctrl-C stays an interrupt."""
        if self._file is not None:
            self._before = termios.tcgetattr(self._file)
            tty.setcbreak(self._file, termios.TCSADRAIN)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Switch the terminal back."""
        if self._file is not None and self._before is not None:
            with contextlib.suppress(termios.error):  # the terminal is gone
                termios.tcsetattr(self._file, termios.TCSADRAIN, self._before)

    def pressed(self, timeout_s: float) -> str | None:
        """Return the next key, or ``None`` after a time in seconds without one."""
        if self._file is None:
            time.sleep(timeout_s)
            return None
        if not select.select([self._file], [], [], timeout_s)[0]:
            return None
        key = os.read(self._file, 1)
        if not key:  # the terminal is gone
            time.sleep(timeout_s)
        return key.decode("latin-1") or None
