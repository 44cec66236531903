"""Plug-ins: policies outside this package, selected by name.

Built-in policies have short names (``fifo``). A name with a colon is the place of a plug-in::

    my_package.policies:Deadline      in an importable module
    ideas/deadline.py:Deadline        in a file, relative to the TOML file with the name or to the current directory

Its code is executed: names on the command line and in configuration files are trusted.

A class declares options by an inner class ``Options``, a function by ``@takes(Options)``: a frozen dataclass of fields
made by ``options.option``. A policy or router gets its options in the context of its construction, a predictor or
eviction policy as its last argument.

An error that a plug-in raises names the plug-in and the line: when it is made, and later (``name_plugins``).
"""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, fields
from importlib import util
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar, get_type_hints

from manylora.core.errors import ConfigError, ManyloraError
from manylora.core.options import option_of

__all__ = [
    "find_factory",
    "is_own",
    "made_by",
    "name_plugins",
    "options_for",
    "options_of",
    "source_of",
    "takes",
    "with_files_found",
]

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

_NAMES: dict[str, str] = {}  # plug-ins in use, as ``policy = 'ideas.py:Deadline'``, by the file of their code


def is_own(name: str) -> bool:
    """Whether a name is the place of a plug-in rather than a built-in name."""
    place, colon, attribute = name.rpartition(":")
    return bool(colon and place and attribute)


def find_factory(kind: str, name: str, ours: Mapping[str, Callable[..., T]]) -> Callable[..., T]:
    """Return the class or function of that name.

    Args:
        kind: The kind of plug-in, for messages.
        name: A built-in name, or ``module:attribute`` or ``file.py:attribute``.
        ours: Built-in factories, by name.

    Raises:
        ConfigError: There is none of that name, or it cannot be imported.
    """
    if name in ours:
        return ours[name]
    if not is_own(name):
        known = ", ".join(sorted(ours))
        raise ConfigError(f"Got {kind} = {name!r}, expected one of {known}, or your own as module:Name or file.py:Name")
    place, _, attribute = name.rpartition(":")
    module = _load_file(kind, name, Path(place)) if place.endswith(".py") else _load_module(kind, name, place)
    found = getattr(module, attribute, None)
    if not callable(found):
        its = [name for name, one in vars(module).items() if getattr(one, "__module__", None) == module.__name__]
        raise ConfigError(f"Got {kind} = {name!r}, and {place} has no such class or function, but {', '.join(its)}")
    if (file := getattr(module, "__file__", None)) is not None:
        _NAMES[file] = f"{kind} = {name!r}"
    factory: Callable[..., T] = found
    return factory


def made_by(kind: str, name: str, ours: Mapping[str, Callable[..., T]], *arguments: object, seam: type) -> T:
    """Call the factory that ``find_factory`` finds, and check that the result has the members of the Protocol ``seam``.

    ``ConfigError`` if there is none, the call failed, or a member of the Protocol is missing.
    """
    factory = find_factory(kind, name, ours)
    try:
        made = factory(*arguments)
    except Exception as error:
        if isinstance(error, ManyloraError) or not is_own(name):
            raise
        raise _broken(kind, name, "making", error) from error
    required = [member for member in vars(seam) if member == "__len__" or not member.startswith("_")]
    missing = [member for member in required if not hasattr(made, member)]
    if missing:
        raise ConfigError(
            f"Got {kind} = {name!r}, which lacks {', '.join(missing)} of {seam.__module__}.{seam.__name__}"
        )
    return made


@contextmanager
def name_plugins() -> Iterator[None]:
    """Add a note to an error that passed through a plug-in: its name, and the file and line of its last call."""
    try:
        yield
    except Exception as error:
        for frame in reversed(traceback.extract_tb(error.__traceback__)):
            if frame.filename in _NAMES:
                error.add_note(f"raised in the plug-in {_NAMES[frame.filename]}, {frame.filename}:{frame.lineno}")
                break
        raise


def takes(options: type) -> Callable[[F], F]:
    """Declare the options of a factory function."""

    def mark(factory: F) -> F:
        factory.Options = options  # type: ignore[attr-defined]
        return factory

    return mark


def options_of(ours: Mapping[str, Callable[..., Any]]) -> dict[str, type]:
    """Return the ``Options`` of the built-in factories that have some, by name."""
    return {name: one.Options for name, one in ours.items() if hasattr(one, "Options")}


