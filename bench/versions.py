"""Two versions of manylora in turns: throughput, decisions, the simulator, HTTP. Was a change free?

    python bench/versions.py --before CHECKOUT [--rounds 5] [--only throughput] [--name NAME] [--quick]

Every round measures this checkout and the other one, each in a process of its own, in an order that alternates. The
statistic is that of `bench/ratios.py`: the ratio of each round (this one over the other), its median, a 95 %
interval. A process that imports either version uses only what both have: the `Engine` class, the command line, and
`decision.py` and `http_cost.py` of each checkout.

* *throughput*: tokens per second of an 82M-parameter Llama in fp32, 32 requests of 128 tokens in and 24 out; the
  base, 8 adapters, and 32 adapters of rank 8 to 64 on all linears. Beside it the milliseconds of the processor per
  token.
* *decision*: microseconds of one scheduling decision at the largest scale of `decision.py`.
* *simulator*: processor seconds of one simulated run of 4,000 requests.
* *http*: tokens per second over HTTP from an engine without a model, 200 streams, and the processor seconds of
  the run: of server, engine, client and floor.

A machine that is busy at the start is refused at once. Writes `bench/results/NAME.json` and `.md`, by default
`versions`.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from publishing import Others, arguments, publish, reason_to_refuse, table
from ratios import ratio_by_round

HERE = Path(__file__).resolve().parent.parent

THROUGHPUT = """
import json, sys, time
from manylora import Engine, SamplingParams
from manylora.demo import demo_model_path
folder, quick = sys.argv[1], sys.argv[2] == "quick"
with Engine(folder + "/base", tokenizer=str(demo_model_path()), memory_bytes=1 << 30, prefix_caching=False) as engine:
    for index in range(32):
        engine.load_adapter(f"a{index}", f"{folder}/a{index}")
    prompts = [[(17 * i + 5 * j) % 8000 + 10 for j in range(128)] for i in range(32)]
    params = SamplingParams(max_tokens=8 if quick else 24, temperature=0.0, ignore_eos=True)
    warm_up = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
    found, num_tokens, cpu_s = {}, 0, 0.0
    for name, count in (("base", 0), ("8 adapters", 8), ("32 adapters", 32)):
        adapters = [f"a{i % count}" if count else None for i in range(32)]
        engine.generate(prompts, adapter=adapters, sampling=warm_up)
        began, cpu_began_s = time.perf_counter(), time.process_time()
        answers = engine.generate(prompts, adapter=adapters, sampling=params)
        num_new = sum(len(one.token_ids) for one in answers)
        found["throughput: " + name] = num_new / (time.perf_counter() - began)
        num_tokens, cpu_s = num_tokens + num_new, cpu_s + time.process_time() - cpu_began_s
found["processor, offline: ms per token"] = 1e3 * cpu_s / num_tokens
print("FOUND " + json.dumps(found))
"""

DECISION = """
import json, sys
from decision import SCALES, measure_decision
scale = SCALES[0] if sys.argv[2] == "quick" else SCALES[-1]
found = {}
for policy in ("fifo", "chameleon"):
    cost = measure_decision(policy, "price", scale, num_steps=50 if sys.argv[2] == "quick" else 500)
    found[f"decision: {policy}"] = cost.launch_us
print("FOUND " + json.dumps(found))
"""

SIMULATOR = """
import json, random, sys, time
from manylora.core.config import SchedulerConfig
from manylora.lab.sim.run.simulation import simulate
from manylora.lab.sim.setup import Setup, make_config
from manylora.lab.workloads import AdapterSpec, RequestSpec, Workload
rng, at, requests = random.Random(1), 0.0, []
for index in range(200 if sys.argv[2] == "quick" else 4000):
    at += rng.expovariate(9.0)
    sizes = dict(num_prompt_tokens=rng.randint(20, 400), num_output_tokens=rng.randint(5, 80))
    adapter = f"a{min(int(rng.paretovariate(0.7)) - 1, 99)}"
    requests.append(RequestSpec(arrival_s=at, adapter=adapter, **sizes))
