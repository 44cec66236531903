"""A run of functions on devices: requests wait, leave as batches, start processes, and are billed.

::

    request -> queue of its function -> window (leave?) -> process (which?) -> room (offload?) -> batch -> ledger
                                             ^                                       |
                                             +--- a scheduling round: by margin -----+   at arrivals, ends, expiries

When a batch leaves, where it runs, which artefacts are held ready and which make room are decided by
`manylora.functions.decisions`, as for live functions. A run is a deterministic function of its workload and its setup.

Left out: failures, the network between clients and nodes, and the interference of loads with steps.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

from manylora.core.clock import VirtualClock
from manylora.core.errors import ConfigError, Stalled
from manylora.functions.decisions.batching import deadline_margin_s, most_urgent
from manylora.functions.decisions.billing import Usage, add_usage
from manylora.functions.decisions.placement import choose_place
from manylora.lab.catalog.hardware import find_hardware
from manylora.lab.functions.device import Call, Device, FunctionEngine, Process, SimulatedNode
from manylora.lab.functions.holding import Holding
from manylora.lab.functions.processes import Batches, Start
from manylora.lab.functions.renting import Renting
from manylora.lab.functions.setup import FunctionsSetup, SimulatedFunction, lay_out
from manylora.lab.workloads import Workload

__all__ = ["FunctionsRun", "FunctionsSimulation"]

RECENT = 0.2  # weight of a batch in the running mean of its engine's batches


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionsRun:
    """The outcome of a run."""

    calls: list[Call]  # every request, in order of arrival
    functions: list[SimulatedFunction]
    accounts: dict[str, Usage]  # usage of each account, over all machines; the platform's own is ``""``
    duration_s: float  # virtual time of the end
    num_devices: int  # devices of all nodes
    counts: dict[str, int]  # counters of events, by name
    # Seconds of the stages of each cold start for a request, by stage.
    starts: list[dict[str, float]] = field(default_factory=list)


class FunctionsSimulation:
    """Serves a workload by functions in virtual time.

    ``ConfigError`` if a model does not fit on a device, or a request is for no adapter.
    """

    def __init__(self, workload: Workload, setup: FunctionsSetup) -> None:
        if not workload.adapters or any(one.adapter is None for one in workload.requests):
            raise ConfigError("Got requests for the base, expected an adapter for each: functions serve nothing else")
        self._setup = setup
        self._workload = workload
        self._clock = VirtualClock()
        self._functions = lay_out(workload.adapters, setup)
        capacity = int(setup.utilization * find_hardware(setup.hardware).memory_bytes)
        self._nodes = [
            SimulatedNode(number, setup.host_bytes, setup.devices_per_node, capacity)
            for number in range(setup.num_nodes)
        ]
        self._devices = [device for node in self._nodes for device in node.devices]
        self._batches = Batches(setup)
        mean_prompt = sum(one.num_prompt_tokens for one in workload.requests) / max(1, len(workload.requests))
        self._engines = list(self._make_engines(round(mean_prompt), capacity))
        self._engine_of = {one.name: engine for engine in self._engines for one in engine.functions}
        self._holding = Holding(setup, self._functions, self._devices, self._nodes, workload)
        self._renting = Renting(setup, self._engines, self._devices, self._holding)
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._num_events = 0
        self._num_left = 0
        self.counts = {"starts": 0, "offloads": 0, "batches": 0, "peak_batch": 0, "waits_for_memory": 0}
        self._starts: list[dict[str, float]] = []

    def _make_engines(self, mean_prompt: int, capacity: int) -> Iterator[FunctionEngine]:
        groups: dict[str, list[SimulatedFunction]] = {}
        for one in self._functions:
            groups.setdefault(one.model.name if self._setup.one_process else one.name, []).append(one)
        for key, functions in groups.items():
            model = functions[0].model
            if model.num_bytes + self._setup.loads.context_bytes >= capacity:
                raise ConfigError(f"{model.name} does not fit on one {self._setup.hardware}")
            window = self._batches.window(functions[0], mean_prompt)
            # Until a batch has been seen, decoding is taken to be as long as ten prompts.
            yield FunctionEngine(key, tuple(functions), model, window, batch_s=10 * window.time.single_s)

    def run(self) -> FunctionsRun:
        """Serve all requests to their end.

        ``Stalled`` if artefacts that are held ready leave no room for a function, without offloading.
        """
        functions = {one.name: one for one in self._functions}
        calls = [Call(number, functions[str(one.adapter)], one) for number, one in enumerate(self._workload.requests)]
        for call in calls:
            self._post(call.spec.arrival_s, partial(self._arrive, call))
        self._start_always_on()
        self.revise(0.0)
        self._num_left = len(calls)
        while self._num_left and self._events:
            at, _, happen = heapq.heappop(self._events)
            self._clock.wait_until(at)
            happen(self._clock.now())
        if self._num_left:
            raise Stalled(f"{self._num_left} requests wait for memory of artefacts that nothing takes off")
        end = self._clock.now()
        for device in self._devices:
            self._settle(device, end)
        accounts: dict[str, Usage] = {}
        for ledger in (*(one.ledger for one in self._devices), *(one.ledger for one in self._nodes)):
            add_usage(accounts, ledger.accounts)
        return FunctionsRun(
            calls=calls,
            functions=self._functions,
            accounts=accounts,
            duration_s=end,
            num_devices=len(self._devices),
            counts=self.counts,
            starts=self._starts,
        )

    # -- events ------------------------------------------------------------------------------------------------------

    def _post(self, at: float, happen: Callable[[float], None]) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (at, self._num_events, happen))

    def _arrive(self, call: Call, now: float) -> None:
        self._engine_of[call.function.name].queue.append(call)
        self._holding.count(call.function)
        self.decide(now)

    def _look(self, engine: FunctionEngine, now: float) -> None:
        """Decide again: the window of an engine has expired."""
        if engine.check_at <= now:
            engine.check_at = math.inf
            self.decide(now)

    def _become_ready(self, device: Device, process: Process, now: float) -> None:
        if device.processes.get(process.engine.key) is process:
            process.is_ready = True
            self.decide(now)
            if not process.is_busy and process.awake_until == math.inf:  # another process has served its requests
                self._rest(device, process, now)

    def _fall_asleep(self, device: Device, process: Process, now: float) -> None:
        if device.processes.get(process.engine.key) is process and not process.is_awake(now):
            self._settle(device, now)
            self._holding.let_go(device, process)
            self.decide(now)

    def _revise_again(self, now: float) -> None:
        self.decide(now)
        if self._events:
            self.revise(now)

    def _turn(self, device: Device, due: int, now: float) -> None:
        """Go on with the processes of a device whose step or stretch has ended."""
        if due != device.due:
            return
        ended = device.turns.advance(now)
        device.settle(now)
        for key in ended:
            process = device.processes[key]
            engine = process.engine
            finished = self._batches.go_on(device, process, now)
            self._num_left -= len(finished)
            if self._setup.joins:
                for call in finished:
                    took_s = (now - (call.started_at or now)) / max(1, len(device.turns))
                    engine.batch_s += RECENT * (took_s - engine.batch_s)
            if not process.is_busy:
                if not self._setup.joins:
                    engine.batch_s += RECENT * (process.work_s - engine.batch_s)
                process.work_s = 0.0
                if not self._setup.always_on:
                    self._rest(device, process, now)
        self._schedule(device)
        self.decide(now)

    def _schedule(self, device: Device) -> None:
        device.due += 1
        at = device.turns.next_at()
        if at < math.inf:
            self._post(max(at, self._clock.now()), partial(self._turn, device, device.due))

    def _rest(self, device: Device, process: Process, now: float) -> None:
        if self._setup.keep_alive_s is not None:
            process.awake_until = now + self._setup.keep_alive_s
            self._post(process.awake_until, partial(self._fall_asleep, device, process))
        elif device.is_idle:
            self._post(self._renting.keep_until(device, now), partial(self._let_go, device, now))

    def _let_go(self, device: Device, since: float, now: float) -> None:
        if device.gaps.since == since and device.is_idle:
            self._settle(device, now)
            self._holding.release(device)
            self.decide(now)

    # -- decisions ---------------------------------------------------------------------------------------------------

    def revise(self, now: float) -> None:
        """Decide again which artefacts are held ready, and begin to load them."""
        if not self._setup.preloads or self._setup.always_on:
            return
        if self._setup.preload_copies == "load":
            for device, engine in self._renting.first(now):
                self._launch(self._renting.plan(engine, device, now), engine, now, awake_until=math.inf)
            return
        for machine in self._devices:
            self._settle(machine, now)
        for engine, device in self._holding.revise(now, self._engine_of):
            self._launch(self._renting.plan(engine, device, now), engine, now, awake_until=-math.inf)
        self._post(now + self._setup.preload_every_s, self._revise_again)

    def decide(self, now: float) -> None:
        """Make a scheduling round: functions with waiting requests, the most urgent first."""
        margins = []
        for engine in self._engines:
            if engine.queue:
                size = min(len(engine.queue), engine.window.size_limit())
                margins.append((deadline_margin_s(engine.window, engine.queue[0].spec.arrival_s, size, now), engine))
        for engine in most_urgent(margins):
            while self._serve_batch(engine, now):
                pass

    def _serve_batch(self, engine: FunctionEngine, now: float) -> bool:
        """Let a batch leave, or start a process for it, if its window, the processes and the memory allow.

        Returns:
            Whether the engine may have another one to serve now.
        """
        if not self._renting.weighs_rent:
            starting = sum(
                not one.processes[engine.key].is_ready for one in self._devices if engine.key in one.processes
            )
            if len(engine.queue) <= engine.window.size_limit() * starting:
                return False
        best = choose_place(self._renting.candidates(engine, now), engine.batch_s)
        if best is None:
            self.counts["waits_for_memory"] += 1
            return False
        device = next(one for one in self._devices if one.name == best.place)
        process = device.processes.get(engine.key)
        if process is None:
            return self._start(engine, device, now)
        if not process.is_ready or (process.is_busy and not self._setup.joins):
            return False  # its end, or the process that starts, is the next round
        num_batches = len(device.turns) + (not process.is_busy)
        oldest_at = engine.queue[0].spec.arrival_s
        leaves_at = engine.window.leaves_at(oldest_at, len(engine.queue), now, num_batches)
        if leaves_at > now:
            if leaves_at < engine.check_at:
                engine.check_at = leaves_at
                self._post(leaves_at, partial(self._look, engine))
            return False
        return self._begin(engine, device, process, engine.window.size_limit(num_batches), now)

    # -- processes and batches ---------------------------------------------------------------------------------------

    def _start(self, engine: FunctionEngine, device: Device, now: float) -> bool:
        """Start a process for the requests that wait; return whether there is room for it."""
        need = self._renting.plan(engine, device, now).num_bytes + engine.queue[0].kv_bytes
        if not self._make_room(device, engine, need, now):
            return False
        start = self._renting.plan(
            engine, device, now
        )  # room may have been made of copies that the first plan counted on
        is_opened = not device.processes
        self._launch(start, engine, now, awake_until=math.inf)
        for other in self._renting.beside(device, engine.functions[0].backbone) if is_opened else ():
            self._launch(self._renting.plan(other, device, now), other, now, awake_until=math.inf)
        self.counts["starts"] += 1
        stages: dict[str, float] = {}
        for name, began_at, ended_at in start.stages:
            stages[name] = stages.get(name, 0.0) + ended_at - began_at
        self._starts.append(stages)
        return bool(engine.queue)

    def _launch(self, start: Start, engine: FunctionEngine, now: float, *, awake_until: float) -> None:
        device = start.device
        device.gaps.end(now)
        self._settle(device, now)
        start.commit()
        process = device.processes[engine.key] = Process(engine, start.at, start.stages, awake_until)
        self._post(start.at, partial(self._become_ready, device, process))

    def _start_always_on(self) -> None:
        for index, engine in enumerate(self._engines):
            for copy in range(self._setup.always_on):
                device = self._devices[(index * self._setup.always_on + copy) % len(self._devices)]
                start = self._renting.plan(engine, device, 0.0)
                if start.num_bytes > device.free_bytes:
                    raise ConfigError(f"{engine.key} does not fit on {device.name} beside what it holds")
                start.commit()
                device.processes[engine.key] = Process(engine, 0.0, [], math.inf, is_ready=True)
                for held in device.held.values():
                    held.ready_at = 0.0
                device.link_free_at = device.node.disk_free_at = 0.0

    def _begin(self, engine: FunctionEngine, device: Device, process: Process, limit: int, now: float) -> bool:
        """Begin a batch with as many requests as there is memory for; return whether requests are left after it."""
        room = self._holding.room(device, engine, now)
        running = len(process.prompts) + len(process.decoding) + len(process.joining)
        calls: list[Call] = []
        need = 0
        while engine.queue and len(calls) + running < limit and need + engine.queue[0].kv_bytes <= room:
            call = engine.queue.popleft()
            need += call.kv_bytes
            calls.append(call)
        if not calls or not self._make_room(device, engine, need, now):
            engine.queue.extendleft(reversed(calls))
            self.counts["waits_for_memory"] += 1
            return False
        device.gaps.end(now)
        device.settle(now)
        if not process.is_awake(now):
            device.node.settle(now)
        device.turns.advance(now)
        self.counts["batches"] += 1
        self.counts["peak_batch"] = max(self.counts["peak_batch"], len(calls) + running)
        self._batches.begin(device, process, calls, now)
        self._schedule(device)
        return bool(engine.queue)

    def _make_room(self, device: Device, engine: FunctionEngine, num_bytes: int, now: float) -> bool:
        if num_bytes <= device.free_bytes:
            return True
        self._settle(device, now)
        made, num_gone = self._holding.make_room(device, engine, num_bytes, now)
        self.counts["offloads"] += num_gone
        return made

    def _settle(self, device: Device, now: float) -> None:
        device.settle(now)
        device.node.settle(now)
