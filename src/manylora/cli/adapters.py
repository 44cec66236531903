"""`manylora adapters inspect`: what is in an adapter's folder, and whether it fits a model."""

from __future__ import annotations

import typer

__all__ = ["adapters_app"]

adapters_app = typer.Typer(help="Look at adapters.", no_args_is_help=True)
