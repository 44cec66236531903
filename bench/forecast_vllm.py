"""vLLM in the forecast on traces: its engine on this processor, in a process of its own, and its twin in the simulator.

A random Llama of two layers on one thread, so small that a run has many requests; adapters in 8 slots and 16 places in
host memory; steps wait for loads. Reads are slowed down to 2.5 MB/s, and take up to a tenth of a second, as of an
adapter of a 7B model from a disk. The sweep is of drawn bursts, and every request names one of the adapters, so that
loads happen all the time.

A run finds the adapters that the requests before it have left. The twin begins with the same: what was served before a
run is known before it.
"""

from __future__ import annotations

import itertools
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
from forecast import Machine, OwnSpeed, Predicted, machine_of
from planner_live import SCHEDULER
from vllm_child import Child, Round, make_base
from vllm_log import log_lines
from vllm_twin import config_of, vllm_rules

from manylora.core.adapters.shape import BaseShape
from manylora.core.costs.step_log import LoadRecord, LogHeader, LogLine, StepRecord
from manylora.lab.bench.sweep import WARM_UP, draw_burst, write_synthetic_adapter
from manylora.lab.catalog.models import base_shape
from manylora.lab.costs.model import FixedCost
from manylora.lab.measure import RequestRecord
from manylora.lab.sim.run.contents import adapter_versions
from manylora.lab.sim.setup import read_dims
from manylora.lab.workloads import RequestSpec, Workload

__all__ = ["VllmLive", "VllmPredicted", "start_vllm"]

NUM_SLOTS, NUM_HOST = 8, 16
HIDDEN, INNER, LAYERS, CONTEXT = 128, 352, 2, 2048
DISK_BYTES_PER_S = 2.5e6
BLOCK = 128
"""Tokens of a block of KV in vLLM on a CPU."""

STEP_S = 0.01
"""A typical step: the unit of delays in the sweep."""

APART_S = 10.0
"""Between the requests that bring up what a run finds, in virtual time."""


class VllmLive:
    """vLLM's engine, which serves one workload after the other.

    Args:
        adapters: A workload with the adapters that it serves.
        folder: Where their files and the base are written.
        python: Of vLLM's environment.
        write: Receives the log of steps and loads.

    Attributes:
        found: The adapters that were there before what was served last, the one that ran last in the end.
    """

    def __init__(self, adapters: Workload, folder: Path, python: Path, write: Callable[[LogLine], None]) -> None:
        make_base(folder, hidden=HIDDEN, inner=INNER, num_layers=LAYERS, max_tokens=CONTEXT)
        self.base: BaseShape = base_shape(read_dims(str(folder / "base")), block_size=16)
        self.adapters = adapters.adapters
        self._versions, rng = adapter_versions(self.adapters, self.base), np.random.default_rng(0)
        for spec in self.adapters:
            write_synthetic_adapter(folder / spec.name, self.base, spec.rank, rng, targets=spec.targets)
        self._write = write
        self.spent_s: list[float] = []
        self._recent: OrderedDict[str, None] = OrderedDict()
        options = {
            "max_loras": NUM_SLOTS,
            "max_cpu_loras": NUM_HOST,
            "max_lora_rank": max(spec.rank for spec in self.adapters),
            "max_num_seqs": SCHEDULER.max_num_seqs,
            "max_num_batched_tokens": SCHEDULER.max_num_batched_tokens,
            "max_model_len": CONTEXT,
            "num_gpu_blocks_override": SCHEDULER.max_num_seqs * CONTEXT // BLOCK,  # memory is never short
            "enable_chunked_prefill": True,
        }
        one_thread = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        self._child = Child("vllm", folder, options, python=str(python), environment=one_thread)
        self._num_rounds = 0
        self.found: list[str] = []

    def serve(self, workload: Workload) -> list[RequestRecord]:
        """Serve a workload to its end, and return its requests in order of arrival."""
        self._num_rounds += 1
        served = self._child.serve(workload.requests, bytes_per_s=DISK_BYTES_PER_S, seed=self._num_rounds)
        lines = log_lines(self.base, self._versions, served.steps, served.served.loads, waits=True)
        self.found = list(self._recent)[-NUM_HOST:]
        for line in lines:
            self._write(line)
        self.spent_s += [step.spent_s for step in served.steps]
        records = records_of(workload, served)
        for one in sorted(records, key=lambda record: record.finished_at):
            self._recent[one.adapter] = None
            self._recent.move_to_end(one.adapter)
        return records

    def close(self) -> None:
        """End its process."""
        self._child.close()


