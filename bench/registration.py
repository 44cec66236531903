"""The cost of adapters that are registered and not used: at the start, in memory, and while others are served.

    python bench/registration.py [--quick] [--counts 100,1000,10000]

A small Llama with random weights, and folders of adapters of ranks 8 to 32 on all its linears. `manylora serve` starts
on each number of folders, twice: with an empty cache of content hashes and with the one that the first start left. Each
time the same hundred adapters are asked, by Zipf's law, from a fixed number of connections. All folders of one rank but
the hundred share one weight file by hard links, so that they need little disk. The numbers take turns; figures are
medians of the rounds, and ratios those of `bench/ratios.py`.

* *seconds to ready*: from the start of the process to the line that says so, and the part of it that registration takes
  by the engine's log;
* *memory*: resident memory of the API's process and of the engine's, and their growth per adapter;
* *requests per second*, and *processor time* of API and engine per request: of the hundred adapters, with background
  reads off, so that the numbers of adapters compare;
* *decision*: time of a scheduling decision with as many versions registered, without a model, as
  `bench/results/decision.md` measures it;
* `/metrics` and `/v1/models`: median times, and the bytes of `/metrics`.

Writes `results/registration.json` and `.md`, with the cost of an adapter by part: header, listing and command line,
messages and the engine's registry, memory.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import psutil
import torch
from decision import Scale, measure_decision
from publishing import Others, Steps, arguments, publish, reason_to_refuse, table
from ratios import Ratio, ratio_by_round
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from manylora.cli.options.adapter_folders import collect_adapters
from manylora.core.adapters.read import HeaderReader, ReadRules
from manylora.core.adapters.shape import BaseShape
from manylora.core.adapters.sources import open_folder
from manylora.core.clock import WallClock
from manylora.core.config import EngineConfig, MemoryConfig, ModelConfig
from manylora.execution.build import build_parts
from manylora.execution.device import describe_machine
from manylora.lab.bench.rounds import in_turns
from manylora.lab.bench.sweep import write_synthetic_adapter

RANKS = (8, 16, 24, 32)
NUM_USED = 100
ZIPF = 1.0
NUM_CONNECTIONS = 16
NUM_IN, NUM_OUT = 32, 16
VOCAB = 256
KIB = 1024
KINDS = ("cold", "warm")
"""Starts of a round, by the cache of content hashes."""


def make_base(folder: Path) -> BaseShape:
    """Write a small Llama with random weights and a tokenizer of bytes; return its shape."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokens = Tokenizer(models.WordLevel({f"t{index}": index for index in range(VOCAB)}, unk_token="t0"))
    tokens.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokens).save_pretrained(str(folder))
    parts = build_parts(
        EngineConfig(model=ModelConfig(model=str(folder)), memory=MemoryConfig(num_pages=16)), WallClock()
    )
    parts.close()
    return parts.base


def make_adapters(folder: Path, base: BaseShape, count: int) -> None:
    """Write adapters `a00000` and so on: the used ones with weights of their own, the others as links of four."""
    rng = np.random.default_rng(0)
    originals = [write_synthetic_adapter(folder.parent / f"rank{rank}", base, rank, rng) for rank in RANKS]
    for index in range(count):
        place = folder / f"a{index:05}"
        rank = index % len(RANKS)
        if index < NUM_USED:
            write_synthetic_adapter(place, base, RANKS[rank], rng)
            continue
        place.mkdir(parents=True)
        shutil.copy(originals[rank] / "adapter_config.json", place)
        os.link(originals[rank] / "adapter_model.safetensors", place / "adapter_model.safetensors")


