"""A cold request on the simulated executor, started in each way: the points of `cold_map.py`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

import msgspec

from manylora.core.adapters.shape import BaseShape
from manylora.core.plan import ARRIVING, IN_HOST, ON_DEVICE, AdapterLoad, Placement, StepPlan, StepResult
from manylora.core.types import AdapterVersion, Tier
from manylora.lab.catalog.hardware import HARDWARE
from manylora.lab.catalog.models import base_shape
from manylora.lab.costs.model import SyntheticSequence, synthetic_plan
from manylora.lab.costs.roofline import RooflineCost
from manylora.lab.costs.workers import AssistCost, CpuWorkers
from manylora.lab.sim.run.cold_steps import ColdSteps
from manylora.lab.sim.run.contents import adapter_versions
from manylora.lab.sim.run.executor import SimulatedExecutor
from manylora.lab.workloads import AdapterSpec

MODEL = "llama-2-7b"
DEVICES = ("a10", "a40", "a100-80", "h100")
MODULES = {
    "q, k, v": ("q_proj", "k_proj", "v_proj"),
    "all": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
}
RANKS = (16, 64, 128)
PROMPTS = (16, 64, 128, 256, 512, 1024)
LINKS = (6e9, 12e9, 25e9, 52e9)
"""Pageable memory or half a slot; PCIe 3.0, 4.0 and 5.0 x16."""
CORES = (8, 16, 32, 64)
QUEUED = (0, 1, 2, 4, 8, 16)
BATCH, CONTEXT = 16, 512
"""Sequences that decode beside the cold request, each with an adapter of its rank, and their tokens of context."""
CORE_BYTES_PER_S, HOST_BYTES_PER_S = 10e9, 150e9
"""Assumed rate at which a core reads weights, and all cores of a host together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One cold request; times in seconds.

    Args:
        queued: Copies of equal adapters on the link before its own.
        copy_s: Duration of its own copy.
        step_s: The step with its prompt if the adapter were resident.
        decode_s: A step of the batch without it.
        wait_s, layers_s, assist_s, both_s: Time to first token, by the way in which it starts.
    """

    device: str
    modules: str
    rank: int
    prompt: int
    link_bytes_per_s: float
    cores: int
    queued: int
    copy_s: float
    step_s: float
    decode_s: float
    wait_s: float
    layers_s: float
    assist_s: float
    both_s: float

    @property
    def best_s(self) -> float:
        """Time in the best of all ways."""
        return min(self.wait_s, self.layers_s, self.assist_s, self.both_s)

    @property
    def gain(self) -> float:
        """Share of the time of the better alternative that assistance saves; negative if it loses."""
        return 1.0 - self.assist_s / min(self.wait_s, self.layers_s)


class Rig:
    """A device with its link, and an adapter: all that does not depend on the request."""

    def __init__(self, device: str, modules: str, rank: int, link_bytes_per_s: float, base: BaseShape) -> None:
        hardware = replace(HARDWARE[device], link_bytes_per_s=link_bytes_per_s)
        self.device, self.modules, self.rank, self.link_bytes_per_s = device, modules, rank, link_bytes_per_s
        self.cost = RooflineCost(MODEL, hardware, targets=MODULES[modules])
        names = (AdapterSpec(name=str(index), rank=rank, targets=MODULES[modules]) for index in range(BATCH + 1))
        self.warm: list[AdapterVersion] = list(adapter_versions(names, base).values())
        self.cold = self.warm.pop()
        self._batch = [SyntheticSequence(CONTEXT, 1, version.key, version.rank) for version in self.warm]
        self.decode_s = self.cost.step_time_s(synthetic_plan(self._batch))

    def point(self, prompt: int, cores: int, queued: int) -> Point:
        """Start a request in each way."""
        loads = [AdapterLoad(version=one, tier=Tier.DEVICE) for one in (*self.warm[:queued], self.cold)]
        memory = min(HOST_BYTES_PER_S, cores * CORE_BYTES_PER_S)

        def first_token_s(placement: Placement, *, takes_over: bool = False) -> float:
            workers = CpuWorkers(cores=cores, memory_bytes_per_s=memory, takes_over=takes_over)
            assist, num_layers = AssistCost(self.cost, workers), self.cost.dims.num_layers
            executor = SimulatedExecutor(self.cost, vocab_size=2, cold_steps=ColdSteps(self.cost, num_layers, assist))
            arrives_at = max(executor.load_adapter(load, 0.0).ready_at for load in loads)
            begins_at = self._next_step_s(arrives_at) if placement is ON_DEVICE else 0.0
            step = executor.launch(self._plan(prompt, placement), begins_at)
            if isinstance(step.result, StepResult) and step.result.late:  # it waits for all of its adapter now
                begins_at = self._next_step_s(arrives_at, step.ready_at)
                step = executor.launch(self._plan(prompt, ON_DEVICE), begins_at)
            return step.ready_at

        return Point(
            device=self.device,
            modules=self.modules,
            rank=self.rank,
            prompt=prompt,
            link_bytes_per_s=self.link_bytes_per_s,
            cores=cores,
            queued=queued,
            copy_s=self.cost.load_time_s(loads[-1]),
            step_s=self.cost.step_time_s(self._plan(prompt, ON_DEVICE)),
            decode_s=self.decode_s,
            wait_s=first_token_s(ON_DEVICE),
            layers_s=first_token_s(ARRIVING),
            assist_s=first_token_s(IN_HOST),
            both_s=first_token_s(IN_HOST, takes_over=True),
        )

    def _next_step_s(self, arrives_at: float, ended_at: float = 0.0) -> float:
        """Return the begin of the first step with weights that arrive then, after a step that ended earlier or not."""
        return ended_at + self.decode_s * math.ceil(max(0.0, arrives_at - ended_at) / self.decode_s)

    def _plan(self, prompt: int, placement: Placement) -> StepPlan:
        plan = synthetic_plan([*self._batch, SyntheticSequence(0, prompt, self.cold.key, self.cold.rank)])
        *batch, cold = plan.sequences
        return StepPlan(step_id=0, sequences=(*batch, msgspec.structs.replace(cold, placement=placement, pages=[])))


def make_points(*, is_quick: bool = False) -> Iterator[Point]:
    """Start a cold request everywhere on the map."""
    base = base_shape(MODEL, block_size=16)
    prompts, cores, ranks = ((64, 1024), (32,), (64,)) if is_quick else (PROMPTS, CORES, RANKS)
    for device, modules, rank, link in product(DEVICES, MODULES, ranks, LINKS):
        rig = Rig(device, modules, rank, link, base)
        for prompt, num_cores, queued in product(prompts, cores, QUEUED):
            yield rig.point(prompt, num_cores, queued)
