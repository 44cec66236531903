"""vLLM as it comes against vLLM with the plug-in: the same requests, in rounds that take turns, on one machine.

    make vllm ARGS="-k plugin"                        # makes the environment
    .venv-vllm/bin/python bench/vllm_plugin.py        # 15 minutes on two cores; --rounds 1 --seconds 4 to try it

A random Llama with 64 adapters of some 10 MB, 8 slots, requests that come at random (popularity: Zipf 0.92). Reads of
adapters are slowed down to a disk of 200 MB/s, or not. Each arm has an engine of its own that lives for all rounds. The
arm ``no loads`` is vLLM with requests for adapters that are in slots: its time between tokens is the others' target.

The simulator predicts each arm (``vllm_twin.py``). Its costs are fitted to steps and loads of this run: for vLLM's
rules to steps of ``no loads`` and loads of ``vllm``, else to steps and loads of ``no loads`` and ``no stall alone``,
which has loads beside steps. The orders, the evictions and the plug-in itself are predicted without having been seen.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ratios import median_interval, ratio_by_round
from vllm_child import Child, Round, make_base
from vllm_log import Load, Served, log_lines
from vllm_twin import (
    NUM_ADAPTERS,
    NUM_HOST,
    NUM_SEATS,
    NUM_SLOTS,
    RANK,
    draw_requests,
    make_adapters,
    plugin_rules,
    serve_simulated,
    vllm_rules,
)

from manylora.lab.bench.rounds import machine
from manylora.lab.catalog.models import base_shape
from manylora.lab.costs.calibrate import fit_profile
from manylora.lab.costs.fitted import FittedCost
from manylora.lab.sim.run.contents import adapter_versions
from manylora.lab.sim.setup import read_dims
from manylora.lab.workloads import RequestSpec

RESULTS = Path(__file__).parent / "results"
HIDDEN, INNER, LAYERS = 256, 704, 8
PACE = 200e6
LATE_S = 2.0
"""Time at which requests begin in the arm without loads, whose adapters are loaded before."""
APART_S = 60.0
"""Between the rounds in virtual time."""
WARM_UP_S = 2.0
ONE = {"policy": "strict-fifo", "eviction": "lru", "look_ahead": 0, "blocking_loads": True}
ARMS: dict[str, dict[str, Any] | None] = {
    "vllm": None,
    "no loads": None,
    "plug-in": {},
    "order alone": {**ONE, "policy": "adapter-aware"},
    "eviction alone": {**ONE, "eviction": "price"},
    "prefetching alone": {**ONE, "look_ahead": 10},
    "no stall alone": {**ONE, "policy": "fifo", "blocking_loads": False},
}


BESIDE = ["no loads", "no stall alone"]
"""Arms whose steps and loads tell what loads beside steps cost."""
READING = """`python bench/vllm_plugin.py` on {cpu}, {cores} cores: medians over rounds, in seconds; ratios are taken in
each round, with a 95 % interval of their median; bytes are those of all rounds, of which each has few. `no loads` asks
for adapters in slots alone.

What no rule does better, on two cores that the steps fill:

* A first token waits for the rest of the step in flight, its load, the rest of the step in which that ends (not in
  vLLM, whose steps wait for loads), and the step of its own prompt. So load + 10 % is out of reach.
* A load takes a core (to read, own, pack and copy 10 MB; on an AMD EPYC for a third of a step), and steps beside it are
  longer by half of that or more together.
* These requests in their order need at least 0.60 of the bytes of vLLM's rules if all requests to come are known, and
  0.78 if popularities are ([counted](vllm_loads.md)).