class Served:
    """`manylora serve` on a folder of adapters; ready on entering."""

    def __init__(self, base: Path, adapters: Path, cache: Path) -> None:
        self._command = [sys.executable, "-m", "manylora", "serve", str(base), "--lora-dir", str(adapters)]
        self._command += ["--port", "0", "--cache-dir", str(cache), "--memory", "256MiB", "--no-background-reads"]
        self._log: list[str] = []

    def __enter__(self) -> Served:
        began_at = time.perf_counter()
        self.process = subprocess.Popen(self._command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        threading.Thread(target=self._read_log, daemon=True).start()
        line = self.process.stdout.readline()
        self.ready_s = time.perf_counter() - began_at
        found = re.search(r"http://\S+", line)
        assert found is not None, "\n".join(self._log[-20:])
        self.url = found.group()
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait()

    @property
    def registered_s(self) -> float:
        """Seconds from the command to register adapters to its end, in the engine."""
        return max(
            float(took) for line in self._log for took in re.findall(r"adapters_registered .*took_s=([\d.]+)", line)
        )

    def memory(self) -> dict[str, int]:
        """Return the resident bytes of the API's process and of the engine's."""
        return {name: one.memory_info().rss for name, one in self._processes().items()}

    def processor_s(self) -> float:
        """Return the processor time that both have taken so far."""
        times = [one.cpu_times() for one in self._processes().values()]
        return float(sum(one.user + one.system for one in times))

    def _processes(self) -> dict[str, psutil.Process]:
        api = psutil.Process(self.process.pid)
        engine = next(one for one in api.children() if "engine_process" in " ".join(one.cmdline()))
        return {"api": api, "engine": engine}

    def _read_log(self) -> None:
        assert self.process.stderr is not None
        self._log.extend(self.process.stderr)


async def ask(served: Served, seconds: float) -> dict[str, float]:
    """Ask the used adapters for some time; return requests per second, and times of the other routes afterwards."""
    rng = np.random.default_rng(1)
    shares = 1.0 / np.arange(1, NUM_USED + 1) ** ZIPF
    order = iter(rng.choice(NUM_USED, 1_000_000, p=shares / shares.sum()).tolist())
    num_done = 0
    timeout = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(served.url, timeout=timeout) as session:

        async def one(name: str) -> None:
            prompt = rng.integers(1, VOCAB, NUM_IN).tolist()
            body = {"model": name, "prompt": prompt, "max_tokens": NUM_OUT, "temperature": 0, "ignore_eos": True}
            async with session.post("/v1/completions", json=body) as answer:
                assert answer.status == 200, await answer.text()
                await answer.read()

        async def connection(until: float) -> None:
            nonlocal num_done
            while time.perf_counter() < until:
                await one(f"a{next(order):05}")
                num_done += 1

        for index in range(NUM_USED):  # so that none is cold
            await one(f"a{index:05}")
        began_at, taken_s = time.perf_counter(), served.processor_s()
        await asyncio.gather(*(connection(began_at + seconds) for _ in range(NUM_CONNECTIONS)))
        figures = {
            "requests_per_s": num_done / (time.perf_counter() - began_at),
            "processor_ms": 1e3 * (served.processor_s() - taken_s) / num_done,
        }
        for route in ("/metrics", "/v1/models", "/status"):
            times = []
            for _ in range(7):
                began_at = time.perf_counter()
                async with session.get(route) as answer:
                    assert answer.status == 200
                    content = await answer.read()
                times.append(time.perf_counter() - began_at)
            figures[f"{route} ms"] = 1e3 * statistics.median(times)
            figures[f"{route} bytes"] = len(content)
    return figures


def decision_us(count: int, turns: int) -> float:
    """Return the microseconds of a decision of the core with so many versions registered."""
    scale = Scale(running=64, waiting=200, adapters=count, goal_us=0.0, used=NUM_USED)
    return measure_decision("fifo", "price", scale, num_steps=turns).launch_us


def parts_us(base: BaseShape, folder: Path, count: int) -> dict[str, float]:
    """Return microseconds per adapter of the parts that can be measured alone."""
    found: dict[str, str] = {}

    def per_adapter(work: Callable[[], object]) -> float:
        began_at = time.perf_counter()
        work()
        return 1e6 * (time.perf_counter() - began_at) / count

    def collect() -> None:
        found.update(collect_adapters((), [str(folder)]))

    listing = per_adapter(collect)
    rules = ReadRules(base=base, max_bytes=1 << 34, dtype="auto")
    headers = HeaderReader(rules)
    checking = per_adapter(lambda: [headers.read(name, path) for name, path in found.items()])
    keying = per_adapter(lambda: [rules.file_key_of(open_folder(name, path)) for name, path in found.items()])
    return {"listing folders": listing, "configuration and header": checking, "of which the file key": keying}


def run(base: Path, folder: Path, cache: Path, seconds: float) -> dict[str, Any]:
    """Return the figures of one number of adapters in one round."""
    shutil.rmtree(cache, ignore_errors=True)
    figures: dict[str, Any] = {}
    for kind in KINDS:
        with Served(base, folder, cache) as served:
            one: dict[str, Any] = {"ready_s": served.ready_s, "registered_s": served.registered_s}
            one["memory"] = served.memory()
            one |= asyncio.run(ask(served, seconds))
            figures[kind] = one
    return figures


def medians(rounds: Sequence[Any]) -> Any:
    """Return the median of each figure over the rounds."""
    if isinstance(rounds[0], dict):
        return {key: medians([one[key] for one in rounds]) for key in rounds[0]}
    return statistics.median(rounds)


def measure(counts: Sequence[int], num_rounds: int, seconds: float, turns: int) -> dict[str, Any]:
    """Run everything; return the figures."""
    with tempfile.TemporaryDirectory() as path:
        place = Path(path)
        base = make_base(place / "base")
        folders = {str(count): place / f"adapters{count}" for count in counts}
        for count in counts:
            make_adapters(folders[str(count)], base, count)
        time.sleep(2.1)  # contents of files just written are not kept
        rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in folders}
        others, progress = Others(), Steps(len(counts) * num_rounds)
        for _, name in in_turns(list(folders), num_rounds, num_warm_up=0):
            rounds[name].append(run(place / "base", folders[name], place / "cache", seconds))
            latest = rounds[name][-1]
            ready = ", ".join(f"{latest[kind]['ready_s']:.1f} s with a {kind} cache" for kind in KINDS)
            progress.done(f"{name} adapters, ready after {ready}")
        busy_share = others.share()
        runs = []
        for count in counts:
            one: dict[str, Any] = {"adapters": count, **medians(rounds[str(count)])}
            one["decision_us"] = decision_us(count, turns)
            one["parts_us"] = parts_us(base, folders[str(count)], count)
            runs.append(one)

    def over_fewest(figure: str) -> dict[str, Any]:
        """Return the ratios by round of a figure, of both starts of a round, to those of the fewest adapters."""
        each = {name: [one[kind][figure] for one in all_ for kind in KINDS] for name, all_ in rounds.items()}
        return {name: asdict(ratio_by_round(values, each[str(counts[0])])) for name, values in each.items()}

    return {
        "command": "python bench/registration.py",
        "busy_share": busy_share,
        "num_rounds": num_rounds,
        "runs": runs,
        "requests_over_fewest": over_fewest("requests_per_s"),
        "processor_over_fewest": over_fewest("processor_ms"),
        "rounds": rounds,
        "of one more": cost_of_one(runs),
    }


