"""The command line: a module for each command, one tree of them in ``app.py``.

No other package reads the environment. Commands import torch and the web framework when they run, so that `--help` and
`--version` answer at once.
"""

from __future__ import annotations

import io
import os
import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line: the entry point of `manylora`."""
    _prepare_streams()
    try:
        from manylora.cli.app import main as run

        run()
    except KeyboardInterrupt:  # Ctrl-C during imports, those of the command too: no traceback
        sys.exit(130)


def _prepare_streams() -> None:
    """Let a stream that is closed be empty, and a character that standard output lacks be a question mark."""
    for name, mode in (("stdin", "rb"), ("stdout", "wb"), ("stderr", "wb")):
        if getattr(sys, name) is None:
            number = os.open(os.devnull, os.O_RDWR)  # that of the stream, the lowest that is free
            os.set_inheritable(number, True)
            setattr(sys, name, io.TextIOWrapper(io.FileIO(number, mode)))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
