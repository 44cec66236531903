"""Nodes and devices: the copies that they hold, the processes on them, and their turns.

Processes of different functions do not overlap on a device: while ``M`` of them compute, each gets every ``M``-th turn
(equation 4 of ServerlessLoRA). Loads of one kind queue for their node's disk and for their device's link.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from manylora.functions.decisions.batching import Window
from manylora.functions.decisions.billing import MachineState, Usage, add_usage, charge, split_evenly
from manylora.functions.decisions.keeping import IdleGaps
from manylora.lab.functions.setup import Model, SimulatedFunction, device_name, node_name
from manylora.lab.workloads import RequestSpec

__all__ = ["Call", "Copy", "Device", "FunctionEngine", "Ledger", "Process", "SimulatedNode", "Stretch", "Turns"]


@dataclass(slots=True, eq=False)
class Call:
    """A request to a function, and its course."""

    number: int  # its place in the workload
    function: SimulatedFunction
    spec: RequestSpec  # lengths and arrival
    left: float = 0.0  # tokens to generate after those it has; in the midst of a stretch it may be a fraction
    started_at: float | None = None
    answered_from: float | None = None
    finished_at: float | None = None
    batch_size: int = 0
    # Seconds in which it waited for stages of a cold start, by stage.
    waited_s: dict[str, float] = field(default_factory=dict)

    @property
    def kv_bytes(self) -> int:
        """Bytes of KV when the call ends."""
        tokens = self.spec.num_prompt_tokens + self.spec.num_output_tokens
        return tokens * self.function.model.kv_bytes_per_token


@dataclass(frozen=True, slots=True)
class Stretch:
    """Decode steps of one batch: their number, and their device time."""

    num_steps: float
    work_s: float


@dataclass(slots=True, eq=False)
class FunctionEngine:
    """The unit that has processes: a function, or all functions of a model where they are tenants of one process."""

    key: str
    functions: tuple[SimulatedFunction, ...]
    model: Model
    window: Window
    batch_s: float  # time of a batch on a device of its own, in seconds, as far as seen
    queue: deque[Call] = field(default_factory=deque)
    check_at: float = math.inf  # time of the next look at its window; infinite for none


@dataclass(slots=True)
class Copy:
    """A copy of an artefact, which can be used from ``ready_at`` on."""

    num_bytes: int
    ready_at: float


@dataclass(slots=True, eq=False)
class Process:
    """A process of an engine on a device."""

    engine: FunctionEngine
    ready_at: float  # when all that it needs is loaded
    stages: list[tuple[str, float, float]]  # its cold start: name, begin and end of each stage
    # End of its keep-alive. From then on it sleeps, and is there for the functions that it is held for.
    awake_until: float
    is_ready: bool = False
    prompts: list[Call] = field(default_factory=list)  # calls of the prompt step that runs
    joining: list[Call] = field(default_factory=list)  # calls of the next prompt step
    decoding: list[Call] = field(default_factory=list)  # calls that decode
    stretch: Stretch | None = None  # the decode steps that run
    work_s: float = 0.0  # device time of the batch so far

    @property
    def is_busy(self) -> bool:
        """Whether the process computes."""
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

    def left_s(self, key: str, now: float) -> float:
        """Return the seconds until work ends at the present speed."""
        served_s = self._served_s + (now - self._at) / len(self._ends)
        return max(0.0, self._ends[key] - served_s) * len(self._ends)

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


class SimulatedNode:
    """A node's host memory and disk, and its devices of equal memory."""

    def __init__(self, number: int, host_bytes: int, num_devices: int, device_bytes: int) -> None:
        self.name = node_name(number)
        self.devices = [Device(device_name(number, place), self, device_bytes) for place in range(num_devices)]
        self.held: dict[str, Copy] = {}
        self.free_bytes = host_bytes
        self.users: Mapping[str, Sequence[str]] = {}  # of each artefact: those that it is held for
        self.disk_free_at = 0.0
        self.ledger = Ledger()

    def hold(self, name: str, num_bytes: int, ready_at: float) -> None:
        """Hold a copy, if there is room for one."""
        if name not in self.held and num_bytes <= self.free_bytes:
            self.free_bytes -= num_bytes
            self.held[name] = Copy(num_bytes, ready_at)

    def settle(self, now: float) -> None:
        """Charge its copies to their functions that are awake on the node, or to all of them."""
        duration_ns = self.ledger.elapse(now)
        if duration_ns:
            began_at = now - duration_ns / 1e9
            awake = {name for device in self.devices for name in device.awake(began_at)}
            shared = [
                (copy.num_bytes, [one for one in self.users[name] if one in awake] or self.users[name])
                for name, copy in self.held.items()
            ]
            add_usage(self.ledger.accounts, charge(MachineState(num_devices=0, shared_host_bytes=shared), duration_ns))


class Device:
    """A device: its memory, processes and time."""

    def __init__(self, name: str, node: SimulatedNode, capacity: int) -> None:
        self.name = name
        self.node = node
        self.capacity = capacity
        self.held: dict[str, Copy] = {}
        self.kv_bytes: dict[str, int] = {}
        self.processes: dict[str, Process] = {}
        self.turns = Turns()
        self.gaps = IdleGaps()
        self.link_free_at = 0.0
        self.due = 0  # the number of its event that counts; earlier ones are void
        self.ledger = Ledger()

    @property
    def is_idle(self) -> bool:
        """Whether no process computes or starts."""
        return all(one.is_ready and not one.is_busy for one in self.processes.values())

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
        own = dict(self.kv_bytes)
        shared: list[tuple[int, Sequence[str]]] = []
        for name, copy in self.held.items():
            kind, _, owner = name.partition("/")
            if kind == "backbone":
                shared.append((copy.num_bytes, self._users_of(name, began_at) or self.node.users[name]))
            else:
                own[owner] = own.get(owner, 0) + copy.num_bytes
        kept_for = {one: None for name in self.held for one in self.node.users[name]}
        running = [process.accounts for process in self.processes.values() if process.is_busy]
        state = MachineState(
            running={0: sorted({name for accounts in running for name in accounts})},
            awake=self.awake(began_at) or list(kept_for),
            device_bytes=own,
            shared_device_bytes=shared,
        )
        add_usage(self.ledger.accounts, charge(state, duration_ns))
        for accounts in running:  # each process keeps one processor
            parts = split_evenly(duration_ns, accounts)
            add_usage(self.ledger.accounts, {name: Usage(cpu_ns=part) for name, part in parts.items()})

    def _users_of(self, backbone: str, now: float) -> list[str]:
        return [
            function.name
            for process in self.processes.values()
            if process.is_awake(now)
            for function in process.engine.functions
            if function.backbone == backbone
        ]
