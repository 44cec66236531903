"""The course of a batch in a process: prompts, then decoding until each request has its answer."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

from manylora.lab.functions.batch import Call, decode_stretch
from manylora.lab.functions.catalog import Model, SimulatedFunction
from manylora.lab.functions.device import Device, Process

__all__ = ["begin_batch", "step_done"]

PromptTime = Callable[[Model, list[tuple[int, SimulatedFunction]]], float]


def begin_batch(device: Device, process: Process, calls: Seq[Call], now: float, prompt_s: PromptTime) -> None:
    """Begin with requests, or let them join those that decode.

    ``device.turns`` has been advanced to ``now``. Requests that come during a prompt step have the next one.
    """
    for call in calls:
        call.device = device.number
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
    _begin_prompts(device, process, now, prompt_s)


def step_done(device: Device, process: Process, now: float, prompt_s: PromptTime) -> list[Call]:
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
        _begin_prompts(device, process, now, prompt_s)
    elif process.decoding:
        process.stretch = decode_stretch(process.engine.model.cost, process.decoding)
        process.work_s += process.stretch.work_s
        device.turns.begin(process.engine.key, process.stretch.work_s)
    return finished


def _begin_prompts(device: Device, process: Process, now: float, prompt_s: PromptTime) -> None:
    process.prompts, process.joining = process.joining, []
    for call in process.prompts:
        call.started_at = now
        call.batch_size = len(process.prompts)
    work_s = prompt_s(process.engine.model, [(one.spec.num_prompt_tokens, one.function) for one in process.prompts])
    process.work_s += work_s
    device.turns.begin(process.engine.key, work_s)


def _note_waits(call: Call, process: Process, now: float) -> None:
    """Note the time that a request waited for each stage of the cold start before it."""
    for name, began_at, ended_at in process.stages:
        waited_s = min(ended_at, now) - max(began_at, call.spec.arrival_s)
        if waited_s > 0.0:
            call.waited_s[name] = call.waited_s.get(name, 0.0) + waited_s
