"""Options of a command, made from the fields of dataclasses (``options.py``).

A field with a panel is a flag: ``step_target_s`` is ``--step-target``, a switch with default true (``prefix_caching``)
is ``--no-prefix-caching``, a size in bytes is read from ``2GiB``, a table from ``KEY=VALUE``. A command names its
fields and receives their values as one argument::

    FLAGS = flags_of(ModelConfig, MemoryConfig)

    @with_flags(FLAGS)
    def serve(model: str, chosen: Chosen) -> None:
        config = chosen.make(ModelConfig, model=model)
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import typer

from manylora.cli.options.values import parse_setting, parse_size
from manylora.core.memory import EVICTION_POLICIES
from manylora.core.options import Option, option_of
from manylora.core.plugins import options_of
from manylora.core.routing import ROUTERS
from manylora.core.scheduling import POLICIES, PREDICTORS, STEP_COMPOSITIONS

__all__ = ["PLUGINS", "Chosen", "Flag", "flags_of", "with_flags"]

T = typing.TypeVar("T")

PLUGINS: dict[str, Mapping[str, Callable[..., Any]]] = {
    "eviction": EVICTION_POLICIES,
    "policy": POLICIES,
    "predictor": PREDICTORS,
    "router": ROUTERS,
    "step_composition": STEP_COMPOSITIONS,
}
"""Plug-ins by kind and name; the field ``KIND_options`` has the options of a plug-in."""


@dataclass(frozen=True, slots=True)
class Flag:
    """A field as an option of a command."""

    owner: type
    field: dataclasses.Field[Any]
    known: Option  # meaning and limits of the field
    hint: Any  # its type, without ``None``
    may_be_unset: bool = False  # whether the option has no default, and changes nothing if it is not given

    @property
    def spelled(self) -> str:
        """The flag on the command line, without a negative form."""
        if self.known.flag is not None:
            return self.known.flag
        plain = self.field.name.removesuffix("_s").replace("_", "-")
        return f"--no-{plain}" if self.turns_off else f"--{plain}"

    @property
    def name(self) -> str:
        """The parameter of the command, and the key in a configuration file."""
        return self.spelled.removeprefix("--").replace("-", "_")

    @property
    def turns_off(self) -> bool:
        """Whether the flag switches the field off."""
        return self.hint is bool and self.field.default is True

    @property
    def is_table(self) -> bool:
        """Whether the value is a table, given as ``KEY=VALUE``."""
        return typing.get_origin(self.hint) is Mapping

    @property
    def is_list(self) -> bool:
        """Whether the flag can be given several times."""
        return self.is_table or typing.get_origin(self.hint) is tuple

    @property
    def metavar(self) -> str | None:
        """The placeholder of the value in the help; ``None`` for the name of its type."""
        names = self.known.choices or sorted(PLUGINS.get(self.known.plugin or "", ()))
        unit = self.known.unit
        of_unit = {"bytes": "SIZE", "s": "SECONDS"}.get(unit, unit.upper()) if unit is not None else None
        return self.known.metavar or "|".join(names) or of_unit

    @property
    def help(self) -> str:
        """The text in the help."""
        if self.turns_off and self.known.without is not None:
            return self.known.without
        own = " Or your own, as module:Name or file.py:Name." if self.known.plugin else ""
        return self.known.help + own

    def parameter(self) -> inspect.Parameter:
        """Return the parameter from which typer makes an option."""
        hint = list[str] if self.is_list else str if self.known.unit == "bytes" else self.hint
        default = None if self.may_be_unset or self.is_list else self._default()
        spelled = self.spelled
        if self.hint is bool and default is None and not self.may_be_unset:
            spelled = f"{spelled}/--no-{spelled.removeprefix('--')}"
        info = typer.Option(
            default,
            spelled,
            help=self.help,
            rich_help_panel=self.known.panel,
            metavar=self.metavar if self.hint is not bool else None,
            envvar=self.known.envvar,
            show_default=default is not None,
        )
        annotation = hint | None if default is None else hint
        return inspect.Parameter(self.name, inspect.Parameter.KEYWORD_ONLY, default=info, annotation=annotation)

    def _default(self) -> Any:
        default = self.field.default
        if default is dataclasses.MISSING or default is None:
            return None
        if self.turns_off:
            return False
        if self.known.unit == "bytes":
            return f"{default >> 30}GiB" if default % 2**30 == 0 else str(default)
        return default

    def read(self, value: Any) -> Any:
        """Return the field's value of an option; ``ConfigError`` for a wrong size or ``KEY=VALUE``."""
        if self.is_table:
            return dict(parse_setting(self.spelled, text) for text in value or ())
        if self.is_list:
            return tuple(value or ())
        if value is not None and self.known.unit == "bytes":
            return parse_size(value)
        return not value if self.turns_off else value


