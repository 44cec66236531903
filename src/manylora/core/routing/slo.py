"""The SLO of routers that predict the time between tokens."""

from __future__ import annotations

from dataclasses import dataclass

from manylora.core.options import check_options, option

__all__ = ["SloOptions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SloOptions:
    """The SLO."""

    tbt_s: float | None = option(None, unit="s", above=0, help="SLO of the time between tokens.")

    def __post_init__(self) -> None:
        check_options(self)
