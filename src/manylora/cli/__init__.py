"""The command line: `manylora serve`, `generate`, `adapters inspect`, `demo`, `version`.

The only place that reads the environment. Commands import what they need when they run, so that `--help` and
`--version` answer at once, without torch.
"""

from __future__ import annotations

from manylora.cli.app import main

__all__ = ["main"]