"""
GOALS = {
    "P99 between tokens, of `no loads`": "1.10",
    "the same between tokens beside a load": "1.10",
    "first token of a cold request": "load + 10 %",
    "bytes read and copied, of vLLM's": "0.5",
    "throughput, of vLLM's": "1",
}
"""What the plug-in is to reach."""
SHOWN = (
    "gap_p99_s",
    "gap_while_loading_p99_s",
    "cold_ttft_p50_s",
    "ttft_p50_s",
    "read_mb",
    "num_copies",
    "moved_mb",
    "tokens_per_s",
)


def make_files(folder: Path) -> None:
    """Write the base, without a tokenizer, and the adapters."""
    import torch
    from safetensors.torch import save_file

    make_base(folder, hidden=HIDDEN, inner=INNER, num_layers=LAYERS, max_tokens=512)
    ends = {"q": (HIDDEN, HIDDEN), "k": (HIDDEN, HIDDEN), "v": (HIDDEN, HIDDEN), "o": (HIDDEN, HIDDEN)}
    shapes = {f"self_attn.{name}_proj": shape for name, shape in ends.items()}
    shapes |= {"mlp.gate_proj": (HIDDEN, INNER), "mlp.up_proj": (HIDDEN, INNER), "mlp.down_proj": (INNER, HIDDEN)}
    for number in range(NUM_ADAPTERS):
        weights = {}
        for layer in range(LAYERS):
            for name, (num_in, num_out) in shapes.items():
                prefix = f"base_model.model.model.layers.{layer}.{name}"
                weights[f"{prefix}.lora_A.weight"] = torch.randn(RANK, num_in, dtype=torch.float32) * 0.02
                weights[f"{prefix}.lora_B.weight"] = torch.randn(num_out, RANK, dtype=torch.float32) * 0.02
        adapter = folder / f"a{number}"
        adapter.mkdir()
        save_file(weights, adapter / "adapter_model.safetensors")
        told = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "bias": "none"}
        told["target_modules"] = [name.partition(".")[2] for name in shapes]
        (adapter / "adapter_config.json").write_text(json.dumps(told))


def start_arm(name: str, folder: Path) -> Child:
    """Start an engine that lives for all rounds of an arm."""
    chosen: dict[str, Any] = {}
    if (options := ARMS[name]) is not None:
        config = {"kv_connector": "Manylora", "kv_role": "kv_both", "kv_connector_extra_config": options}
        chosen["kv_transfer_config"] = config
    return Child(
        name,
        folder,
        {
            "max_loras": NUM_SLOTS,
            "max_cpu_loras": NUM_HOST,
            "max_lora_rank": RANK,
            "max_num_seqs": NUM_SEATS,
            "num_gpu_blocks_override": 128,  # room for all requests, and for seven engines in memory
            "max_model_len": 512,
            **chosen,
        },
    )


def requests_of(arm: str, *, seconds: float, rate: float, seed: int) -> list[RequestSpec]:
    """Return the requests of a round for an arm."""
    if arm != "no loads":
        return draw_requests(seconds=seconds, rate=rate, seed=seed)
    first = [
        RequestSpec(arrival_s=0.0, num_prompt_tokens=16, num_output_tokens=8, adapter=f"a{number}")
        for number in range(NUM_SLOTS)
    ]
    drawn = draw_requests(seconds=seconds, rate=rate, seed=seed, num_asked=NUM_SLOTS)
    return first + [replace(one, arrival_s=one.arrival_s + LATE_S) for one in drawn]


def figures(served: Served) -> dict[str, float]:
    """Return the figures of a round."""
    asked, times, loads, took_s = served
    gaps = [pair for seen in times.values() for pair in itertools.pairwise(seen)]
    held = [end - begin for begin, end in gaps if any(a < end and begin < b for *_, a, b in loads)]
    cold, load_s = [], []
    for key, (name, at) in asked.items():
        first = times[key][0]
        own = [b - a for _, one, _, a, b in loads if one == name and a > at and b <= first]
        if own:
            cold.append(first - at)
            load_s.append(sum(own))
    size_mb = max((num_bytes for *_, num_bytes, _, _ in loads), default=0) / 1e6
    num_copies = sum(kind == "copy" for kind, *_ in loads)
    read_mb = sum(num_bytes for *_, num_bytes, _, _ in loads) / 1e6
    return {
        "gap_p99_s": quantile([end - begin for begin, end in gaps], 0.99),
        "gap_while_loading_p99_s": quantile(held, 0.99),
        "cold_ttft_p50_s": quantile(cold, 0.5),
        "cold_load_p50_s": quantile(load_s, 0.5),
        "ttft_p50_s": quantile([seen[0] - asked[key][1] for key, seen in times.items()], 0.5),
        "ttft_p99_s": quantile([seen[0] - asked[key][1] for key, seen in times.items()], 0.99),
        "read_mb": read_mb,
        "num_copies": float(num_copies),
        "moved_mb": read_mb + num_copies * size_mb,
        "tokens_per_s": sum(map(len, times.values())) / took_s,
    }


def quantile(values: list[float], share: float) -> float:
    """Return a quantile, 0 for no values."""
    return sorted(values)[min(int(share * len(values)), len(values) - 1)] if values else 0.0


class Twin:
    """Predicts arms from the steps and loads of others.

    Args:
        folder: Has the base.
        logs: Steps and loads of each round, by disk and arm.
    """

    def __init__(self, folder: Path, logs: dict[str, dict[str, list[Round]]]) -> None:
        self._base = base_shape(read_dims(str(folder / "base")), block_size=16)
        self._logs = logs
        self._versions = adapter_versions(make_adapters(), self._base)

    def predict(self, arm: str, disk: str, rounds: Sequence[tuple[str, dict[str, Any]]]) -> list[dict[str, float]]:
        """Return the figures of an arm's rounds on a disk.

        Args:
            arm: The arm.
            disk: One of the disks.
            rounds: The disk, the duration, the rate and the seed of each round, in order.
        """
        options = ARMS[arm]
        waits = options is None or bool(options.get("blocking_loads"))
        cost = self._cost(disk, ["no loads"], "vllm", waits=True) if waits else self._cost(disk, BESIDE, BESIDE[-1])
        requests, begins = [], []
        for number, (_, order) in enumerate(rounds):  # an engine goes on with the adapters that it has
            begins.append(number * APART_S)
            made = requests_of(arm, seconds=order["seconds"], rate=order["rate"], seed=order["seed"])
            requests += [replace(one, arrival_s=one.arrival_s + begins[-1]) for one in made]
        rules = vllm_rules() if options is None else plugin_rules(options)
        served = serve_simulated(requests, rules, self._base, cost, interference=cost.interference)
        return [
            figures(within(served, begin, begin + APART_S))
            for begin, (one, _) in zip(begins, rounds, strict=True)
            if one == disk
        ]

    def _cost(self, disk: str, stepping: Sequence[str], loading: str, *, waits: bool = False) -> FittedCost:
        of = self._logs[disk]
        steps = [step for arm in stepping for one in of[arm] for step in one.steps]
        loads = [load for one in of[loading] for load in one.served.loads]
        return FittedCost(
            fit_profile(log_lines(self._base, self._versions, steps, loads, waits=waits)), random.Random(0)
        )


def within(served: Served, begin: float, end: float) -> Served:
    """Return what was served of the requests that came, and the loads that began, in an interval; from its begin."""
    asked = {key: (name, at - begin) for key, (name, at) in served.asked.items() if begin <= at < end}
    times = {key: [at - begin for at in served.times[key]] for key in asked}
    loads: list[Load] = [(*what, a - begin, b - begin) for *what, a, b in served.loads if begin <= a < end]  # type: ignore[misc]
    return Served(asked, times, loads, max(seen[-1] for seen in times.values()))


def changes(measured: dict[str, dict[str, list[dict[str, float]]]], predicted: dict[str, Any]) -> str:
    """Return each arm's figures as shares of vLLM's, measured and predicted, as Markdown."""
    lines = []
    for disk, arms in measured.items():
        lines += ["", f"## Of vLLM's, measured and predicted: {disk}", "", f"| arm | {' | '.join(SHOWN)} |"]
        lines += ["|---" * (len(SHOWN) + 1) + "|"]
        for arm, rounds in arms.items():
            if arm != "vllm":
                cells = []
                for name in SHOWN:
                    live, told = (
                        statistics.median(one[name] for one in of[disk][arm])
                        / (statistics.median(one[name] for one in of[disk]["vllm"]) or 1.0)
                        for of in (measured, predicted)
                    )
                    cells.append(f"{live:.2f}, {told:.2f}")
                lines.append(f"| {arm} | {' | '.join(cells)} |")
            assert len(rounds) == len(predicted[disk][arm])
    return "\n".join(lines) + "\n"


def goals(results: dict[str, dict[str, list[dict[str, float]]]]) -> str:
    """Return what is to be reached, and what was by vLLM and by the plug-in with all of its parts, as Markdown."""

    def rounds(disk: str, arm: str, name: str) -> list[float]:
        return [one[name] for one in results[disk][arm]]

    def reached(disk: str, arm: str) -> list[str]:
        target, load_s = rounds(disk, "no loads", "gap_p99_s"), rounds(disk, arm, "cold_load_p50_s")
        after_s = [whole - load for whole, load in zip(rounds(disk, arm, "cold_ttft_p50_s"), load_s, strict=True)]
        wait, low, high = (1e3 * one for one in median_interval(after_s))
        return [
            str(ratio_by_round(rounds(disk, arm, "gap_p99_s"), target)),
            str(ratio_by_round(rounds(disk, arm, "gap_while_loading_p99_s"), target)),
            f"load of {1e3 * statistics.median(load_s):.0f} ms + {wait:.0f} ({low:.0f} to {high:.0f}) ms",
            f"{sum(rounds(disk, arm, 'moved_mb')) / sum(rounds(disk, 'vllm', 'moved_mb')):.2f}",
            str(ratio_by_round(rounds(disk, arm, "tokens_per_s"), rounds(disk, "vllm", "tokens_per_s"))),
        ]

    cells = {f"{disk}, {arm}": reached(disk, arm) for disk in results for arm in ("vllm", "plug-in")}
    lines = ["", f"| | goal | {' | '.join(cells)} |", "|---" * (len(cells) + 2) + "|"]
    for (name, goal), figures_of in zip(GOALS.items(), zip(*cells.values(), strict=True), strict=True):
        lines.append(f"| {name} | {goal} | {' | '.join(figures_of)} |")
    return "\n".join(lines) + "\n"


def table(results: dict[str, dict[str, list[dict[str, float]]]]) -> str:
    """Return the medians over rounds as Markdown."""
    lines = []
    for disk, arms in results.items():
        names = list(next(iter(arms.values()))[0])
        lines += [f"\n## {disk}\n", f"| arm | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
        for arm, rounds in arms.items():
            medians = [f"{statistics.median(one[name] for one in rounds):.4g}" for name in names]
            lines.append(f"| {arm} | {' | '.join(medians)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run the arms in turns."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=9.0, help="of requests, per round, arm and disk")
    parser.add_argument("--rate", type=float, default=4.0, help="requests per second")
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--output", type=Path, default=RESULTS / "vllm_plugin")
    given = parser.parse_args()
    disks = {"disk of 200 MB/s": PACE, "files in memory": 0.0}
    names = given.arms.split(",")
    logs: dict[str, dict[str, list[Round]]] = {disk: {arm: [] for arm in names} for disk in disks}
    orders: list[tuple[str, dict[str, Any]]] = []
    with tempfile.TemporaryDirectory() as folder:
        make_files(Path(folder))
        arms = {name: start_arm(name, Path(folder)) for name in names}

        def ask(name: str, order: dict[str, Any]) -> Round:
            shape = {key: order[key] for key in ("seconds", "rate", "seed")}
            return arms[name].serve(requests_of(name, **shape), bytes_per_s=order["pace"], seed=order["seed"])

        orders.append(("warm-up", {"seconds": WARM_UP_S, "rate": given.rate, "pace": 0.0, "seed": 1_000_000}))
        for name in names:
            ask(name, orders[0][1])
        for number in range(given.rounds):
            for turn, (disk, pace) in enumerate(disks.items()):
                order = {"seconds": given.seconds, "rate": given.rate, "pace": pace, "seed": 2 * number + turn}
                orders.append((disk, order))
                for name in names:
                    logs[disk][name].append(ask(name, order))
                    print(number, disk, name, figures(logs[disk][name][-1].served), flush=True)
        for child in arms.values():
            child.close()
        results = {
            disk: {arm: [figures(one.served) for one in of] for arm, of in made.items()} for disk, made in logs.items()
        }
        shown = goals(results) if {"vllm", "no loads", "plug-in"} <= set(names) else ""
        text = f"# vLLM with and without the plug-in\n\n{READING.format(**machine())}{shown}{table(results)}"
        given.output.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
        given.output.with_suffix(".md").write_text(text)
        print(text)
        if {"vllm", *BESIDE} <= set(names):
            twin = Twin(Path(folder), logs)
            predicted = {disk: {arm: twin.predict(arm, disk, orders) for arm in names} for disk in disks}
            compared = changes(results, predicted)
            given.output.with_suffix(".md").write_text(text + compared)
            print(compared)


if __name__ == "__main__":
    main()
