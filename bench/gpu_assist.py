"""CPU-assisted LoRA on a GPU: the handoff, and a cold prompt's step against synchronous calls and against warm ones.

Synchronous calls are the same exchange with the waits on the host: the launching thread waits until the inputs have
arrived before it tells the workers, and until they are done before it launches what follows. Published for the exchange
without: 16 % less time of a prefill step (CaraServe, section 4.1). Then the same step beside the copy of its adapter:
the device takes over the layers that arrive in time.
"""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from gpu_rig import Engine, Sizes, wait, wall_seconds
from msgspec import structs

from manylora.core.plan import IN_HOST, AdapterLoad, StepPlan, StepResult
from manylora.core.ports import Work
from manylora.core.types import AdapterVersion, Tier
from manylora.execution.assist.exchange import Assistant
from manylora.execution.assist.words import Words, write_word
from manylora.execution.assist.workers import DeviceStream, Supervisor, Worker, WorkerTask
from manylora.execution.runner import OffDevice

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))
from thread_stream import ThreadStream, await_word

NUM_HANDOFFS = 1000


class SynchronousStream:
    """A stream whose flags are written and awaited by the launching thread."""

    def __init__(self, stream: DeviceStream, device: torch.device) -> None:
        self._device = device
        self.host_memory, self.copy, self.join, self.close = stream.host_memory, stream.copy, stream.join, stream.close
        self.wait = stream.wait

    def write_value(self, words: Words, index: int, value: int) -> None:
        self.join()
        wait(self._device)
        write_word(words, index, value)

    def wait_value(self, words: Words, index: int, value: int) -> None:
        await_word(words, index, value)


def open_streams(device: torch.device) -> dict[str, DeviceStream]:
    """Return the streams of this machine by name, the one in use first."""
    if device.type != "cuda":
        return {"thread": ThreadStream()}
    from cuda.bindings import driver

    from manylora.execution.assist.cuda import CudaStream, HostFunctionStream

    return {"memory operations": CudaStream(device, driver), "host functions": HostFunctionStream(device, driver)}


def assist_rows(
    engine: Engine, sizes: Sizes, versions: dict[int, tuple[AdapterVersion, int]], device: torch.device
) -> list[dict[str, Any]]:
    """Return the rows of the section; ``versions`` are adapters by rank, resident, each with the next free page."""
    rows: list[dict[str, Any]] = []
    served = engine.runner._assistant
    for name, stream in open_streams(device).items():
        rows.append({"what": "handoff", "stream": name, "us": handoff_s(stream, device) * 1e6})
        for rank, (version, page) in versions.items():
            for num_tokens in (16, 64, 256) if device.type == "cuda" else (5,):
                rows.append(
                    {"what": "prompt", "stream": name, "rank": rank, "tokens": num_tokens}
                    | prompt_row(engine, sizes, stream, version, page, num_tokens)
                )
    engine.runner._assistant = served
    return rows


def handoff_s(stream: DeviceStream, device: torch.device) -> float:
    """Return the time of an exchange without work: the flag to a worker and back, on the stream."""
    worker, supervisor = Worker(stream, NUM_HANDOFFS), Supervisor()
    task = WorkerTask.of(stream.host_memory(64), (), None)

    def exchanges() -> None:
        worker.begin()
        supervisor.watch([worker])
        for _ in range(NUM_HANDOFFS):
            worker.wait(worker.post(task))
        stream.join()
        wait(device)
        worker.end()

    took = wall_seconds(exchanges, device, 5) / NUM_HANDOFFS
    worker.close()
    supervisor.close()
    return took


def prompt_row(
    engine: Engine, sizes: Sizes, stream: DeviceStream, version: AdapterVersion, page: int, num_tokens: int
) -> dict[str, float]:
    """Return the step of one prompt: adapter on the device, assisted, and assisted by synchronous calls."""
    pages = range(page, page - (-num_tokens // engine.base.page.block_size))
    warm = StepPlan(step_id=1, sequences=(engine._sequence(0, 0, num_tokens, pages, version),))
    cold = replace(warm, sequences=tuple(structs.replace(part, placement=IN_HOST) for part in warm.sequences))
    image = engine.executor._host._adapters[version.key].in_place()
    times = {"resident ms": wall_seconds(lambda: engine.runner.run(warm), engine.device, sizes.rounds) * 1e3}
    for name, kind in (("assisted ms", stream), ("synchronous ms", SynchronousStream(stream, engine.device))):
        assistant = Assistant(kind, engine.base)
        assistant.prepare(image.memory)
        assistant._measuring.shutdown()  # at the end of the measurement
        engine.runner._assistant = assistant
        step_s = wall_seconds(
            lambda: engine.runner.run(cold, OffDevice({version.key: image})), engine.device, sizes.rounds
        )
        times[name] = step_s * 1e3
        if kind is stream:
            times |= taking_over(engine, sizes, cold, version, page)
        stop(assistant)
    return times | {"saved": 1.0 - times["assisted ms"] / times["synchronous ms"]}


def taking_over(engine: Engine, sizes: Sizes, plan: StepPlan, version: AdapterVersion, page: int) -> dict[str, float]:
    """Return the step of a prompt that begins with the copy of its adapter, and the share that is left to the CPU."""
    load = AdapterLoad(version=version, tier=Tier.DEVICE, pages=tuple(range(page - version.num_pages, page)))
    steps: list[StepResult] = []
    for _ in range(2 + sizes.rounds):
        engine.executor.drop_adapter(version.key, Tier.DEVICE)
        works: list[Work] = [engine.executor.load_adapter(load, 0.0), engine.executor.launch(plan, 0.0)]
        while any(work.poll(0.0) is None for work in works):
            time.sleep(0.0005)
        result = works[1].poll(0.0)
        assert isinstance(result, StepResult) and not result.failed
        steps.append(result)
    return {
        "taking over ms": 1e3 * statistics.median([one.device_s or 0.0 for one in steps[2:]]),
        "left to the CPU": statistics.median([one.cpu_share for one in steps[2:]]),
    }


def stop(assistant: Assistant) -> None:
    """End the workers and leave the stream open."""
    assistant._supervisor.close()
    for worker in assistant._workers:
        worker.close()
