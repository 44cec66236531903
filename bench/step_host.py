"""What does a step cost the host, and how often does it launch and wait: captured and eager, at any context?

    python bench/step_host.py [--quick]

A GPU is not needed: launches are counted by torch's dispatch and by Triton's interpreter, on a toy model of one layer
and of two, and reckoned for 32. Waits are reads of values of the device. The host's time is that of a step's inputs and
of the sampler's numbers, for 128 sequences, with a replay that does nothing; and beside it that of the engine's loop
for the same step, with the real core on an executor that only waits, by part. It writes `results/step_host.md`.
"""

from __future__ import annotations

import os
import sys
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from time import perf_counter
from types import SimpleNamespace
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

import torch
from decision import synthetic_version
from gpu_rig import SMOKE, Engine
from launch_counter import counted_launches
from msgspec.structs import replace as replaced
from publishing import arguments, publish, table

from manylora.core.config import EngineConfig, ModelConfig, SchedulerConfig
from manylora.core.engine.core import EngineCore
from manylora.core.engine.steps.plan_ahead import fill_in
from manylora.core.plan import AdapterLoad, LoadResult, StepPlan, StepResult
from manylora.core.ports import CoreParts
from manylora.core.types import AdapterKey, Request, SampledToken, SamplingParams, Tier
from manylora.execution.device import DeviceOps, describe_machine
from manylora.execution.sampling.draw import row_numbers
from manylora.lab.catalog.models import base_shape
from manylora.lab.sim.run.executor import SimulatedWork
from manylora.lab.workloads import AdapterSpec
from manylora.serving.hosting.engine.observer import Observer
from manylora.serving.hosting.protocol import Turn, decode_message, encode

NUM_SEQS, CONTEXTS, LAYERS = 128, (512, 8192, 32768), 32
NUM_ADAPTERS, STEP_S = 16, 0.008
PARTS = {
    "collect": "tokens taken in, counted and observed (`EngineCore.collect`)",
    "launch": "the next step planned ahead (`EngineCore.launch`)",
    "fill_in": "its tokens filled in, on the step's thread",
    "encode": "the message to the API process",
    "decode": "the same, read there",
}
"""What the loop does in a step, beside the executor's own work."""
WAITS = ("_local_scalar_dense", "is_nonzero", "item", "masked_select", "nonzero")


def engine_of(num_layers: int, num_seqs: int) -> Engine:
    model = {**SMOKE.model, "num_hidden_layers": num_layers, "max_position_embeddings": 1 << 16}
    return Engine(replace(SMOKE, model=model, batches=(num_seqs,), step_tokens=512, num_pages=120), torch.device("cpu"))


def steps(engine: Engine) -> dict[str, StepPlan]:
    """Return a step of each kind: decoding, and decoding beside a prompt."""
    specs = [AdapterSpec(name=f"a{i}", rank=4, targets=("q_proj", "v_proj")) for i in range(2)]
    versions = list(engine.versions(specs).values())
    page = 60
    for version in versions:
        page = engine.load(version, page)
    decode = engine.plan(2, versions, 0)
    prompt = replaced(engine.prompt_plan().sequences[0], seq_id=9, pages=tuple(range(40, 44)))
    return {"decoding": decode, "decoding and a prompt": StepPlan(step_id=2, sequences=(*decode.sequences, prompt))}


def count(num_layers: int) -> dict[tuple[str, str], Counter[str]]:
    """Return the launches and waits of steps, eager and captured, by kind."""
    engine = engine_of(num_layers, 4)
    runner, found = engine.runner, {}
    runner.sampler._is_fused = True
    graphs = runner._graphs
    for kind, plan in steps(engine).items():
        sampled = [replaced(s, sampling=SamplingParams(top_p=0.9, seed=1)) for s in plan.sequences]
        plan = replace(plan, sequences=tuple(sampled))
        for how in ("eager", "captured"):
            runner._graphs = graphs if how == "captured" else None
            runner.run(plan)
            if how == "captured":
                assert graphs is not None
                graphs._graphs = dict.fromkeys(graphs._graphs, lambda: None)
            with counted_launches() as counts:
                runner.run(plan)
            found[kind, how] = counts + Counter({"replay": int(how == "captured")})
    engine.parts.close()
    return found


