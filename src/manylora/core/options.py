"""Options, each defined once: a dataclass field with its default, help, unit and limits.

The field gives the flag and help of the command line (``cli/options/fields.py``), the key of a TOML file, the table in
``docs/options.md``, and the check of a value on construction::

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Options(CheckedOptions):
        refresh_s: float = option(300.0, help="Time between two settings of the queues.", unit="s", above=0)
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from manylora.core.errors import ConfigError

__all__ = ["CheckedOptions", "Option", "check_options", "nearest", "option", "option_of", "require"]

_KEY = "manylora.option"


def nearest(word: str, known: Collection[str]) -> str:
    """Return the nearest known word, as the end of an error message."""
    close = difflib.get_close_matches(word, known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"expected one of {', '.join(sorted(known))}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """The parts of an option beside its field's name, type and default."""

    help: str  # help text, in short sentences
    panel: str | None = None  # group in the help of a command; ``None`` for an option without a flag
    flag: str | None = None  # flag on the command line, if it does not follow from the field's name
    without: str | None = None  # for a switch that is on by default: help text of the flag that turns it off
    metavar: str | None = None  # placeholder of the value in the help, if it does not follow from unit and choices
    unit: str | None = None  # ``s``, ``bytes``, ``tokens`` ..
    choices: tuple[str, ...] = ()  # all allowed values
    plugin: str | None = None  # the kind of plug-in that it names (``policy``, ``eviction`` ...), built-in or not
    at_least: float | None = None  # least value
    above: float | None = None  # exclusive lower limit
    at_most: float | None = None  # largest value
    envvar: str | None = None  # environment variable of a command

    @property
    def expected(self) -> str:
        """The allowed values, as the end of a message; empty if all are allowed."""
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        unit = f" {_UNITS.get(self.unit, self.unit)}" if self.unit else ""
        if self.above is not None:
            return (
                f"above {self.above}{unit}" if self.at_most is None else f"a number in ({self.above}, {self.at_most}]"
            )
        if self.at_least is not None:
            most = "or more" if self.at_most is None else f"to {self.at_most}"
            return f"{self.at_least} {most}{unit}"
        return ""

    def allows(self, value: Any) -> bool:
        """Return whether a value is among the choices and within the limits, or ``None``."""
        if value is None:
            return True
        if self.choices:
            return value in self.choices
        if self.above is None and self.at_least is None:
            return True
        return (
            math.isfinite(value)
            and (self.above is None or value > self.above)
            and (self.at_least is None or value >= self.at_least)
            and (self.at_most is None or value <= self.at_most)
        )


_UNITS = {"s": "seconds"}


def option(default: Any = dataclasses.MISSING, *, factory: Callable[[], Any] | None = None, **known: Any) -> Any:
    """Return a dataclass field that is an option, with the default or its factory, and fields of ``Option``."""
    metadata = {_KEY: Option(**known)}
    if factory is not None:
        return dataclasses.field(default_factory=factory, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def option_of(field: dataclasses.Field[Any]) -> Option | None:
    """Return the option of a field, ``None`` for other fields."""
    return field.metadata.get(_KEY)


def check_options(made: Any) -> None:
    """Raise ``ConfigError`` if an option of a dataclass has a value that is not allowed; for ``__post_init__``."""
    for field in dataclasses.fields(made):
        known, value = option_of(field), getattr(made, field.name)
        if known is not None:
            require(known.allows(value), field.name, value, known.expected)


class CheckedOptions:
    """The base of a dataclass whose options are checked on construction, with no other check."""

    __slots__ = ()

    def __post_init__(self) -> None:
        check_options(self)


def require(is_allowed: bool, name: str, value: object, expected: str) -> None:
    """Raise ``ConfigError`` unless a value is allowed: for fields that are no options, and limits between fields."""
    if not is_allowed:
        raise ConfigError(f"Got {name} = {value!r}, expected {expected}")
