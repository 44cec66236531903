"""The command line: a module for each command, one tree of them in ``app.py``.

No other package reads the environment. Commands import torch and the web framework when they run, so that `--help` and
`--version` answer at once.
"""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line: the entry point of `manylora`."""
    try:
        from manylora.cli.app import main as run
    except KeyboardInterrupt:  # Ctrl-C during imports: no traceback
        sys.exit(130)
    run()
