"""What does a step cost the host, and how often does it launch and wait: captured and eager, at any context?

    python bench/step_host.py [--quick]

A GPU is not needed: launches are counted by torch's dispatch and by Triton's interpreter, on a toy model of one layer
and of two, and reckoned for 32. Waits are reads of values of the device. The host's time is that of a step's inputs and
of the sampler's numbers, for 128 sequences, with a replay that does nothing. It writes `results/step_host.md`.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import perf_counter
from types import SimpleNamespace
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

import torch
from gpu_rig import SMOKE, Engine
from launch_counter import counted_launches
from msgspec.structs import replace as replaced
from publishing import arguments, publish, table

from manylora.core.plan import StepPlan
from manylora.core.types import SamplingParams
from manylora.execution.device import DeviceOps, describe_machine
from manylora.execution.sampling.draw import row_numbers
from manylora.lab.workloads import AdapterSpec

NUM_SEQS, CONTEXTS, LAYERS = 128, (512, 8192, 32768), 32
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
    runner._sampler._is_fused = True
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
    """Return the host's microseconds for a captured step, by context: its inputs, and the numbers of the sampler."""
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
            times = []
            for number in range(rounds + 2):
                moved = [replaced(s, start=s.start + number % rounds) for s in sequences[len(beside) :]] + beside
                began = perf_counter()
                logits = graphs.run(moved, ())
                assert logits is not None, "no graph runs it"
                row_numbers(moved, 64)
                times.append(perf_counter() - began)
                graphs._graphs = dict.fromkeys(graphs._graphs, lambda: None)
            rows.append({"step": kind, "context": context, "us": 1e6 * median(times[2:])})
    engine.parts.close()
    return rows


def report(counts: list[dict[str, Any]], times: list[dict[str, Any]]) -> str:
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
        "",
        *table(("step", "tokens each", "us"), ((r["step"], f"{r['context']:,}", f"{r['us']:.0f}") for r in times)),
    ]
    return "\n".join(lines)


def main() -> None:
    options = arguments(__doc__, quick="few rounds").parse_args()
    counts, times = counted(), host(5 if options.quick else 60)
    publish("step_host", {"launches": counts, "host": times}, report(counts, times), is_kept=not options.quick)


if __name__ == "__main__":
    main()
