"""The bill of functions: every second of a machine belongs to one account.

Time is counted in whole nanoseconds and memory in byte-nanoseconds, and shared costs are split into whole parts, so
that the sum over all accounts is the machine's time exactly. The rules:

* A device's time belongs to the functions that run steps on it, in equal parts while several do. Without any it is
  idle.
* Idle time, and the bytes of a shared backbone, belong to the functions that are awake on the machine, in equal parts:
  they are what keeps them there. With none awake they belong to the functions for which the machine is held ready, and
  to the platform's own account if it holds nothing.
* A function's own bytes (KV, adapter, context) belong to it.
* Processor time belongs to the functions that used it; the live platform bears the rest of its machine's.

Source: ServerlessLoRA, section 6.1 and footnote 5, for what is billed and for cost-effectiveness; how shared costs are
split is not stated there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from manylora.core.options import check_options, option

__all__ = [
    "PLATFORM",
    "MachineState",
    "PriceList",
    "Taken",
    "Usage",
    "UsageMeter",
    "add_usage",
    "charge",
    "split_evenly",
]

PLATFORM = ""  # the account of the machine's time that no function caused


class Usage(NamedTuple):
    """What an account used. Sums of usages are exact."""

    active_device_ns: int = 0  # device time in steps
    idle_device_ns: int = 0  # device time kept ready
    cpu_ns: int = 0  # processor time
    device_byte_ns: int = 0  # device memory held, in bytes times nanoseconds
    host_byte_ns: int = 0

    def plus(self, other: Usage) -> Usage:
        """Return the sum."""
        active, idle, cpu, device, host = other
        return Usage(self[0] + active, self[1] + idle, self[2] + cpu, self[3] + device, self[4] + host)

    def parts(self) -> dict[str, Usage]:
        """Return the parts that have prices of their own, by name."""
        return {
            "active": Usage(active_device_ns=self.active_device_ns),
            "idle": Usage(idle_device_ns=self.idle_device_ns),
            "cpu": Usage(cpu_ns=self.cpu_ns),
            "host": Usage(host_byte_ns=self.host_byte_ns),
        }


_ACTIVE, _IDLE, _, _DEVICE_BYTES, _HOST_BYTES = range(len(Usage._fields))


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineState:
    """All that is charged by time, while none of it changes."""

    num_devices: int = 1
    running: Mapping[int, Sequence[str]] = field(default_factory=dict)  # functions that run steps, by device number
    awake: Sequence[str] = ()  # functions with a process on the machine, or those for which it is held ready
    device_bytes: Mapping[str, int] = field(default_factory=dict)  # device memory of its own, by function
    host_bytes: Mapping[str, int] = field(default_factory=dict)  # host memory of its own, by function
    # Device memory of shared backbones, each with the functions that keep it.
    shared_device_bytes: Sequence[tuple[int, Sequence[str]]] = ()
    # Host memory of shared backbones and libraries, each with the functions that keep it.
    shared_host_bytes: Sequence[tuple[int, Sequence[str]]] = ()


def add_usage(accounts: dict[str, Usage], more: Mapping[str, Usage]) -> None:
    """Add usages to accounts."""
    for account, usage in more.items():
        before = accounts.get(account)
        accounts[account] = usage if before is None else before.plus(usage)


def split_evenly(amount: int, accounts: Sequence[str]) -> dict[str, int]:
    """Split an amount into whole parts that differ by at most one and add up to it; by name, so that it is repeatable.

    Without accounts the platform has it all.
    """
    if not accounts:
        return {PLATFORM: amount}
    each, rest = divmod(amount, len(accounts))
    return {name: each + (place < rest) for place, name in enumerate(sorted(accounts))}


def charge(state: MachineState, duration_ns: int) -> dict[str, Usage]:
    """Return the usage by account: device time adds up to ``num_devices * duration_ns``, bytes to those held."""
    bill: dict[str, list[int]] = {}

    def add(account: str, what: int, amount: int) -> None:
        if amount:
            bill.setdefault(account, [0] * len(Usage._fields))[what] += amount

    def split(amount: int, accounts: Sequence[str], what: int) -> None:
        for account, part in split_evenly(amount, accounts).items():
            add(account, what, part)

    for device in range(state.num_devices):
        running = state.running.get(device, ())
        if running:
            split(duration_ns, running, _ACTIVE)
        else:
            split(duration_ns, state.awake, _IDLE)
    for own, shared, what in (
        (state.device_bytes, state.shared_device_bytes, _DEVICE_BYTES),
        (state.host_bytes, state.shared_host_bytes, _HOST_BYTES),
    ):
        for account, num_bytes in own.items():
            add(account, what, num_bytes * duration_ns)
        for num_bytes, sharers in shared:
            split(num_bytes * duration_ns, sharers, what)
    return {account: Usage(*amounts) for account, amounts in bill.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """The use of an interval."""

    since_ns: int  # its begin
    until_ns: int  # its end
    accounts: Mapping[str, Usage]  # usage by account. Device time adds up to ``device_ns``, and so on
    device_ns: int  # time of the machine's devices
    cpu_ns: int  # time of its processors; the part that no function used is the platform's
    host_byte_ns: int


class UsageMeter:
    """Counts the use of a machine with one device, from its states: each is charged until the next one.

    The amounts of the machine are counted apart from those of the accounts, so that the ledger can be checked against
    them.
    """

    def __init__(self, now_ns: int, *, num_cpus: int) -> None:
        self._num_cpus = num_cpus
        self._since_ns = self._charged_ns = now_ns
        self._state = MachineState()
        self._accounts: dict[str, Usage] = {}
        self._host_byte_ns = 0
        self._cpu_owed: dict[str, int] = {}

    def change(self, now_ns: int, state: MachineState) -> None:
        """Charge the state until now, and begin another."""
        self._charge(now_ns)
        self._state = state

    def use_cpu(self, account: str, cpu_ns: int) -> None:
        """Add processor time that an account has used since the last call."""
        self._cpu_owed[account] = self._cpu_owed.get(account, 0) + cpu_ns

    def take(self, now_ns: int) -> Taken:
        """Return the use since the last call."""
        self._charge(now_ns)
        since_ns, self._since_ns = self._since_ns, self._charged_ns
        duration_ns = self._charged_ns - since_ns
        self._charge_cpu(room_ns := self._num_cpus * duration_ns)
        accounts, self._accounts = self._accounts, {}
        host_byte_ns, self._host_byte_ns = self._host_byte_ns, 0
        return Taken(
            since_ns=since_ns,
            until_ns=self._charged_ns,
            accounts=accounts,
            device_ns=duration_ns,
            cpu_ns=room_ns,
            host_byte_ns=host_byte_ns,
        )

    def _charge(self, now_ns: int) -> None:
        duration_ns = now_ns - self._charged_ns
        if duration_ns <= 0:
            return
        state = self._state
        add_usage(self._accounts, charge(state, duration_ns))
        held = sum(state.host_bytes.values()) + sum(num_bytes for num_bytes, _ in state.shared_host_bytes)
        self._host_byte_ns += held * duration_ns
        self._charged_ns = now_ns

    def _charge_cpu(self, room_ns: int) -> None:
        """Charge processor time; readings of several processes can exceed the machine's, and wait for the next take."""
        for account in sorted(self._cpu_owed):
            paid = min(self._cpu_owed[account], room_ns)
            room_ns -= paid
            self._cpu_owed[account] -= paid
            if paid:
                add_usage(self._accounts, {account: Usage(cpu_ns=paid)})
        self._cpu_owed = {account: owed for account, owed in self._cpu_owed.items() if owed}
        if room_ns:
            add_usage(self._accounts, {PLATFORM: Usage(cpu_ns=room_ns)})


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceList:
    """Prices in dollars.

    The defaults are those that ServerlessLoRA takes from a public price list: per second of a GPU's gigabyte, active
    and idle; the others are the usual ones of functions on CPUs.
    """

    active_device_gb_s: float = option(0.000018, at_least=0, help="A second of a device's gigabyte, while a step runs.")
    idle_device_gb_s: float = option(0.000007, at_least=0, help="The same, while it is kept ready.")
    cpu_s: float = option(0.000018, at_least=0, help="A processor's second.")
    host_gb_s: float = option(0.000002, at_least=0, help="A second of a gigabyte of host memory.")
    wait_s: float = option(
        0.06, above=0, help="A second that a request waits for its first token: never billed, weighed against rent."
    )
    device_gb: float = option(48.0, at_least=0, help="Gigabytes of a device, by which its time is multiplied.")

    def __post_init__(self) -> None:
        check_options(self)

    def even_s(self, saved_s: float, *, host_bytes: int | None = None) -> float:
        """Return the seconds of rent that so many seconds of waiting are worth: of a device, or of host memory."""
        rent = self.idle_device_gb_s * self.device_gb if host_bytes is None else self.host_gb_s * host_bytes / 1e9
        return saved_s * self.wait_s / rent if rent else math.inf

    def cost(self, usage: Usage) -> float:
        """Return the price of a usage, in dollars."""
        return 1e-9 * (
            usage.active_device_ns * self.active_device_gb_s * self.device_gb
            + usage.idle_device_ns * self.idle_device_gb_s * self.device_gb
            + usage.cpu_ns * self.cpu_s
            + usage.host_byte_ns / 1e9 * self.host_gb_s
        )
