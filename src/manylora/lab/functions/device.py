"""Nodes and devices: the copies that they hold, the processes on them, and their turns.

Processes of different functions do not overlap on a device: while ``M`` of them compute, each gets every ``M``-th turn
(equation 4 of ServerlessLoRA). Loads of one kind queue for their node's disk and for their device's link.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from manylora.functions.decisions.batching import Window
from manylora.functions.decisions.billing import PLATFORM, Interval, Usage, charge
from manylora.lab.functions.batch import Call, Stretch
from manylora.lab.functions.catalog import Model, SimulatedFunction

__all__ = ["Copy", "Device", "FunctionEngine", "Ledger", "Process", "SimulatedNode", "Turns"]


@dataclass(slots=True, eq=False)
class FunctionEngine:
    """The unit that has processes: a function, or all functions of a model where they are tenants of one process.

    Args:
        alone_s: Time of a batch on a device of its own, in seconds, as far as seen.
        check_at: Time of the next look at its window; infinite for none.
    """

    key: str
    functions: tuple[SimulatedFunction, ...]
    model: Model
    window: Window
    alone_s: float
    queue: deque[Call] = field(default_factory=deque)
    check_at: float = math.inf


@dataclass(slots=True)
class Copy:
    """A copy of an artefact, which can be used from ``ready_at`` on."""

    num_bytes: int
    ready_at: float


@dataclass(slots=True, eq=False)
class Process:
    """A process of an engine on a device.

    Args:
        ready_at: When all that it needs is loaded.
        stages: Its cold start: name, begin and end of each stage.
        awake_until: When its keep-alive ends; it is asleep, and the platform's, from then on.
        prompts: Calls of the prompt step that runs.
        joining: Calls of the next prompt step.
        decoding: Calls that decode.
        stretch: The decode steps that run.
        work_s: Device time of the batch so far.
    """

    engine: FunctionEngine
    ready_at: float
    stages: list[tuple[str, float, float]]
    awake_until: float
    is_ready: bool = False
    prompts: list[Call] = field(default_factory=list)
    joining: list[Call] = field(default_factory=list)
    decoding: list[Call] = field(default_factory=list)
    stretch: Stretch | None = None
    work_s: float = 0.0

    @property
    def is_busy(self) -> bool:
        """Whether it computes."""
        return bool(self.prompts or self.decoding)

    def is_awake(self, now: float) -> bool:
        """Whether a request keeps it: it starts for one, runs one, or ran one lately."""
        return self.is_busy or now < self.awake_until

    @property
    def accounts(self) -> list[str]:
        """Names of the functions whose calls it runs."""
        return sorted({call.function.name for call in (*self.prompts, *self.decoding)})


class Turns:
    """Processes that compute on one device, each at an equal part of its speed."""

    def __init__(self) -> None:
        self._served_s = 0.0  # device time that each of them would have got, had it been there always
        self._at = 0.0
        self._ends: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._ends)

    def advance(self, now: float) -> list[str]:
        """Move on to ``now``; return whose work has ended."""
        if self._ends:
            self._served_s += (now - self._at) / len(self._ends)
        self._at = now
        return [key for key, end in self._ends.items() if end - self._served_s <= 1e-9]

    def begin(self, key: str, work_s: float) -> None:
        """Add work at the time of the last ``advance``."""
        self._ends[key] = self._served_s + work_s

    def end(self, key: str) -> float:
        """Take work away; return what is left of it, in seconds."""
        return max(0.0, self._ends.pop(key) - self._served_s)

    def next_at(self) -> float:
        """Return when the next work ends; infinite if there is none."""
        if not self._ends:
            return math.inf
        return self._at + (min(self._ends.values()) - self._served_s) * len(self._ends)


class Ledger:
    """Accounts of one machine's time, settled whenever it changes."""

    def __init__(self) -> None:
        self._at_ns = 0
        self.accounts: dict[str, Usage] = {}

    def elapse(self, now: float) -> int:
        """Return the whole nanoseconds since the last call."""
        now_ns = round(now * 1e9)
        passed, self._at_ns = now_ns - self._at_ns, now_ns
        return passed

    def add(self, interval: Interval) -> None:
        """Charge an interval."""
        for account, usage in charge(interval).items():
            self.accounts[account] = self.accounts.get(account, Usage()).plus(usage)