def flags_of(
    *owners: type,
    only: Collection[str] = (),
    spelled: Mapping[str, str] | None = None,
    panel: str | None = None,
    may_be_unset: bool = False,
) -> tuple[Flag, ...]:
    """Return the flags of dataclasses, in the order of their fields; of flags with one name, the first.

    Without names in ``only`` they are those of all fields with a panel. ``spelled`` has other names of flags in this
    command, by field, and ``panel`` takes the place of the fields' own. If they ``may_be_unset``, an option that is not
    given changes nothing.
    """
    flags: dict[str, Flag] = {}
    for owner in owners:
        hints = typing.get_type_hints(owner)
        for field in dataclasses.fields(owner):
            known = option_of(field)
            if known is None or known.panel is None or (only and field.name not in only):
                continue
            known = replace(known, panel=panel or known.panel, flag=(spelled or {}).get(field.name, known.flag))
            flag = Flag(owner, field, known, _without_none(hints[field.name]), may_be_unset)
            flags.setdefault(flag.name, flag)
    missing = set(only) - {flag.field.name for flag in flags.values()}
    assert not missing, f"no such options: {missing}"
    return tuple(flags.values())


class Chosen:
    """The values of options on a command line, by field."""

    def __init__(self, values: Mapping[Flag, Any]) -> None:
        self._values = values

    def of(self, owner: type) -> dict[str, Any]:
        """Return the fields of a dataclass; a field of plug-in options includes those with their own flags."""
        values = {flag.field.name: value for flag, value in self._values.items() if flag.owner is owner}
        for kind in PLUGINS:
            if (name := f"{kind}_options") in values:
                values[name] = {**self._flags_of_plugins(kind), **values[name]}
        return values

    def all(self, *owners: type) -> dict[str, Any]:
        """Return the fields of several dataclasses, by name; no two dataclasses of the configuration share one."""
        return {name: value for owner in owners for name, value in self.of(owner).items()}

    def make(self, owner: type[T], **more: Any) -> T:
        """Return a dataclass of the values, with ``more`` fields; ``ConfigError`` for a wrong value."""
        return owner(**{**self.of(owner), **more})

    def given(self, owner: type) -> dict[str, Any]:
        """Return the fields of a dataclass that were given; for flags that may be unset."""
        return {name: value for name, value in self.of(owner).items() if value is not None}

    def settings(self, places: Mapping[type, str | Mapping[str, str]]) -> dict[str, Any]:
        """Return the values that were given, by dotted key in a scenario.

        For each dataclass ``places`` has its prefix in a scenario, as ``setup.scheduler.``, or the key of each field.
        """
        given: dict[str, Any] = {}
        for flag, value in self._values.items():
            place = places.get(flag.owner)
            if place is None:
                continue
            key = f"{place}{flag.field.name}" if isinstance(place, str) else place[flag.field.name]
            if flag.is_table:
                given |= {f"{key}.{name}": text for name, text in value.items()}
            elif value is not None:
                given[key] = value
        return given

    def _flags_of_plugins(self, kind: str) -> dict[str, Any]:
        owners = tuple(options_of(PLUGINS[kind]).values())
        return {
            flag.field.name: value
            for flag, value in self._values.items()
            if flag.owner in owners and value not in (None, flag.field.default)
        }


def with_flags(
    flags: Sequence[Flag], *, panels: Sequence[str] = ()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add options to a command, which receives their values as its argument ``chosen``.

    Panels of the help are in the order of their first option, unless ``panels`` names another.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)
        own = [one for one in signature.parameters.values() if one.name != "chosen"]
        parameters = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in own]
        parameters += [flag.parameter() for flag in flags]

        @functools.wraps(command)
        def run(**values: Any) -> None:
            chosen = Chosen({flag: flag.read(values.pop(flag.name)) for flag in flags})
            command(**values, chosen=chosen)

        order = {name: place for place, name in enumerate(panels)}
        parameters.sort(key=lambda one: order.get(_panel(one), -1))
        run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {}
        run.flags = tuple(flags)  # type: ignore[attr-defined]
        return run

    return decorate


def _panel(parameter: inspect.Parameter) -> str:
    options: Iterable[Any] = (parameter.default, *getattr(parameter.annotation, "__metadata__", ()))
    return next((one.rich_help_panel or "" for one in options if hasattr(one, "rich_help_panel")), "")


def _without_none(hint: Any) -> Any:
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return next(one for one in typing.get_args(hint) if one is not type(None))
    return hint
