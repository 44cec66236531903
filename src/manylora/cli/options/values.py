"""Options that several commands have and no configuration, and values on a command line: sizes, addresses, adapters."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer

from manylora.core.adapters.sources import is_url
from manylora.core.errors import ConfigError
from manylora.core.logs import configure_logging
from manylora.demo import demo_adapters, demo_model_path

__all__ = [
    "DEMO",
    "LogLevel",
    "LoraDirs",
    "LoraModules",
    "ModelArgument",
    "check_output",
    "command_line",
    "log_to_stderr",
    "panel",
    "parse_adapter",
    "parse_address",
    "parse_cache_dir",
    "parse_setting",
    "parse_size",
    "read_template",
    "repeat_option",
    "resolve_model",
]

DEMO = "demo"
LOG_LEVELS = ("debug", "info", "warning", "error")


def panel(name: str, help: str, *flags: str, **settings: Any) -> Any:
    """Return an option in a panel of the help; ``flags`` and ``settings`` as for ``typer.Option``."""
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

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Return the bytes of `2GiB`, `512MiB`, `1.5GB`, `4g` (as `4GiB`) or a number; ``ConfigError`` otherwise."""
    match = _SIZE.fullmatch(text.strip())
    if not match:
        raise ConfigError(f"Got a size of {text!r}, expected something like 2GiB, 512MiB or a number of bytes")
    number, prefix, binary = match.groups()
    is_decimal = bool(prefix) and not binary and text.strip().lower().endswith("b")
    base = 1000 if is_decimal else 1024
    return int(float(number) * base ** " kmgt".index(prefix.lower() or " "))


def parse_setting(flag: str, text: str) -> tuple[str, str]:
    """Return the parts of `KEY=VALUE`; ``ConfigError`` without a key or `=`."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"Got {flag} {text!r}, expected KEY=VALUE")
    return key.strip(), value.strip()


def parse_address(url: str) -> str:
    """Return the base URL of a server from a URL, `host:port`, or either with `/v1`; ``ConfigError`` otherwise."""
    whole = url if "://" in url else f"http://{url}"
    try:
        parts = urlsplit(whole)
        is_address = parts.scheme in ("http", "https") and (parts.hostname or "").encode("idna") and parts.port != 0
    except ValueError:
        is_address = False
    if not is_address or not whole.isascii() or any(character.isspace() for character in whole):
        raise ConfigError(f"Got URL = {url!r}, expected something like http://127.0.0.1:8000")
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1')}"


def parse_adapter(text: str) -> tuple[str, str]:
    """Return name and path of `name=path` or of the JSON of vLLM's `--lora-modules`; ``ConfigError`` otherwise."""
    if text.lstrip().startswith("{"):
        try:
            fields = json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigError(f"Got --lora-modules {text!r}, which is not JSON: {error}") from None
        name, path = fields.get("name"), fields.get("path")
        unknown = sorted(fields.keys() - {"name", "path", "base_model_name"})
        if unknown:
            raise ConfigError(f"Got --lora-modules {text!r} with unknown {unknown}, expected name and path")
    else:
        name, _, path = text.partition("=")
    if not (isinstance(name, str) and name.strip() and isinstance(path, str) and path.strip()):
        raise ConfigError(f'Got --lora-modules {text!r}, expected name=path or {{"name": ..., "path": ...}}')
    return name, path if is_url(path) else str(Path(path).expanduser())


def read_template(text: str | None) -> str | None:
    """Return the chat template of ``--chat-template``, which is a file or the template; ``ConfigError`` if neither."""
    if text is None or "{%" in text or "{{" in text:
        return text
    try:
        return Path(text).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ConfigError(f"Got --chat-template {text[:200]!r}, a file that cannot be read: {reason}") from None


def parse_cache_dir(text: str | None) -> str | None:
    """Return the folder of ``--cache-dir``: the user's own without a value, ``None`` for ``off``."""
    if text is None:
        caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        return os.path.join(os.path.expanduser(caches), "manylora")
    return None if text == "off" else os.path.expanduser(text)


def repeat_option(
    args: Iterable[str], names: Collection[str], is_value: Callable[[str], bool] = lambda arg: not arg.startswith("-")
) -> list[str]:
    """Repeat an option of ``names`` in a command line that was given once before several values."""
    spread: list[str] = []
    option: str | None = None
    for arg in args:
        if option is not None and is_value(arg):
            if spread[-1] != option:
                spread.append(option)
        else:
            option = arg if arg in names else None
        spread.append(arg)
    return spread


def check_output(flag: str, path: Path | None, *, is_folder: bool = False) -> None:
    """Raise ``ConfigError`` if a file cannot be written, or a folder not made: before a run that may take minutes."""
    if path is None:
        return
    if is_folder:
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"Got {flag} {str(path)!r}, which cannot be made: {error.strerror}") from None
    elif path.is_dir():
        raise ConfigError(f"Got {flag} {str(path)!r}, which is a folder")
    elif not path.parent.is_dir():
        raise ConfigError(f"Got {flag} {str(path)!r}, and there is no folder {path.parent}")


def command_line() -> str:
    """Return the command as it was given, for files that are shown to others: without the value of `--api-key`."""
    words = ["manylora", *sys.argv[1:]]
    for place, word in enumerate(words):
        if words[place - 1] == "--api-key":
            words[place] = "KEY"
        elif word.startswith("--api-key="):
            words[place] = "--api-key=KEY"
    return shlex.join(words)


def log_to_stderr(level: str, process: str) -> None:
    """Log messages of a level and above, under the name of a process."""
    if level not in LOG_LEVELS:
        raise typer.BadParameter(f"Got {level!r}, expected one of {', '.join(LOG_LEVELS)}", param_hint="--log-level")
    configure_logging(level.upper(), process)


def resolve_model(
    model: str, served_model_name: str | None, adapters: dict[str, str]
) -> tuple[str, str | None, dict[str, str]]:
    """Replace `demo` by the demo model's folder, name and, without ``adapters``, its adapters.

    Return the checkpoint, its name in the API, and adapters' paths by name. ``ConfigError`` if the model is a path that
    does not exist.
    """
    if model != DEMO:
        is_path = model.startswith(("/", "./", "../", "~"))
        if is_path and not Path(model).expanduser().is_dir():
            raise ConfigError(f"Got model = {model!r}, and there is no such folder")
        return str(Path(model).expanduser()) if is_path else model, served_model_name, adapters
    adapters = adapters or {name: str(path) for name, path in demo_adapters().items()}
    return str(demo_model_path()), served_model_name or DEMO, adapters
