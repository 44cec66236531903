"""Bills from the ledger: usage and price by tenant or function, and whether they add up to the machines' time."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TextIO

from manylora.functions.controller.store import MachineUse
from manylora.functions.decisions.billing import PLATFORM, PriceList, Usage
from manylora.functions.wire import Account

__all__ = ["COLUMNS", "PLATFORM_NAME", "Bill", "BillLine", "make_bill", "write_csv"]

PLATFORM_NAME = "(platform)"
COLUMNS = (
    "active_device_s", "idle_device_s", "cpu_s", "device_gb_s", "host_gb_s", "requests", "tokens", "cost",
)  # fmt: skip


@dataclass(slots=True)
class BillLine:
    """The usage of one tenant or function."""

    name: str
    usage: Usage = field(default_factory=Usage)
    num_requests: int = 0
    num_tokens: int = 0
    cost: float = 0.0

    def values(self) -> tuple[float | int, ...]:
        """Return the values of ``COLUMNS``."""
        usage = self.usage
        return (
            usage.active_device_ns / 1e9,
            usage.idle_device_ns / 1e9,
            usage.cpu_ns / 1e9,
            usage.device_byte_ns / 1e18,
            usage.host_byte_ns / 1e18,
            self.num_requests,
            self.num_tokens,
            self.cost,
        )


@dataclass(frozen=True, slots=True)
class Bill:
    """A bill."""

    lines: tuple[BillLine, ...]  # the most expensive first; the platform's own last
    total: Usage  # the sum of the lines
    machines: MachineUse  # counted apart; time without an agent's report is the platform's

    @property
    def difference_ns(self) -> int:
        """The device time that the lines lack, or have too much; 0 always, unless the file was changed."""
        return self.machines.device_ns - self.total.active_device_ns - self.total.idle_device_ns

    @property
    def adds_up(self) -> bool:
        """Whether the lines add up to the machines' time and memory exactly."""
        total, machines = self.total, self.machines
        sums = (self.difference_ns, total.cpu_ns, total.host_byte_ns)
        return sums == (0, machines.cpu_ns, machines.host_byte_ns)


def make_bill(accounts: Iterable[Account], machines: MachineUse, prices: PriceList, *, by_tenant: bool) -> Bill:
    """Return the bill of a ledger, with a line for each tenant (``by_tenant``) or for each function."""
    lines: dict[str, BillLine] = {}
    total = Usage()
    for one in accounts:
        payer = one.tenant or "(no tenant)" if by_tenant else one.name
        name = PLATFORM_NAME if one.name == PLATFORM else payer
        line = lines.setdefault(name, BillLine(name))
        line.usage = line.usage.plus(one.usage)
        line.num_requests += one.num_requests
        line.num_tokens += one.num_tokens
        total = total.plus(one.usage)
    for line in lines.values():
        line.cost = prices.cost(line.usage)
    ordered = sorted(lines.values(), key=lambda line: (line.name == PLATFORM_NAME, -line.cost, line.name))
    return Bill(tuple(ordered), total, machines)


def write_csv(bill: Bill, by: str, file: TextIO) -> None:
    """Write the lines of a bill as CSV, with amounts that lose no digit that counts."""
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow((by, *COLUMNS))
    for line in bill.lines:
        writer.writerow((_cell(line.name), *map(repr, line.values())))


def _cell(text: str) -> str:
    """Return a name that no spreadsheet takes for a formula."""
    return f"'{text}" if text[:1] in ("=", "+", "-", "@", "\t") else text
