"""The command line: a module for each command, one tree of them in ``app.py``.

The only place that reads the environment. Commands import what they need when they run, so that `--help` and
`--version` answer at once, without torch.
"""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line: the entry point of the `manylora` program; see ``app.py``."""
    try:
        from manylora.cli.app import main as run
    except KeyboardInterrupt:  # Ctrl-C before anything has begun is no reason for a traceback
        sys.exit(130)
    run()