def records_of(workload: Workload, done: Round) -> list[RequestRecord]:
    """Return the requests of a workload, which were served in this round, in order of arrival."""
    ranks = {spec.name: spec.rank for spec in workload.adapters}
    records = []
    for number, (spec, (key, (name, at))) in enumerate(zip(workload.requests, done.served.asked.items(), strict=True)):
        times = done.served.times[key]
        assert len(times) == spec.num_output_tokens and name == spec.adapter
        record = RequestRecord(
            request_id=str(number),
            adapter=name,
            rank=ranks[name],
            num_prompt_tokens=spec.num_prompt_tokens,
            num_output_tokens=len(times),
            arrived_at=at,
            admitted_at=None,
            first_token_at=times[0],
            finished_at=times[-1],
        )
        records.append(record)
    return records


class VllmPredicted(Predicted):
    """Simulated runs, each of which begins with the adapters that the last live run found."""

    def __init__(self, machine: Machine, live: VllmLive) -> None:
        rules = vllm_rules(
            num_slots=NUM_SLOTS,
            num_host=NUM_HOST,
            num_seats=SCHEDULER.max_num_seqs,
            num_tokens=SCHEDULER.max_num_batched_tokens,
        )
        super().__init__(machine, config_of(rules, live.base, FixedCost()))
        self._live = live

    def serve(self, workload: Workload, name: str, speeds: Sequence[float] | OwnSpeed) -> list[RequestRecord]:
        """Return the requests of a run in order of arrival."""
        found = self._live.found
        if isinstance(speeds, OwnSpeed):
            speeds = replace(speeds, began_s=len(found) * APART_S)
        return super().serve(after(workload, found), name, speeds)[len(found) :]


def after(workload: Workload, recent: Sequence[str]) -> Workload:
    """Return a workload behind requests that bring up adapters, the one that ran last in the end."""
    before = [
        RequestSpec(arrival_s=number * APART_S, num_prompt_tokens=2, num_output_tokens=1, adapter=name)
        for number, name in enumerate(recent)
    ]
    begin = len(before) * APART_S
    behind = [replace(one, arrival_s=one.arrival_s + begin) for one in workload.requests]
    return replace(workload, requests=(*before, *behind))


def bursts(adapters: Sequence[str], rng: Random) -> Iterator[list[RequestSpec]]:
    """Yield the bursts of the sweep, without end; every request names an adapter."""
    for _ in itertools.count():
        burst = draw_burst(
            rng,
            max_num_seqs=SCHEDULER.max_num_seqs,
            max_context=CONTEXT,
            max_tokens=2 * CONTEXT,  # enough full chunks: long prompts are most of a trace's time
            num_adapters=len(adapters),
            step_s=STEP_S,
        )
        named = [rng.randrange(len(adapters)) if one is None else one for one in burst.adapters]
        yield [
            RequestSpec(
                arrival_s=burst.stagger_s if index >= burst.num_requests / 2 else 0.0,
                num_prompt_tokens=burst.num_prompt_tokens,
                num_output_tokens=burst.num_output_tokens,
                adapter=adapters[named[index % len(named)]],
            )
            for index in range(burst.num_requests)
        ]


def start_vllm(
    adapters: Workload, folder: Path, python: Path, write: Callable[[LogLine], None], sweep_s: float
) -> tuple[Machine, VllmLive, VllmPredicted]:
    """Start vLLM's engine, sweep over it, and return it with its calibration and its twin."""
    log: list[LogLine] = []

    def take(line: LogLine) -> None:
        log.append(line)
        write(line)

    live = VllmLive(adapters, folder, python, take)
    began = time.monotonic()
    for number, requests in enumerate(bursts([spec.name for spec in live.adapters], Random(0))):
        if number == WARM_UP:
            log.clear()
            live.spent_s.clear()
            began = time.monotonic()
        live.serve(replace(adapters, requests=tuple(requests)))
        if number > WARM_UP and time.monotonic() - began > sweep_s:
            break
    header = LogHeader(base=live.base, num_pages=2)
    loads = [line for line in log if isinstance(line, LoadRecord)]
    steps = [line for line in log if isinstance(line, StepRecord)]
    # Two runs of their own: no step is beside a load.
    machine = machine_of([header, *loads, header, *steps], live.spent_s)
    return machine, live, VllmPredicted(machine, live)