def options_for(kind: str, name: str, ours: Mapping[str, Callable[..., Any]], given: Mapping[str, object]) -> Any:
    """Return the options of the policy of that name, ``None`` if it has none.

    Args:
        kind: The kind of plug-in, for messages.
        name: As for ``find_factory``.
        ours: Built-in factories, by name.
        given: Values by key, from TOML or (as text) from a command line. Options of another built-in policy are
            ignored, so that a run can be changed by changing only the policy's name.

    Raises:
        ConfigError: A key is unknown or missing, or a value is wrong.
    """
    options = getattr(find_factory(kind, name, ours), "Options", None)
    known = {field.name: field for field in fields(options)} if options is not None else {}
    of_others = {field.name for other in options_of(ours).values() for field in fields(other)}
    hints = get_type_hints(options) if options is not None else {}
    values: dict[str, object] = {}
    for key, value in given.items():
        field = key.replace("-", "_")
        if field in known:
            values[field] = _read_option(kind, field, value, hints[field])
        elif field not in of_others:
            its = f"expected one of {', '.join(known)}" if known else "which has none"
            raise ConfigError(f"Got {kind} option {key!r} for {kind} {name!r}, {its}")
    for field, one in known.items():
        if field not in values and one.default is MISSING and one.default_factory is MISSING:
            help = getattr(option_of(one), "help", field)
            raise ConfigError(f"Got {kind} = {name!r} and no {kind} option {field!r}, expected it: {help}")
    return options(**values) if options is not None else None


def _read_option(kind: str, key: str, value: object, hint: Any) -> object:
    import msgspec  # needed only for options

    try:
        return msgspec.convert(value, hint, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"Got {kind} option {key} = {value!r}: {str(error)[0].lower()}{str(error)[1:]}") from None


def source_of(name: str) -> Path | None:
    """Return the file of a plug-in's name, on whose content results depend; ``None`` for other names."""
    place = name.rpartition(":")[0]
    if not is_own(name):
        return None
    if place.endswith(".py"):
        return Path(place)
    try:
        spec = util.find_spec(place)
    except (ImportError, ValueError):
        return None
    return Path(spec.origin) if spec is not None and spec.origin is not None else None


def with_files_found(table: Mapping[str, object], folders: Iterable[Path]) -> dict[str, object]:
    """Return a TOML table with the relative files of plug-ins replaced by paths below the first folder that has them.

    A file that is in none of the folders stays unchanged.
    """
    folders = list(folders)

    def found(value: object) -> object:
        if isinstance(value, Mapping):
            return with_files_found(value, folders)
        if isinstance(value, list):
            return [found(one) for one in value]
        if not (isinstance(value, str) and is_own(value)):
            return value
        place, _, attribute = value.rpartition(":")
        homes = (folder / place for folder in folders if place.endswith(".py"))
        return next((f"{home}:{attribute}" for home in homes if home.is_file()), value)

    return {key: found(value) for key, value in table.items()}


def _load_module(kind: str, name: str, module: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and module.startswith(error.name):
            raise ConfigError(
                f"Got {kind} = {name!r}, and there is no module {error.name!r}: install it, or name its file, "
                f"as {error.name}.py"
            ) from None
        raise _broken(kind, name, "importing", error) from error
    except Exception as error:
        raise _broken(kind, name, "importing", error) from error


def _load_file(kind: str, name: str, path: Path) -> ModuleType:
    """Return the module of a file; a file is loaded once."""
    known = str(path.expanduser().resolve())
    if known in sys.modules:
        return sys.modules[known]
    spec = util.spec_from_file_location(known, known)
    if spec is None or spec.loader is None or not Path(known).is_file():
        raise ConfigError(f"Got {kind} = {name!r}, and there is no file {path}")
    module = sys.modules[known] = util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[known]
        raise _broken(kind, name, "importing", error) from error
    return module


def _broken(kind: str, name: str, act: str, error: Exception) -> ConfigError:
    file = source_of(name)
    own = None if file is None else str(file.expanduser().resolve())
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == own]
    at = f" ({file}:{lines[-1]})" if lines else ""
    return ConfigError(f"Got {kind} = {name!r}, and {act} it failed: {type(error).__name__}: {error}{at}")
