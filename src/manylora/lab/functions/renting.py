"""Where a batch could run, and devices by rent: how many are opened, what runs on them, and when each is let go.

A device that is opened for a function gets processes of the others of its backbone as well, for its rent is paid by
time and not by bytes. It is kept while its rent is worth the cold start (`manylora.functions.decisions.keeping`), and
then all of it goes at once. Copies in host memory stay, so that the next start reads no disk.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from manylora.functions.decisions.artefacts import MemoryKind
from manylora.functions.decisions.keeping import num_devices_worth
from manylora.functions.decisions.placement import Candidate
from manylora.lab.functions.device import Device, FunctionEngine
from manylora.lab.functions.holding import Holding
from manylora.lab.functions.processes import Start, plan_start
from manylora.lab.functions.setup import FunctionsSetup, artefacts

__all__ = ["Renting"]


class Renting:
    """Offers the places of a batch, with their rent where the setup weighs it, and says which devices are ready."""

    def __init__(
        self, setup: FunctionsSetup, engines: Sequence[FunctionEngine], devices: Sequence[Device], holding: Holding
    ) -> None:
        self.weighs_rent = setup.rents and not setup.always_on
        self._setup = setup
        self._devices = devices
        self._holding = holding
        self._groups: dict[str, list[FunctionEngine]] = {}
        for engine in engines:
            self._groups.setdefault(engine.functions[0].backbone, []).append(engine)
        saves_s = {
            one.name: one.saves_s[MemoryKind.DEVICE] - one.saves_s.get(MemoryKind.HOST, 0.0)
            for one in artefacts([one for engine in engines for one in engine.functions], setup)
            if MemoryKind.DEVICE in one.saves_s
        }
        self._start_s = {
            engine.key: sum(saves_s[one] for one in (first.backbone, first.adapter, first.kernels))
            for engine in engines
            for first in engine.functions[:1]
        }

    def plan(self, engine: FunctionEngine, device: Device, now: float) -> Start:
        """Return the cold start of an engine on a device."""
        return plan_start(engine, device, self._setup.loads, now, is_shared=self._setup.sharing)

    def candidates(self, engine: FunctionEngine, now: float) -> list[Candidate]:
        """Return the processes that could serve the next batch of an engine, and those that could be started."""
        setup, found = self._setup, []
        for device in self._devices:
            process = device.processes.get(engine.key)
            if process is None or not (process.is_ready or self.weighs_rent):
                continue
            others = len(device.turns) - process.is_busy
            load_s = 0.0 if process.is_ready else process.ready_at - now
            wait_s = 0.0
            if process.is_busy and not setup.joins:
                ahead = math.ceil(len(engine.queue) / engine.window.size_limit()) - 0.5
                wait_s = ahead * engine.batch_s * (1 + others)
            elif process.prompts and self.weighs_rent:
                wait_s = device.turns.left_s(engine.key, now)
            found.append(Candidate(device.name, load_s, wait_s, others, rent_s=self._rent_s(device, engine)))
        if setup.always_on or any(not (one.load_s or one.wait_s or one.num_batches) for one in found):
            return found  # no start can be earlier than a free process on a free device
        for device in self._devices:
            if engine.key not in device.processes:
                start = self.plan(engine, device, now)
                need = start.num_bytes + engine.queue[0].kv_bytes
                if need <= self._holding.room(device, engine, now):
                    load_s, evicts_bytes = start.at - now, max(0, need - device.free_bytes)
                    rent_s = self._rent_s(device, engine)
                    found.append(Candidate(device.name, load_s, 0.0, len(device.turns), evicts_bytes, rent_s=rent_s))
        return found

    def first(self, now: float) -> Iterator[tuple[Device, FunctionEngine]]:
        """Yield the processes to start before the first request: as many devices of each backbone as are worth it.

        Host memory gets copies on the nodes of these devices and of the next one.
        """
        num_devices = 0
        for backbone, engines in self._groups.items():
            rates = [self._rate(one) for one in engines]
            shares = [-math.expm1(-rate * one.batch_s) for rate, one in zip(rates, engines, strict=True)]
            for _ in range(num_devices_worth(shares, sum(rates), self._even_s(engines[0]))):
                if num_devices < len(self._devices):
                    device = self._devices[num_devices]
                    num_devices += 1
                    for engine in self.beside(device, backbone):
                        yield device, engine
        for node in {device.node.name: device.node for device in self._devices[: num_devices + 1]}.values():
            self._holding.keep_on_host(node, now)

    def beside(self, device: Device, backbone: str) -> Iterator[FunctionEngine]:
        """Yield the functions of a backbone that are to have a process on a device as well: the most requests first."""
        if self._setup.preload_copies != "load" or not self._setup.preloads:
            return
        room = self._setup.preload_share * device.capacity
        engines = [one for one in self._groups[backbone] if self._rate(one) > 0.0 and one.key not in device.processes]
        for engine in sorted(engines, key=lambda one: -self._rate(one)):
            missing = 0 if backbone in device.held else engine.model.num_bytes
            missing += self._setup.loads.context_bytes + sum(one.adapter_bytes for one in engine.functions)
            if device.capacity - device.free_bytes + missing <= room:
                yield engine

    def keep_until(self, device: Device, now: float) -> float:
        """Return until when a device that has become idle is kept."""
        device.gaps.since = now
        return now + device.gaps.keep_s(max(self._even_s(one.engine) for one in device.processes.values()))

    def _rent_s(self, device: Device, engine: FunctionEngine) -> float:
        """Return the seconds of waiting that the use of a device is worth, beyond what the device costs anyway.

        Its steps cost more than its idle time, unless they join a batch that runs. A device that is not ready for any
        function will be kept afterwards: as long as the cold start is worth, so that this counts a second time.
        """
        if not self.weighs_rent:
            return 0.0
        prices = self._setup.prices
        process = device.processes.get(engine.key)
        if process is not None and process.is_busy:
            return 0.0
        steps = (prices.active_device_gb_s - prices.idle_device_gb_s) * prices.device_gb / prices.wait_s
        return steps * engine.batch_s + (0.0 if device.processes else self._start_s[engine.key])

    def _even_s(self, engine: FunctionEngine) -> float:
        return self._setup.prices.even_s(self._start_s[engine.key])

    def _rate(self, engine: FunctionEngine) -> float:
        return sum(self._holding.rates[one.name] for one in engine.functions)
