"""Options of several commands that are not fields of the configuration: the model and adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from manylora.core.errors import ConfigError
from manylora.core.logs import configure_logging
from manylora.demo import demo_adapters, demo_model_path

__all__ = ["DEMO", "LogLevel", "LoraDirs", "LoraModules", "ModelArgument", "log_to_stderr", "panel", "resolve_model"]

DEMO = "demo"
LOG_LEVELS = ("debug", "info", "warning", "error")


def panel(name: str, help: str, *flags: str, **settings: Any) -> Any:
    """Return an option in a panel of the help; ``flags`` and ``settings`` as of ``typer.Option``."""
    return typer.Option(*flags, help=help, rich_help_panel=name, **settings)


ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A Hugging Face checkpoint folder (or a hub name), or [bold]demo[/bold]: the small model in the package.",
        show_default=False,
    ),
]
LoraModules = Annotated[
    list[str] | None,
    panel(
        "Adapters",
        'An adapter by name; also as JSON: \'{"name": "sql", "path": "/adapters/sql"}\'. Repeatable.',
        "--lora-modules",
        metavar="NAME=PATH",
    ),
]
LoraDirs = Annotated[
    list[str] | None,
    panel(
        "Adapters", "Load every adapter folder below DIR, named after itself. Repeatable.", "--lora-dir", metavar="DIR"
    ),
]
LogLevel = Annotated[str, panel("Debugging", "Lowest level of messages to log.", metavar="|".join(LOG_LEVELS))]


def log_to_stderr(level: str, process: str) -> None:
    """Log messages of a level and above, as those of a process."""
    if level not in LOG_LEVELS:
        raise typer.BadParameter(f"Got {level!r}, expected one of {', '.join(LOG_LEVELS)}", param_hint="--log-level")
    configure_logging(level.upper(), process)


def resolve_model(
    model: str, served_model_name: str | None, adapters: dict[str, str]
) -> tuple[str, str | None, dict[str, str]]:
    """Replace `demo` by the demo model's folder, name and, without ``adapters``, its adapters.

    Returns:
        The checkpoint, its name in the API, and adapters' paths by name.

    Raises:
        ConfigError: The model is a path that does not exist.
    """
    if model != DEMO:
        is_path = model.startswith(("/", "./", "../", "~"))
        if is_path and not Path(model).expanduser().is_dir():
            raise ConfigError(f"Got model = {model!r}, and there is no such folder")
        return str(Path(model).expanduser()) if is_path else model, served_model_name, adapters
    adapters = adapters or {name: str(path) for name, path in demo_adapters().items()}
    return str(demo_model_path()), served_model_name or DEMO, adapters
