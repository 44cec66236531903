"""The settings of a plan: `[plan]` of a scenario's file.

::

    [plan]
    rate = 20.0                      # traffic, all replicas together
    percentile = 99
    prices = { a40 = 0.8, l40s = 1.2 }    # per device and hour; or price = 1.1 for any

    [plan.compare]                   # each with each
    gpu = ["a40", "l40s"]
    policy = ["fifo", "chameleon"]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from manylora.core.errors import ConfigError
from manylora.lab.planning.load_test import SearchBudget
from manylora.lab.planning.plan import TrafficDemand
from manylora.lab.planning.variants import Axis, make_axis
from manylora.lab.workloads.tables import TableReader

__all__ = ["PlanSettings", "read_plan_settings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSettings:
    """Settings of a plan beside the scenario.

    Args:
        rate: Traffic in requests per second, all replicas together; ``None`` plans for one full replica.
        percentile: Percentage of requests that must meet the SLO.
        price: Per device and hour, for kinds that are not in ``prices``.
        requests: Requests of each run, at least.
        seeds: Runs of each load test.
        tolerance: Largest error of the capacity, as a share of the true one.
        prices: Per device and hour, by kind of hardware.
        compare: Settings to vary; every combination is planned.
    """

    rate: float | None = None
    percentile: float = 99.0
    price: float | None = None
    requests: int = 2000
    seeds: int = 2
    tolerance: float = 0.02
    prices: Mapping[str, float] = field(default_factory=dict)
    compare: tuple[Axis, ...] = ()

    def demand(self, hardware: str) -> TrafficDemand:
        """Return the demand, with the price of a kind of hardware.

        Raises:
            ConfigError: A value is out of range.
        """
        return TrafficDemand(
            rate=self.rate,
            price_per_hour=self.prices.get(hardware, self.price),
            tolerance=self.tolerance,
            search_budget=SearchBudget(num_requests=self.requests, seeds=self.seeds),
        )


def read_plan_settings(table: object) -> PlanSettings:
    """Read `[plan]`.

    Raises:
        ConfigError: A key is unknown or a value of the wrong kind; the message says where it stands.
    """
    if not isinstance(table, Mapping):
        raise ConfigError(f"Got plan = {table!r}, expected a table")
    by_hand = {name: table.get(name, {}) for name in ("prices", "compare")}
    for name, value in by_hand.items():
        if not isinstance(value, Mapping):
            raise ConfigError(f"Got plan.{name} = {value!r}, expected a table")
    for name, value in by_hand["prices"].items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"Got plan.prices.{name} = {value!r}, expected a number")
    rest = {key: value for key, value in table.items() if key not in by_hand}
    return replace(
        TableReader({}).read(PlanSettings, rest, "plan"),
        prices={name: float(value) for name, value in by_hand["prices"].items()},
        compare=tuple(make_axis(name, values) for name, values in by_hand["compare"].items()),
    )