adapters = tuple(AdapterSpec(name=f"a{index}", rank=(8, 16, 32, 64, 128)[index % 5]) for index in range(100))
config = make_config(Setup(model="llama-7b", hardware="a40", scheduler=SchedulerConfig(policy="chameleon")))
began = time.process_time()
simulate(Workload(name="versions", requests=tuple(requests), adapters=adapters), config)
print("FOUND " + json.dumps({"simulator: processor seconds": time.process_time() - began}))
"""

HTTP = """
import json, resource, sys
from http_cost import measure_http
(result,) = measure_http(num_streams=200, seconds=1.0 if sys.argv[2] == "quick" else 3.0, rates=(2000.0,))
used = [resource.getrusage(kind) for kind in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
cpu_s = sum(one.ru_utime + one.ru_stime for one in used)
found = {"http: tokens per second": result.seen.tokens_per_s, "processor, http: seconds of the run": cpu_s}
print("FOUND " + json.dumps(found))
"""

WORKERS = {"throughput": THROUGHPUT, "decision": DECISION, "simulator": SIMULATOR, "http": HTTP}
LOOK_S = 5.0
"""Time to see whether the machine is quiet."""

LARGER_IS_BETTER = ("throughput", "http")


def main() -> None:
    parser = arguments(__doc__, quick="a smoke test")
    parser.add_argument("--before", type=Path, required=True, help="the checkout to compare with")
    parser.add_argument("--name", default="versions", help="of the files of results")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=sorted(WORKERS), action="append")
    options = parser.parse_args()
    rounds = 1 if options.quick else options.rounds
    trees = {"new": HERE, "old": options.before.resolve()}
    figures: dict[str, dict[str, list[float]]] = {}
    others = Others()
    if not options.quick:
        time.sleep(LOOK_S)
        if (refused := reason_to_refuse(rounds, others.share())) is not None:
            raise SystemExit(f"{options.name}: nothing was measured: {refused}")
    with tempfile.TemporaryDirectory() as folder:
        names = options.only or sorted(WORKERS)
        if "throughput" in names:
            _make_models(Path(folder))
        for number in range(rounds):
            for name in names:
                for version in ("new", "old") if number % 2 else ("old", "new"):
                    for figure, value in _measure(trees[version], WORKERS[name], folder, options.quick).items():
                        figures.setdefault(figure, {"new": [], "old": []})[version].append(value)
                        print(f"round {number + 1} of {rounds}: {version} {figure} = {value:.4g}", flush=True)
    versions = {version: _commit(tree) for version, tree in trees.items()}
    text = _page(_table(figures), versions, rounds, options.only)
    refused = reason_to_refuse(rounds, others.share())
    publish(options.name, {"versions": versions, "figures": figures}, text, is_kept=not options.quick, refused=refused)


def _make_models(folder: Path) -> None:
    from cpu_systems import make_adapters, make_model

    make_model(folder / "base")
    for index, place in enumerate(make_adapters(folder / "base", folder, [(8, 16, 32, 64)[i % 4] for i in range(32)])):
        place.rename(folder / f"a{index}")


def _measure(tree: Path, worker: str, folder: str, quick: bool) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-c", worker, folder, "quick" if quick else "full"],
        env={**os.environ, "PYTHONPATH": f"{tree / 'src'}{os.pathsep}{tree / 'bench'}"},
        cwd=tree,
        capture_output=True,
        text=True,
        check=False,
    )
    for line in done.stdout.splitlines():
        if line.startswith("FOUND "):
            found: dict[str, float] = json.loads(line.removeprefix("FOUND "))
            return found
    raise SystemExit(f"A measurement in {tree} failed:\n{done.stderr[-2000:]}")


def _table(figures: dict[str, dict[str, list[float]]]) -> str:
    heads = ("figure", "old, median", "new, median", "new over old, median of rounds (95 %)", "better when")
    rows = []
    for figure, found in figures.items():
        better = "larger" if figure.startswith(LARGER_IS_BETTER) else "smaller"
        medians = (f"{statistics.median(found[version]):.4g}" for version in ("old", "new"))
        rows.append((figure, *medians, ratio_by_round(found["new"], found["old"]), better))
    return "\n".join(table(heads, rows))


def _page(ratios: str, versions: dict[str, str], rounds: int, only: list[str] | None) -> str:
    chosen = "".join(f" --only {one}" for one in only or ())
    return (
        "# Two versions in turns\n\n"
        f"`python bench/versions.py --before CHECKOUT --rounds {rounds}{chosen}`: {versions['new']} (new) and "
        f"{versions['old']} (old), {rounds} rounds, {os.cpu_count()} cores ({platform.machine()}), "
        f"Python {platform.python_version()}. "
        "Each figure is measured in a process of its own; the order alternates from round to round.\n\n" + ratios
    )


def _commit(tree: Path) -> str:
    shown = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=tree, capture_output=True, text=True)
    return shown.stdout.strip() or "unknown"


if __name__ == "__main__":
    main()