class SimulatedNode:
    """A node's host memory and disk."""

    def __init__(self, name: str, host_bytes: int) -> None:
        self.name = name
        self.held: dict[str, Copy] = {}
        self.free_bytes = host_bytes
        self.disk_free_at = 0.0
        self.devices: list[Device] = []
        self.ledger = Ledger()

    def hold(self, name: str, num_bytes: int, ready_at: float) -> None:
        """Hold a copy, if there is room for one."""
        if name not in self.held and num_bytes <= self.free_bytes:
            self.free_bytes -= num_bytes
            self.held[name] = Copy(num_bytes, ready_at)

    def settle(self, now: float, users: dict[str, list[str]]) -> None:
        """Charge the host memory of its copies to their functions that are awake on the node; ``users`` by copy."""
        duration_ns = self.ledger.elapse(now)
        if duration_ns:
            began_at = now - duration_ns / 1e9
            awake = {name for device in self.devices for name in device.awake(began_at)}
            shared = [
                (copy.num_bytes, [one for one in users[name] if one in awake]) for name, copy in self.held.items()
            ]
            self.ledger.add(Interval(duration_ns=duration_ns, num_devices=0, shared_host_bytes=shared))


class Device:
    """A device: its memory, processes and time."""

    def __init__(self, name: str, number: int, node: SimulatedNode, capacity: int) -> None:
        self.name = name
        self.number = number
        self.node = node
        self.capacity = capacity
        self.held: dict[str, Copy] = {}
        self.kv_bytes: dict[str, int] = {}
        self.processes: dict[str, Process] = {}
        self.turns = Turns()
        self.link_free_at = 0.0
        self.due = 0  # the number of its event that counts; earlier ones are void
        self.ledger = Ledger()

    @property
    def free_bytes(self) -> int:
        """Bytes that are neither held nor KV."""
        return self.capacity - sum(one.num_bytes for one in self.held.values()) - sum(self.kv_bytes.values())

    def awake(self, now: float) -> list[str]:
        """Return the functions that have a process awake here."""
        return sorted(
            one.name for process in self.processes.values() if process.is_awake(now) for one in process.engine.functions
        )

    def settle(self, now: float) -> None:
        """Charge the time since the last call; nothing of it has changed in between."""
        duration_ns = self.ledger.elapse(now)
        if not duration_ns:
            return
        # A process whose keep-alive ends now was awake until now.
        began_at = now - duration_ns / 1e9
        awake = self.awake(began_at)
        running = [name for process in self.processes.values() if process.is_busy for name in process.accounts]
        own = dict(self.kv_bytes)
        shared: list[tuple[int, list[str]]] = []
        for name, copy in self.held.items():
            kind, _, owner = name.partition("/")
            if kind == "backbone":
                users = [
                    function.name
                    for process in self.processes.values()
                    if process.is_awake(began_at)
                    for function in process.engine.functions
                    if function.backbone == name
                ]
                shared.append((copy.num_bytes, users))
            else:
                owner = owner if owner in awake else PLATFORM
                own[owner] = own.get(owner, 0) + copy.num_bytes
        busy_ns: dict[str, int] = {}
        for process in self.processes.values():
            accounts = process.accounts
            for place, account in enumerate(accounts):
                part = duration_ns // len(accounts) + (place < duration_ns % len(accounts))
                busy_ns[account] = busy_ns.get(account, 0) + part
        self.ledger.add(
            Interval(
                duration_ns=duration_ns,
                running={0: sorted(set(running))} if running else {},
                awake=awake,
                cpu_ns=busy_ns,
                device_bytes=own,
                shared_device_bytes=shared,
            )
        )
