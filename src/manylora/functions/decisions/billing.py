"""The bill of functions: every second of a machine belongs to one account.

Time is counted in whole nanoseconds and memory in byte-nanoseconds, and shared costs are split into whole parts, so
that the sum over all accounts is the machine's time exactly. The rules:

* A device's time belongs to the functions that run steps on it, in equal parts while several do. Without any it is
  idle.
* Idle time, and the bytes of a shared backbone, belong to the functions that are awake on the machine, in equal parts:
  they are what keeps them there. With none awake they belong to the platform's own account.
* A function's own bytes (KV, adapter, context) belong to it.

Source: ServerlessLoRA, section 6.1 and footnote 5, for what is billed and for cost-effectiveness; how shared costs are
split is not stated there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from manylora.core.errors import ConfigError

__all__ = ["PLATFORM", "Interval", "PriceList", "Usage", "charge", "cost_effectiveness", "split_evenly"]

PLATFORM = ""
"""The account of the machine's time that no function caused."""


class Usage(NamedTuple):
    """What an account used. Sums of usages are exact.

    Args:
        active_device_ns: Device time in steps.
        idle_device_ns: Device time kept ready.
        cpu_ns: Processor time.
        device_byte_ns: Device memory held, in bytes times nanoseconds.
        host_byte_ns: Host memory held.
    """

    active_device_ns: int = 0
    idle_device_ns: int = 0
    cpu_ns: int = 0
    device_byte_ns: int = 0
    host_byte_ns: int = 0

    def plus(self, other: Usage) -> Usage:
        """Return the sum."""
        active, idle, cpu, device, host = other
        return Usage(self[0] + active, self[1] + idle, self[2] + cpu, self[3] + device, self[4] + host)


_ACTIVE, _IDLE, _CPU, _DEVICE_BYTES, _HOST_BYTES = range(len(Usage._fields))


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A stretch of time on a machine in which none of this changed.

    Args:
        duration_ns: Its length.
        num_devices: Devices of the machine.
        running: Functions that ran steps, by device number.
        awake: Functions with a process on the machine.
        cpu_ns: Processor time by account; the rest of the machine's is not sold by time.
        device_bytes: Device memory of its own, by function.
        host_bytes: Host memory of its own, by function.
        shared_device_bytes: Device memory of shared backbones, each with the functions that are awake on it.
        shared_host_bytes: Host memory of shared backbones and libraries, likewise.
    """

    duration_ns: int
    num_devices: int = 1
    running: Mapping[int, Sequence[str]] = field(default_factory=dict)
    awake: Sequence[str] = ()
    cpu_ns: Mapping[str, int] = field(default_factory=dict)
    device_bytes: Mapping[str, int] = field(default_factory=dict)
    host_bytes: Mapping[str, int] = field(default_factory=dict)
    shared_device_bytes: Sequence[tuple[int, Sequence[str]]] = ()
    shared_host_bytes: Sequence[tuple[int, Sequence[str]]] = ()


def split_evenly(amount: int, accounts: Sequence[str]) -> dict[str, int]:
    """Split an amount into whole parts that differ by at most one and add up to it; by name, so that it is repeatable.

    Without accounts the platform has it all.
    """
    if not accounts:
        return {PLATFORM: amount}
    each, rest = divmod(amount, len(accounts))
    return {name: each + (place < rest) for place, name in enumerate(sorted(accounts))}


def charge(interval: Interval) -> dict[str, Usage]:
    """Return the usage by account: device time adds up to ``num_devices * duration_ns``, bytes to those held."""
    bill: dict[str, list[int]] = {}

    def add(account: str, what: int, amount: int) -> None:
        if amount:
            bill.setdefault(account, [0] * len(Usage._fields))[what] += amount

    def split(amount: int, accounts: Sequence[str], what: int) -> None:
        for account, part in split_evenly(amount, accounts).items():
            add(account, what, part)

    duration_ns = interval.duration_ns
    for device in range(interval.num_devices):
        running = interval.running.get(device, ())
        if running:
            split(duration_ns, running, _ACTIVE)
        else:
            split(duration_ns, interval.awake, _IDLE)
    for account, cpu_ns in interval.cpu_ns.items():
        add(account, _CPU, cpu_ns)
    for own, shared, what in (
        (interval.device_bytes, interval.shared_device_bytes, _DEVICE_BYTES),
        (interval.host_bytes, interval.shared_host_bytes, _HOST_BYTES),
    ):
        for account, num_bytes in own.items():
            add(account, what, num_bytes * duration_ns)
        for num_bytes, sharers in shared:
            split(num_bytes * duration_ns, sharers, what)
    return {account: Usage(*amounts) for account, amounts in bill.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceList:
    """Prices in dollars.

    The defaults are those that ServerlessLoRA takes from a public price list: per second of a GPU's gigabyte, active
    and idle; the others are the usual ones of functions on CPUs.

    Args:
        active_device_gb_s: Of a device's gigabyte, while a step runs.
        idle_device_gb_s: While it is kept ready.
        cpu_s: Of a processor's second.
        host_gb_s: Of a gigabyte of host memory.
        device_gb: Gigabytes of a device, which its time is multiplied by.
    """

    active_device_gb_s: float = 0.000018
    idle_device_gb_s: float = 0.000007
    cpu_s: float = 0.000018
    host_gb_s: float = 0.000002
    device_gb: float = 48.0

    def __post_init__(self) -> None:
        prices = (self.active_device_gb_s, self.idle_device_gb_s, self.cpu_s, self.host_gb_s, self.device_gb)
        if min(prices) < 0.0:
            raise ConfigError(f"Got {self}, expected no negative price")

    def cost(self, usage: Usage) -> float:
        """Return the price of a usage, in dollars."""
        return 1e-9 * (
            usage.active_device_ns * self.active_device_gb_s * self.device_gb
            + usage.idle_device_ns * self.idle_device_gb_s * self.device_gb
            + usage.cpu_ns * self.cpu_s
            + usage.host_byte_ns / 1e9 * self.host_gb_s
        )


def cost_effectiveness(end_to_end_s: float, cost: float) -> float:
    """Return ``1 / (latency * cost)``, the paper's figure of merit."""
    return 1.0 / (end_to_end_s * cost)