def counted() -> list[dict[str, Any]]:
    one, two = count(1), count(2)
    rows = []
    for (kind, how), counts in one.items():
        by_layer = two[kind, how].total() - counts.total()
        waits = sum(two[kind, how][name] for name in WAITS) + 1  # the read of the tokens
        launches = counts.total() + (LAYERS - 1) * by_layer
        rows.append({"step": kind, "how": how, "launches": launches, "of a layer": by_layer, "waits": waits})
    return rows


def host(rounds: int) -> list[dict[str, Any]]:
    """Return the host's microseconds for a captured step, by context: its inputs, and the numbers of the sampler.

    ``ahead`` are those of its order and outline, which another thread makes while the step before is running.
    """
    rows = []
    engine = engine_of(1, NUM_SEQS)
    graphs = engine.runner._graphs
    assert graphs is not None
    own: Any = graphs
    own._model = lambda **arguments: SimpleNamespace(logits=torch.zeros(1, len(arguments["logits_to_keep"]), 64))
    for context in CONTEXTS:
        width = (context + rounds) // engine.base.page.block_size + 1
        own._attention.tables = type(own._attention.tables)(DeviceOps(engine.device), num_lines=200, width=width)
        sequences = [
            replaced(s, tokens=[1] * (context + rounds + 1), start=context, pages=list(range(width)))
            for s in engine.plan(NUM_SEQS, (), 0).sequences
        ]
        prompt = replaced(sequences[0], seq_id=999, start=0, num_tokens=256, tokens=[1] * 256)
        for kind, beside in (("decoding", []), ("decoding and a prompt", [prompt])):
            times, ahead = [], []
            for number in range(rounds + 2):
                moved = [replaced(s, start=s.start + number % rounds) for s in sequences[len(beside) :]] + beside
                began = perf_counter()
                outline = engine.runner.arrange(moved).outline
                arranged = perf_counter()
                assert outline is not None, "it is too large for a graph"
                logits = graphs.run(moved, (), outline)
                assert logits is not None, "no graph runs it"
                row_numbers(moved, 64)
                times.append(perf_counter() - arranged)
                ahead.append(arranged - began)
                graphs._graphs = dict.fromkeys(graphs._graphs, lambda: None)
            us, ahead_us = (1e6 * median(each[2:]) for each in (times, ahead))
            rows.append({"step": kind, "context": context, "us": us, "ahead": ahead_us})
    engine.parts.close()
    return rows


@dataclass(slots=True)
class InFlight:
    """A step that is over once it has a result."""

    plan: StepPlan
    result: StepResult | None = None
    ready_at: float = float("inf")

    def poll(self, now: float) -> StepResult | None:
        return self.result


class WaitingExecutor:
    """Keeps steps until they are run."""

    def __init__(self) -> None:
        self.waiting: deque[InFlight] = deque()

    def launch(self, plan: StepPlan, now: float) -> InFlight:
        self.waiting.append(InFlight(plan))
        return self.waiting[-1]

    def load_adapter(self, load: AdapterLoad, now: float) -> SimulatedWork:
        return SimulatedWork(now, LoadResult())

    def drop_adapter(self, key: AdapterKey, tier: Tier) -> None:
        pass


