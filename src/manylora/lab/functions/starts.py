"""A cold start: its stages, one after the other, and the copies that it makes.

::

    libraries   container and imports, unless a container with them is ready on the node
    backbone    disk to host, host to device, whatever is missing; with one's own copy also the context
    adapter     the same, and attaching it
    kernels     compiled, and a context where the backbone is another process's

A start waits for a copy that another one is making, for the node's disk and for the device's link.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from manylora.lab.functions.catalog import LIBRARIES
from manylora.lab.functions.device import Copy, Device, FunctionEngine
from manylora.lab.functions.setup import LoadTimes

__all__ = ["Start", "plan_start"]


@dataclass(slots=True)
class Start:
    """A cold start as planned.

    Args:
        at: Its end so far, in seconds.
        stages: Name, begin and end of each stage that takes time.
        on_device: Copies that it makes there.
        on_host: Copies that it makes in host memory.
    """

    device: Device
    loads: LoadTimes
    at: float
    disk_free_at: float
    link_free_at: float
    stages: list[tuple[str, float, float]] = field(default_factory=list)
    on_device: dict[str, Copy] = field(default_factory=dict)
    on_host: dict[str, Copy] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """Bytes of device memory that it needs."""
        return sum(one.num_bytes for one in self.on_device.values())

    def commit(self) -> None:
        """Make the copies, and take the disk and the link for as long as they need."""
        device = self.device
        device.held |= self.on_device
        for name, copy in self.on_host.items():
            device.node.hold(name, copy.num_bytes, copy.ready_at)
        device.node.disk_free_at, device.link_free_at = self.disk_free_at, self.link_free_at

    def bring(self, stage: str, name: str, num_bytes: int, *, extra_s: float = 0.0) -> None:
        """Bring an artefact to the device, from the nearest copy; ``extra_s`` is time beside its copies."""
        began_at = self.at
        held = self.device.held.get(name) or self.on_device.get(name)
        if held is not None:
            self.at = max(self.at, held.ready_at)
        else:
            on_host = self.device.node.held.get(name)
            if on_host is None:
                self.disk_free_at = max(self.at, self.disk_free_at) + num_bytes / self.loads.disk_bytes_per_s
                on_host = self.on_host[name] = Copy(num_bytes, self.disk_free_at)
            self.link_free_at = max(self.at, self.link_free_at, on_host.ready_at)
            self.link_free_at += num_bytes / self.loads.link_bytes_per_s
            self.at = self.link_free_at + extra_s
            self.on_device[name] = Copy(num_bytes, self.at)
        self._note(stage, began_at)

    def spend(self, stage: str, until: float) -> None:
        """Let time pass."""
        began_at, self.at = self.at, max(self.at, until)
        self._note(stage, began_at)

    def _note(self, stage: str, began_at: float) -> None:
        if self.at > began_at:
            self.stages.append((stage, began_at, self.at))


def plan_start(engine: FunctionEngine, device: Device, loads: LoadTimes, now: float, *, is_shared: bool) -> Start:
    """Return the cold start of a process; nothing is changed until it is committed.

    Args:
        engine: The engine that starts.
        device: Where.
        loads: Times of stages.
        now: The time.
        is_shared: Whether it maps a copy of the base that is not its own.
    """
    node = device.node
    start = Start(device, loads, now, node.disk_free_at, device.link_free_at)
    ready = node.held.get(LIBRARIES)
    start.spend("libraries", now + loads.libraries_s if ready is None else ready.ready_at)
    for name in dict.fromkeys(one.backbone for one in engine.functions):
        start.bring("backbone", name, engine.model.num_bytes, extra_s=0.0 if is_shared else loads.context_s)
    for one in engine.functions:
        start.bring("adapter", one.adapter, one.adapter_bytes, extra_s=loads.adapter_s)
    start.spend("kernels", start.at + loads.kernels_s + (loads.context_s if is_shared else 0.0))
    for place, one in enumerate(engine.functions):  # tenants of one process have one context
        start.on_device[one.kernels] = Copy(0 if place else loads.context_bytes, start.at)
    return start
