"""Counts the use of one machine by function, from events: each state of the machine is charged until the next one.

Told the time, as everything here. The amounts of the machine are counted apart from those of the accounts, so that the
ledger can be checked against them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from manylora.functions.decisions.billing import PLATFORM, Interval, Usage, charge

__all__ = ["MachineState", "Taken", "UsageMeter"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineState:
    """All that is charged by time; fields as of ``Interval``, for a machine with one device."""

    running: Sequence[str] = ()
    awake: Sequence[str] = ()
    host_bytes: Mapping[str, int] = field(default_factory=dict)
    shared_host_bytes: Sequence[tuple[int, Sequence[str]]] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """The use of an interval.

    Args:
        since_ns: Its begin.
        until_ns: Its end.
        accounts: Usage by account. Device time adds up to ``device_ns``, and so on.
        device_ns: Time of the machine's devices.
        cpu_ns: Time of its processors; the part that no function used is the platform's.
        host_byte_ns: Memory held.
    """

    since_ns: int
    until_ns: int
    accounts: Mapping[str, Usage]
    device_ns: int
    cpu_ns: int
    host_byte_ns: int


class UsageMeter:
    """Charges the states of a machine with one device.

    Args:
        now_ns: The begin.
        num_cpus: Its processors.
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
        interval = Interval(
            duration_ns=duration_ns,
            running={0: state.running} if state.running else {},
            awake=state.awake,
            host_bytes=state.host_bytes,
            shared_host_bytes=state.shared_host_bytes,
        )
        for account, usage in charge(interval).items():
            self._add(account, usage)
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
                self._add(account, Usage(cpu_ns=paid))
        self._cpu_owed = {account: owed for account, owed in self._cpu_owed.items() if owed}
        if room_ns:
            self._add(PLATFORM, Usage(cpu_ns=room_ns))

    def _add(self, account: str, usage: Usage) -> None:
        self._accounts[account] = self._accounts.get(account, Usage()).plus(usage)
