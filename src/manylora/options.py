"""Options, each stated once: a dataclass field with its default, meaning, unit and limits.

The field is what everything else is made from: the flag and the help of a command line (``cli/options/fields.py``), the
key of a TOML file, the table in ``docs/options.md``, and the check of a value on construction::

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Options:
        refresh_s: float = option(300.0, help="Time between two settings of the queues.", unit="s", above=0)

        def __post_init__(self) -> None:
            check_options(self)
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from manylora.errors import ConfigError

__all__ = ["Option", "check_options", "option", "option_of"]

_KEY = "manylora.option"


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """The parts of an option beside its field's name, type and default.

    Args:
        help: Its meaning, in short sentences.
        panel: Its group in the help of a command; ``None`` keeps it off command lines.
        flag: How a command line writes it, where that does not follow from the field's name.
        without: For a switch that is on: the meaning of the flag that turns it off.
        metavar: The place of its value in the help, where that does not follow from unit and choices.
        unit: ``s``, ``bytes``, ``tokens`` ...
        choices: All values there are.
        plugin: The kind of thing that it names (``policy``, ``eviction`` ...): one of ours or one's own.
        at_least: Least value.
        above: Every value is above this.
        at_most: Largest value.
        envvar: Environment variable that gives it to a command.
    """

    help: str
    panel: str | None = None
    flag: str | None = None
    without: str | None = None
    metavar: str | None = None
    unit: str | None = None
    choices: tuple[str, ...] = ()
    plugin: str | None = None
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    envvar: str | None = None

    @property
    def expected(self) -> str:
        """The values that are allowed, as the end of a message; empty where all are."""
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
        """Whether a value is among the choices and within the limits; ``None`` always is."""
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
    """Return a dataclass field that is an option.

    Args:
        default: Its default.
        factory: Makes the default, where that can be changed.
        known: Fields of ``Option``.
    """
    metadata = {_KEY: Option(**known)}
    if factory is not None:
        return dataclasses.field(default_factory=factory, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def option_of(field: dataclasses.Field[Any]) -> Option | None:
    """Return the option that a field is, ``None`` where it is none."""
    return field.metadata.get(_KEY)


def check_options(made: Any) -> None:
    """Check all options of a dataclass; for its ``__post_init__``.

    Raises:
        ConfigError: A value is none of the choices, or outside the limits.
    """
    for field in dataclasses.fields(made):
        known, value = option_of(field), getattr(made, field.name)
        if known is not None and not known.allows(value):
            raise ConfigError(f"Got {field.name} = {value!r}, expected {known.expected}")
