"""`--config FILE`: options of a command in TOML, named as its flags or as fields of the configuration.

::

    model = "/models/llama"
    max-num-seqs = 64
    lora-dir = ["/adapters"]

    [lora-modules]
    sql = "/adapters/sql-v2"

Precedence: the command line, then the environment, the file, the defaults.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import typer

from manylora.cli.options.fields import Chosen, Flag
from manylora.core.errors import ConfigError
from manylora.core.options import nearest

__all__ = ["chosen_again", "config_option", "read_config_file"]

GO_BEFORE = ("COMMANDLINE", "ENVIRONMENT")  # sources of options that go before a file

Value = str | int | float | bool | list[str]


def config_option(flags: Iterable[Flag], help: str) -> Any:
    """Return the option ``--config`` of a command with these flags: the file's values become defaults."""
    flags = tuple(flags)

    def use(context: typer.Context, path: str | None) -> str | None:
        if path is not None:
            context.default_map = _defaults(context, path, flags)
        return path

    return typer.Option(metavar="FILE", help=help, is_eager=True, callback=use)


def chosen_again(context: typer.Context, path: str, flags: Iterable[Flag]) -> Chosen:
    """Return the options of a command that runs, with its configuration file read anew.

    ``ConfigError`` as for ``read_config_file``, or if a value is not of its option's type.
    """
    flags = tuple(flags)
    context.default_map = _defaults(context, path, flags)
    params = {param.name: param for param in context.command.params}

    def value_of(flag: Flag) -> Any:
        source = context.get_parameter_source(flag.name)
        if source is not None and source.name in GO_BEFORE:
            return flag.read(context.params[flag.name])
        param = params[flag.name]
        try:
            return flag.read(param.process_value(context, param.get_default(context)))
        except typer.BadParameter as error:
            raise ConfigError(f"Got a wrong {flag.name} in {path}: {error.format_message()}") from None

    return Chosen({flag: value_of(flag) for flag in flags})


def _defaults(context: typer.Context, path: str, flags: Iterable[Flag]) -> dict[str, Value]:
    params = [param for param in context.command.params if param.name not in (None, "config", "help")]
    return read_config_file(
        path,
        options=[str(param.name) for param in params],
        lists=[str(param.name) for param in params if getattr(param, "multiple", False)],
        switches=[str(param.name) for param in params if getattr(param, "is_flag", False)],
        flags=flags,
    )


def read_config_file(
    path: str,
    *,
    options: Collection[str],
    lists: Collection[str],
    switches: Collection[str] = (),
    flags: Iterable[Flag] = (),
) -> dict[str, Value]:
    """Read a configuration file; return values by option name, with underscores.

    Known are the ``options``, of which ``lists`` can be given several times and ``switches`` are on or off, and the
    fields behind ``flags``.
    ``ConfigError`` if the file cannot be read, is not TOML, or has an unknown key or a value of a wrong type.
    """
    try:
        table = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"Got --config {path!r}, which cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"Got --config {path!r}, which is not TOML: {error}") from None
    by_field = {flag.field.name: flag for flag in flags}
    values: dict[str, Value] = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        if name not in options and name in by_field:
            flag = by_field[name]
            name, value = flag.name, not value if flag.turns_off and isinstance(value, bool) else value
        if name not in options:
            known = [one.replace("_", "-") for one in options] if "-" in key else options
            raise ConfigError(f"Got {key!r} in {path}, {nearest(key, known)}")
        if name in values:
            raise ConfigError(f"Got {key!r} twice in {path}")
        if isinstance(value, bool) and name not in switches:  # an option would take it for 1
            raise ConfigError(f"Got {key} = {str(value).lower()} in {path}, expected a string or a number")
        values[name] = _read_value(key, value, path=path, is_list=name in lists)
    return values


def _read_value(key: str, value: object, *, path: str, is_list: bool) -> Value:
    if is_list:
        if isinstance(value, str):
            return [value]
        if isinstance(value, Mapping):
            value = [f"{name}={item if isinstance(item, str) else json.dumps(item)}" for name, item in value.items()]
        if isinstance(value, list) and all(isinstance(item, str) for item in value):
            return value
        raise ConfigError(f"Got {key} = {value!r} in {path}, expected a list of strings")
    if isinstance(value, str | int | float | bool):
        return value
    raise ConfigError(f"Got {key} = {value!r} in {path}, expected a string, a number or a boolean")
