"""From TOML tables to frozen dataclasses: field by field, kind by kind, and never a key that is silently dropped.

A dataclass's annotations say what a table may hold. Where the annotation is a Protocol, the table's ``kind`` says which
of its registered implementations is meant. A mistake is named by its place: ``workload.arrivals.rate``. The bounds of a
value stand with its field (`core/options.py`).
"""

from __future__ import annotations

import dataclasses
import math
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path

from manylora.core.errors import ConfigError
from manylora.core.options import nearest

__all__ = ["TableReader", "read_table", "same_key"]

T = typing.TypeVar("T")


def read_table(file: Path) -> dict[str, typing.Any]:
    """Read a TOML file; ``ConfigError`` if the file cannot be read, or is not TOML."""
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: not TOML: {error}") from None


def same_key(table: Mapping[str, object], key: str) -> str:
    """Return the key of a table that means this one, as ``num-requests`` means ``num_requests``, or the key itself."""
    name = key.replace("-", "_")
    return key if key in table else next((one for one in table if one.replace("-", "_") == name), key)


class TableReader:
    """Reads tables into dataclasses.

    ``kinds`` has the dataclasses that implement each Protocol that fields are annotated with; each has a class variable
    ``kind``. Files with relative paths are looked for in ``folders``, first to last.
    """

    def __init__(self, kinds: Mapping[type, Sequence[type]], folders: Sequence[Path] = ()) -> None:
        self._kinds = {seam: {one.kind: one for one in ones} for seam, ones in kinds.items()}  # type: ignore[attr-defined]
        self._folders = tuple(folders)

    def read(self, cls: type[T], table: object, where: str) -> T:
        """Return a dataclass, or a registered kind of a Protocol, from a table, which messages call ``where``.

        ``ConfigError`` if a key is unknown, missing, twice there or wrongly typed, or the dataclass refuses its values.
        """
        if not isinstance(table, Mapping):
            raise ConfigError(f"Got {where} = {table!r}, expected a table")
        known: set[str] = set()
        if cls in self._kinds:
            kinds = self._kinds[cls]
            kind = table.get("kind")
            if kind is None:
                raise ConfigError(f"{where}: no kind, expected one of {', '.join(sorted(kinds))}")
            if kind not in list(kinds):  # it may be a list or table, which no mapping has
                raise ConfigError(f"Got {where}.kind = {kind!r}, {nearest(str(kind), kinds)}")
            cls, known = kinds[kind], {"kind"}
        fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
        hints = typing.get_type_hints(cls)
        values: dict[str, object] = {}
        for key, value in table.items():
            name = key.replace("-", "_")
            if name in known:
                continue
            if name not in fields:
                raise ConfigError(f"Got {where}.{key}, which nothing reads: {nearest(name, [*fields, *known])}")
            if name in values:
                first = next(one for one in table if one.replace("-", "_") == name)
                raise ConfigError(f"Got {where}.{first} and {where}.{key}, expected one of them")
            values[name] = self._value(hints[name], value, f"{where}.{key}")
        for name, field in fields.items():
            needed = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
            if needed and name not in values:
                raise ConfigError(f"{where}: no {name}, which it needs")
        try:
            return cls(**values)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None

    def _value(self, hint: object, value: object, where: str) -> object:
        origin, arguments = typing.get_origin(hint), typing.get_args(hint)
        if origin in (types.UnionType, typing.Union):
            return self._value(next(one for one in arguments if one is not type(None)), value, where)
        if origin is typing.Literal:
            if value not in arguments:
                raise ConfigError(f"Got {where} = {value!r}, expected one of {', '.join(map(str, arguments))}")
            return value
        if origin is tuple:
            if not isinstance(value, list):
                raise ConfigError(f"Got {where} = {value!r}, expected a list")
            return tuple(self._value(arguments[0], one, f"{where}[{index}]") for index, one in enumerate(value))
        if hint in (object, typing.Any):
            return value
        if origin in (Mapping, dict):
            if not isinstance(value, Mapping):
                raise ConfigError(f"Got {where} = {value!r}, expected a table")
            return {key: self._value(arguments[1], one, f"{where}.{key}") for key, one in value.items()}
        if hint is Path:
            return self._path(value, where)
        if hint is float and isinstance(value, int | float) and not isinstance(value, bool):
            return _finite(value, where)
        if hint is int and isinstance(value, float) and value.is_integer():
            return int(value)  # 48e9
        if isinstance(hint, type) and (hint in self._kinds or dataclasses.is_dataclass(hint)):
            return self.read(hint, value, where)
        assert isinstance(hint, type), f"{where}: cannot read a {hint}"
        if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
            raise ConfigError(f"Got {where} = {value!r}, expected {_NAMES.get(hint, hint.__name__)}")
        return value

    def _path(self, value: object, where: str) -> Path:
        if not isinstance(value, str):
            raise ConfigError(f"Got {where} = {value!r}, expected a path")
        path = Path(value).expanduser()
        candidates = [path] if path.is_absolute() else [*(folder / path for folder in self._folders), path]
        for candidate in candidates:
            if candidate.exists():
                return candidate
        looked = ", ".join(dict.fromkeys(str(candidate.parent) for candidate in candidates))
        raise ConfigError(f"Got {where} = {value!r}, which is not in {looked}; --traces names a folder of traces")


def _finite(value: int | float, where: str) -> float:
    """Return a finite number; TOML also has ``nan``, ``inf`` and integers beyond any float."""
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ConfigError(f"Got {where} = {value!r}, expected a finite number")
    return number


_NAMES = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
