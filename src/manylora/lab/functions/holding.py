"""The artefacts that devices and nodes hold: pre-loaded, or of processes; and the choice of what leaves them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping

from manylora.functions.decisions.artefacts import MemoryKind, Placed
from manylora.functions.decisions.offload import Held, choose_offload
from manylora.functions.decisions.preload import Preloader
from manylora.lab.functions.device import Device, FunctionEngine, Process, SimulatedNode
from manylora.lab.functions.processes import Start
from manylora.lab.functions.setup import LIBRARIES, FunctionsSetup, SimulatedFunction, artefacts, preload_problem
from manylora.lab.workloads import Workload

__all__ = ["Holding"]


class Holding:
    """Decides what is held where, and carries it out.

    The first decision uses the workload's mean rates, since there is no history yet.
    """

    def __init__(
        self,
        setup: FunctionsSetup,
        functions: list[SimulatedFunction],
        devices: list[Device],
        nodes: list[SimulatedNode],
        workload: Workload,
    ) -> None:
        self._setup = setup
        self._devices = {one.name: one for one in devices}
        self._nodes = {one.name: one for one in nodes}
        every = range(setup.num_nodes)
        groups = [every] if setup.preload_copies == "cluster" else [(node,) for node in every]
        problems = [preload_problem(functions, setup, group) for group in groups]
        self._artefacts = {one.name: one for one in artefacts(functions, setup)}
        self._preloaders = [Preloader(one) for one in problems]
        self._choices = [frozenset[Placed]() for _ in problems]
        self.chosen: frozenset[Placed] = frozenset()
        asked = dict.fromkeys((one.name for one in functions), 0)
        for request in workload.requests:
            asked[str(request.adapter)] += 1
        self.users: dict[str, list[str]] = {}  # those that get requests: something is held for them alone
        for one in functions:
            for name in (LIBRARIES, one.backbone, one.adapter, one.kernels):
                self.users.setdefault(name, []).extend([one.name] if asked[one.name] else ())
        for node in nodes:
            node.users = self.users
        duration_s = max(1.0, workload.duration_s)
        self.rates = {name: count / duration_s for name, count in asked.items()}
        self._counted: dict[str, int] = dict.fromkeys(asked, 0)
        self._windows = deque[dict[str, int]](maxlen=max(1, round(setup.rate_window_s / setup.preload_every_s)))

    def count(self, function: SimulatedFunction) -> None:
        """Count a request."""
        self._counted[function.name] += 1

    def revise(self, now: float, engine_of: Mapping[str, FunctionEngine]) -> Iterator[tuple[FunctionEngine, Device]]:
        """Decide what to hold, drop and load; yield the processes to start beside it."""
        if now > 0.0:
            self._windows.append(self._counted)
            self._counted = dict.fromkeys(self._counted, 0)
            seen_s = len(self._windows) * self._setup.preload_every_s
            for name in self.rates:
                self.rates[name] = sum(one[name] for one in self._windows) / seen_s
        rates = self._value_rates()
        pairs = zip(self._preloaders, self._choices, strict=True)
        choices = [preloader.revise(held, rates) for preloader, held in pairs]
        if choices != self._choices:
            self._choices, self.chosen = choices, frozenset[Placed]().union(*choices)
            for device in self._devices.values():
                for process in [one for one in device.processes.values() if one.is_ready and not one.is_awake(now)]:
                    self.let_go(device, process)
                self._drop_unused(device)
        for artefact, place in sorted(self.chosen, key=lambda one: (_order(one.artefact), one.place)):
            if place in self._nodes:
                self._load_host(self._nodes[place], artefact, now)
            elif artefact.startswith("kernels/"):
                device, engine = self._devices[place], engine_of[artefact.partition("/")[2]]
                function = engine.functions[0]
                has_parents = {function.backbone, function.adapter} <= device.held.keys()
                has_room = self._setup.loads.context_bytes <= device.free_bytes
                if has_parents and has_room and engine.key not in device.processes:
                    yield engine, device
            else:
                self._load_device(self._devices[place], artefact, now)

    def release(self, device: Device) -> None:
        """End all processes of a device that is let go, and drop all that it holds."""
        for process in list(device.processes.values()):
            self._close(device, process)
        device.held = {}

    def keep_on_host(self, node: SimulatedNode, now: float) -> None:
        """Begin to hold the libraries and the backbones in a node's host memory."""
        for name in self.users:
            if name == LIBRARIES or name.startswith("backbone/"):
                self._load_host(node, name, now)

    def let_go(self, device: Device, process: Process) -> None:
        """End a process that no request keeps, unless it is to be held ready, and drop what only it used."""
        function = process.engine.functions[0]
        if Placed(function.kernels, device.name) in self.chosen:
            return
        self._close(device, process)
        self._drop_unused(device)

    def room(self, device: Device, engine: FunctionEngine, now: float) -> int:
        """Return the bytes that are free, or could be made free for an engine."""
        free = device.free_bytes
        if not self._setup.offloads:
            return free
        used = self._in_use(device, engine, now)
        return free + sum(copy.num_bytes for name, copy in device.held.items() if name not in used)

    def make_room(self, device: Device, engine: FunctionEngine, num_bytes: int, now: float) -> tuple[bool, int]:
        """Free bytes for an engine; return whether that is possible, and how many artefacts had to leave."""
        missing = num_bytes - device.free_bytes
        if missing <= 0:
            return True, 0
        if not self._setup.offloads:
            return False, 0
        host = device.node
        used = self._in_use(device, engine, now)
        values = self._value_rates()
        held = []
        for name, copy in device.held.items():
            artefact = self._artefacts[name]
            rate = values.get(name, 0.0)
            on_host = rate * artefact.saves_s.get(MemoryKind.HOST, 0.0)
            is_new = MemoryKind.HOST in artefact.num_bytes and name not in host.held
            held.append(
                Held(
                    name=name,
                    num_bytes=copy.num_bytes,
                    value=rate * artefact.saves_s[MemoryKind.DEVICE],
                    host_value=on_host,
                    host_bytes=copy.num_bytes if is_new else 0,
                    parent=artefact.parent if artefact.parent in device.held else None,
                    in_use=name in used,
                )
            )
        chosen = choose_offload(held, missing, host_free_bytes=host.free_bytes)
        if chosen is None:
            return False, 0
        engines = {one.engine.functions[0].kernels: one for one in device.processes.values()}
        for name in chosen.names:
            if name in engines:
                self._close(device, engines[name])
            else:
                copy = device.held.pop(name)
                if name in chosen.kept:
                    host.hold(name, copy.num_bytes, now)
        return True, len(chosen.names)

    def _value_rates(self) -> dict[str, float]:
        return {name: sum(self.rates[one] for one in users) for name, users in self.users.items()}

    def _in_use(self, device: Device, engine: FunctionEngine, now: float) -> set[str]:
        """Return the artefacts that may not leave: of loads, and of processes that run, start or are waited for.

        One is waited for by requests that are older than the engine's own, so two never hold each other up.
        """
        since = engine.queue[0].spec.arrival_s if engine.queue else now

        used = {name for name, copy in device.held.items() if copy.ready_at > now}
        engines = [
            one.engine
            for one in device.processes.values()
            if one.is_busy or not one.is_ready or (one.engine.queue and one.engine.queue[0].spec.arrival_s < since)
        ]
        for one in (engine, *engines):
            for function in one.functions:
                used |= {function.backbone, function.adapter, function.kernels}
        return used

    def _close(self, device: Device, process: Process) -> None:
        del device.processes[process.engine.key]
        for one in process.engine.functions:
            device.held.pop(one.kernels, None)

    def _drop_unused(self, device: Device) -> None:
        """Drop copies that are not to be held and that no process uses."""
        used = {
            name
            for process in device.processes.values()
            for one in process.engine.functions
            for name in (one.backbone, one.adapter, one.kernels)
        }
        for name in list(device.held):
            if name not in used and Placed(name, device.name) not in self.chosen:
                del device.held[name]

    def _load_host(self, node: SimulatedNode, name: str, now: float) -> None:
        artefact = self._artefacts[name]
        if name in node.held:
            return
        num_bytes = artefact.num_bytes[MemoryKind.HOST]
        if name == LIBRARIES:
            node.hold(name, num_bytes, now + self._setup.loads.libraries_s)
        else:
            node.disk_free_at = max(now, node.disk_free_at) + num_bytes / self._setup.loads.disk_bytes_per_s
            node.hold(name, num_bytes, node.disk_free_at)

    def _load_device(self, device: Device, name: str, now: float) -> None:
        num_bytes = self._artefacts[name].num_bytes[MemoryKind.DEVICE]
        if name in device.held or num_bytes > device.free_bytes:
            return
        start = Start(device, self._setup.loads, now, device.node.disk_free_at, device.link_free_at)
        start.bring("", name, num_bytes)
        start.commit()


def _order(artefact: str) -> tuple[int, str]:
    return (LIBRARIES, "backbone", "adapter", "kernels").index(artefact.partition("/")[0]), artefact