def cost_of_one(runs: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the growth per adapter from the fewest to the most."""
    few, many = runs[0], runs[-1]
    more: int = max(1, many["adapters"] - few["adapters"])

    def growth(pick: Callable[[dict[str, Any]], float]) -> float:
        return (pick(many) - pick(few)) / more

    return {
        "start, us": 1e6 * growth(lambda run: run["cold"]["ready_s"]),
        "registration in the engine, us": 1e6 * growth(lambda run: run["cold"]["registered_s"]),
        **{f"{part}, us": many["parts_us"][part] for part in many["parts_us"]},
        "memory of the API, bytes": growth(lambda run: run["cold"]["memory"]["api"]),
        "memory of the engine, bytes": growth(lambda run: run["cold"]["memory"]["engine"]),
        "/v1/models, us": 1e3 * growth(lambda run: run["cold"]["/v1/models ms"]),
        "/metrics, us": 1e3 * growth(lambda run: run["cold"]["/metrics ms"]),
    }


def report(figures: dict[str, Any]) -> str:
    """Return the figures as Markdown."""
    runs = figures["runs"]
    heads = ["", *(f"{run['adapters']:,}" for run in runs)]
    mib = 2**20
    rows: list[Sequence[object]] = []
    for kind in KINDS:
        rows += [
            [f"seconds to ready, {kind} hash cache", *(f"{run[kind]['ready_s']:.2f}" for run in runs)],
            ["of which registration, s", *(f"{run[kind]['registered_s']:.3f}" for run in runs)],
            [f"requests per second, {kind}", *(f"{run[kind]['requests_per_s']:.1f}" for run in runs)],
            [f"processor time of a request, {kind}, ms", *(f"{run[kind]['processor_ms']:.2f}" for run in runs)],
        ]
    for what in ("requests", "processor"):
        over = [Ratio(**one) for one in figures[f"{what}_over_fewest"].values()]
        rows.append([f"{what} over the fewest, by start (95 % interval)", *over])
    cold = [run["cold"] for run in runs]
    rows += [
        ["memory of the API, MiB", *(f"{one['memory']['api'] / mib:.0f}" for one in cold)],
        ["memory of the engine, MiB", *(f"{one['memory']['engine'] / mib:.0f}" for one in cold)],
        ["decision, us", *(f"{run['decision_us']:.1f}" for run in runs)],
        *([f"`{route}`, ms", *(f"{one[f'{route} ms']:.1f}" for one in cold)] for route in ("/metrics", "/v1/models")),
        ["`/status`, ms", *(f"{one['/status ms']:.1f}" for one in cold)],
        ["`/metrics`, KiB", *(f"{one['/metrics bytes'] / KIB:.0f}" for one in cold)],
    ]
    machine = (
        f"{describe_machine(torch.device('cpu'))}; other processes took {figures['busy_share']:.0%} of it. Medians of "
        f"{figures['num_rounds']} rounds."
    )
    lines = ["# Registered adapters", "", machine, "", *table(heads, rows)]
    lines += [
        "",
        "Of one more adapter:",
        "",
        *table(["", ""], [[k, f"{v:,.1f}"] for k, v in figures["of one more"].items()]),
    ]
    return "\n".join(lines)


def main() -> None:
    parser = arguments(__doc__, quick="100 and 300 adapters, two seconds each")
    parser.add_argument("--counts", default="100,1000,10000")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=6.0, help="of requests, for each start")
    options = parser.parse_args()
    counts = (100, 300) if options.quick else tuple(map(int, options.counts.split(",")))
    seconds, turns = (2.0, 50) if options.quick else (options.seconds, 2000)
    num_rounds = 1 if options.quick else options.rounds
    figures = measure(counts, num_rounds, seconds, turns)
    refused = reason_to_refuse(num_rounds, figures["busy_share"])
    publish("registration", figures, report(figures), is_kept=not options.quick, refused=refused)


if __name__ == "__main__":
    main()