def full_core(executor: WaitingExecutor, observer: Observer) -> EngineCore:
    """Return a core in which all sequences of a step have come, each with an adapter."""
    core = EngineCore(
        CoreParts(base=base_shape("llama-3-8b"), num_pages=NUM_SEQS * 128, executor=executor, is_accelerated=True),
        EngineConfig(model=ModelConfig(model="base"), scheduler=SchedulerConfig(max_num_seqs=NUM_SEQS)),
        sinks=[observer],
    )
    for index in range(NUM_ADAPTERS):
        core.adapters.register(f"a{index}", synthetic_version(index), 0.0)
    sampling = SamplingParams(max_tokens=1900, ignore_eos=True)
    for index in range(NUM_SEQS):
        model = f"a{index % NUM_ADAPTERS}"
        core.add_request(Request(request_id=f"{index:036x}", prompt=(1,) * 64, sampling=sampling, model=model), 0.0)
    return core


def loop(rounds: int) -> list[dict[str, Any]]:
    """Return the loop's microseconds for a step of decoding sequences that was planned ahead, by part."""
    executor, observer = WaitingExecutor(), Observer()
    core, now, tokens = full_core(executor, observer), 0.0, dict[int, SampledToken]()
    took: dict[str, list[float]] = {name: [] for name in PARTS}

    def timed(name: str, work: Callable[..., Any], *arguments: object) -> Any:
        began = perf_counter()
        made = work(*arguments)
        took[name].append(perf_counter() - began)
        return made

    for _ in range(2):  # the copies of adapters, then the first step
        core.launch(now)
        core.collect(now)
    core.launch(now)
    while len(took["encode"]) < 300 + rounds:  # the first steps teach the time of a step, and when to plan ahead
        now += 0.9 * STEP_S
        timed("launch", core.launch, now)
        step = executor.waiting.popleft()
        plan = timed("fill_in", fill_in, step.plan, tokens)
        tokens = {part.seq_id: SampledToken(token_id=7) for part in plan.sequences if part.is_sampled}
        step.result = StepResult(tokens=tokens)
        now += 0.1 * STEP_S
        outputs = timed("collect", core.collect, now)
        core.launch(now)
        timed("decode", decode_message, timed("encode", encode, Turn(outputs, observer.take())))
    assert len(outputs) == NUM_SEQS, "all decode"
    return [{"part": text, "us": 1e6 * median(took[name][300:])} for name, text in PARTS.items()]


def report(counts: list[dict[str, Any]], times: list[dict[str, Any]], parts: list[dict[str, Any]]) -> str:
    lines = [
        "# Steps on the host",
        "",
        f"`python bench/step_host.py` on {describe_machine(torch.device('cpu'))}.",
        "",
        f"Launches of a step of {LAYERS} layers with two adapters and top-p, counted on one layer and two. The read of",
        "the tokens is the one wait.",
        "",
        *table(
            ("step", "how", "launches", "of a layer", "waits"),
            ((r["step"], r["how"], r["launches"], r["of a layer"], r["waits"]) for r in counts),
            left=2,
        ),
        "",
        f"Time of the host for a captured step of {NUM_SEQS} sequences: its inputs, and the sampler's numbers.",
        "*Ahead* are its order and outline, which another thread makes while the step before is running.",
        "",
        *table(
            ("step", "tokens each", "us", "ahead"),
            ((r["step"], f"{r['context']:,}", f"{r['us']:.0f}", f"{r['ahead']:.0f}") for r in times),
        ),
        "",
        f"Time of the engine's loop for a step of {NUM_SEQS} decoding sequences, planned ahead, without an executor.",
        "",
        *table(("part", "us"), ((r["part"], f"{r['us']:.0f}") for r in parts)),
    ]
    return "\n".join(lines)


def main() -> None:
    options = arguments(__doc__, quick="few rounds").parse_args()
    rounds = 5 if options.quick else 60
    counts, times, parts = counted(), host(rounds), loop(10 * rounds)
    figures = {"launches": counts, "host": times, "loop": parts}
    publish("step_host", figures, report(counts, times, parts), is_kept=not options.quick)


if __name__ == "__main__":
    main()
