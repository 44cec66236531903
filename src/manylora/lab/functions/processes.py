"""A process: its cold start, then the course of its batches.

A cold start has stages, one after the other, and makes copies::

    libraries   container and imports, unless a container with them is ready on the node
    backbone    disk to host, host to device, whatever is missing; a copy of one's own also has its context
    adapter     the same, and attaching it
    kernels     compiled, and a context where the backbone is another process's

It waits for a copy that another start is making, for the node's disk and for the device's link.

A batch is one step of prompts, then decoding until each request has its answer, in stretches of equal batch size. A
stretch lasts until the next sequence ends; its steps are priced at the mean context. A step's time is linear in its
context within one regime of the cost model, so this is the sum over its steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from manylora.core.costs.features import StepFeatures, step_features
from manylora.core.types import AdapterKey
from manylora.functions.decisions.batching import BatchWindow, FirstTokenTime, FixedWindow, Window
from manylora.lab.costs.model import SyntheticSequence, synthetic_plan
from manylora.lab.functions.device import Call, Copy, Device, FunctionEngine, Process, Stretch
from manylora.lab.functions.setup import LIBRARIES, FunctionsSetup, LoadTimes, Model, SimulatedFunction

__all__ = ["Batches", "Start", "plan_start"]


@dataclass(slots=True)
class Start:
    """A cold start as planned."""

    device: Device
    loads: LoadTimes
    at: float  # its end so far, in seconds
    disk_free_at: float
    link_free_at: float
    # Name, begin and end of each stage that takes time.
    stages: list[tuple[str, float, float]] = field(default_factory=list)
    on_device: dict[str, Copy] = field(default_factory=dict)  # copies that it makes there
    on_host: dict[str, Copy] = field(default_factory=dict)  # copies that it makes in host memory

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

    ``is_shared`` is whether it maps a copy of the base that is not its own.
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


class Batches:
    """Runs batches on devices; prompts of a system may differ from the cost model's."""

    def __init__(self, setup: FunctionsSetup) -> None:
        self._setup = setup

    def window(self, function: SimulatedFunction, mean_prompt: int) -> Window:
        """Return the rule by which requests of a function leave, for prompts of a mean length."""
        setup, model = self._setup, function.model
        one, two = (self._prompt_s(model, [(mean_prompt, function)] * size) for size in (1, 2))
        times = FirstTokenTime(one, max(0.0, two - one))  # the second prompt is free while a step reads the weights
        if setup.batching == "fixed":
            return FixedWindow(times, model.slo_s, setup.batch_size, setup.batch_delay_s)
        return BatchWindow(times, model.slo_s, setup.batch_size, setup.patience, setup.patience if setup.joins else 1.0)

    def begin(self, device: Device, process: Process, calls: Sequence[Call], now: float) -> None:
        """Begin with requests, or let them join those that decode.

        ``device.turns`` has been advanced to ``now``. Requests that come during a prompt step have the next one.
        """
        for call in calls:
            call.left = call.spec.num_output_tokens - 1
            _note_waits(call, process, now)
            held = device.kv_bytes.get(call.function.name, 0)
            device.kv_bytes[call.function.name] = held + call.kv_bytes
        process.stages = []
        process.joining += calls
        if process.prompts:
            return
        if process.stretch is not None:
            # Each sequence has come as far as the stretch has; a step that is cut off counts by its part.
            unserved_s = device.turns.end(process.engine.key)
            share = 1.0 - unserved_s / process.stretch.work_s
            for call in process.decoding:
                call.left = max(0.0, call.left - share * process.stretch.num_steps)
            process.work_s -= unserved_s
            process.stretch = None
        self._begin_prompts(device, process, now)

    def go_on(self, device: Device, process: Process, now: float) -> list[Call]:
        """Note the tokens of the step or stretch that has ended, and begin the next; return the requests that end."""
        device.turns.end(process.engine.key)
        if process.prompts:
            for call in process.prompts:
                call.answered_from = now
            process.decoding += process.prompts
            process.prompts = []
        elif process.stretch is not None:
            for call in process.decoding:
                call.left -= process.stretch.num_steps
            process.stretch = None
        finished = [call for call in process.decoding if call.left <= 1e-6]
        process.decoding = [call for call in process.decoding if call.left > 1e-6]
        for call in finished:
            call.finished_at = now
            device.kv_bytes[call.function.name] -= call.kv_bytes
            if not device.kv_bytes[call.function.name]:
                del device.kv_bytes[call.function.name]
        if process.joining:
            self._begin_prompts(device, process, now)
        elif process.decoding:
            process.stretch = _stretch(process.engine.model, process.decoding)
            process.work_s += process.stretch.work_s
            device.turns.begin(process.engine.key, process.stretch.work_s)
        return finished

    def _begin_prompts(self, device: Device, process: Process, now: float) -> None:
        process.prompts, process.joining = process.joining, []
        for call in process.prompts:
            call.started_at = now
            call.batch_size = len(process.prompts)
        prompts = [(call.spec.num_prompt_tokens, call.function) for call in process.prompts]
        work_s = self._prompt_s(process.engine.model, prompts)
        process.work_s += work_s
        device.turns.begin(process.engine.key, work_s)

    def _prompt_s(self, model: Model, prompts: Sequence[tuple[int, SimulatedFunction]]) -> float:
        """Return the device time of one step of whole prompts, each with its number of tokens and function."""
        setup = self._setup
        priced = prompts if setup.alpha_s is None else prompts[:1]  # equation 2
        plan = synthetic_plan(SyntheticSequence(0, num, AdapterKey(one.name), one.rank) for num, one in priced)
        step_s = setup.loads.first_step_s + setup.prompt_factor * sum(model.cost.price(step_features(plan)))
        return step_s + (setup.alpha_s or 0.0) * (len(prompts) - 1)


def _stretch(model: Model, calls: Sequence[Call]) -> Stretch:
    """Return the steps until the first of the calls ends."""
    num_steps = min(call.left for call in calls)
    ranks = {call.function.name: call.function.rank for call in calls}
    context = sum(call.spec.num_prompt_tokens + call.spec.num_output_tokens - 1 - call.left for call in calls)
    step = StepFeatures(
        num_decodes=len(calls),
        num_prompts=0,
        num_prompt_tokens=0,
        num_sampled=len(calls),
        context_tokens=round(context + len(calls) * (num_steps + 1) / 2),
        prompt_pairs=0,
        num_adapters=len(ranks),
        sum_rank=sum(ranks.values()),
        max_rank=max(ranks.values()),
        num_adapted_decodes=len(calls),
        decode_row_rank=sum(call.function.rank for call in calls),
        prompt_row_rank=0,
        num_ranks=len(set(ranks.values())),
    )
    return Stretch(num_steps, num_steps * sum(model.cost.price(step)))


def _note_waits(call: Call, process: Process, now: float) -> None:
    """Note the time that a request waited for each stage of the cold start before it."""
    for name, began_at, ended_at in process.stages:
        waited_s = min(ended_at, now) - max(began_at, call.spec.arrival_s)
        if waited_s > 0.0:
            call.waited_s[name] = call.waited_s.get(name, 0.0) + waited_s
