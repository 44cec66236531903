"""Tokens per second of a whole engine on a CPU: against bare torch, transformers `generate`, llama.cpp, and PEFT.

    python bench/throughput.py [--quick] [--traces DIR] [--llama-cpp DIR] [--processor-time]
    python bench/throughput.py --kinds [--quick]

An 82M-parameter Llama with random weights in fp32, 32 requests of 128 tokens in and 64 out, greedy.

* *base*: no adapter. Against bare torch doing the same arithmetic on a static batch, once with its own products and
  once with ours (oneDNN, packed weights), against `generate`, and with `--llama-cpp` against llama.cpp in fp32 with
  the settings that a sweep before the first round finds quickest (`llama_cpp_base.py`).
* *8*, *32*: adapters of rank 8 to 128 on all linears; 8 take four requests each, 32 one each. Saved in float32, and
  32 saved in bfloat16, which are kept in 16 bits. Against `generate` of PEFT with `adapter_names`.
* *attention*: the same ranks on q, k, v and o alone, which is where most published measurements put them.
* *spread*: lengths of the Azure conversation trace (`--traces` says where it lies; gamma distributions fitted to it
  otherwise), scaled to the same means; PEFT answers in static batches of 32.

The systems take turns in one process, and the statistic is that of `bench/ratios.py`: the ratio of each
round, its median, a 95 % interval. A system that is compared with the base runs directly after it: a round takes
minutes, and then the machine's speed changes by more than an adapter costs. Ours is the whole path: engine core, loop,
scheduler, sampler, executor. Adapters are in host memory and loaded to device pages in the warm-up round. On a machine
that has other work too, `--processor-time` takes one thread for all systems and counts what it computed, not how long
it waited: ratios of that hold still.

Writes `bench/results/throughput.json` and `.md`. With `--kinds` only DoRA beside plain LoRA, on that model and on the
demo's: 32 requests, 8 and 32 adapters of rank 16 on all linears, written to `kinds.json` and `.md`. The floor there is
the time in which memory gives what DoRA has beside A and B: a number per output and adapter, in each step.
"""

from __future__ import annotations

import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cpu_systems import RANKS, VOCAB, Bare, Ours, make_adapters, make_model
from llama_cpp_base import LlamaCpp, described, reason_to_leave_out
from peers import PeerRequest, Peft, Transformers
from publishing import Others, arguments, clock_of, publish, reason_to_refuse, table
from ratios import Ratio, ratio_by_round

from manylora.demo import demo_model_path
from manylora.execution.device import describe_machine
from manylora.lab.bench.rounds import time_in_turns
from manylora.lab.workloads.lengths import GammaTokens, Lengths, ParametricLengths, TokenBounds, TraceLengths

NUM_IN, NUM_OUT = 128, 64
TRACE = "AzureLLMInferenceTrace_conv.csv"
LONGEST = 1024
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]

# The ratios that are claimed: name, time of the slower side, time of the quicker, what each is.
RATIOS = {
    "base over bare torch": ("bare torch", "base"),
    "base over bare torch with packed weights": ("bare torch packed", "base"),
    "base over transformers": ("transformers", "base"),
    "base over llama.cpp": ("llama.cpp", "base"),
    "time of 8 adapters over the base": ("8 adapters", "base"),
    "time of 32 adapters over the base": ("32 adapters", "base"),
    "time of 32 adapters saved in bfloat16 over the base": ("32 adapters bfloat16", "base"),
    "time of 8 adapters on attention over the base": ("8 adapters attention", "base"),
    "time of 32 adapters on attention over the base": ("32 adapters attention", "base"),
    "time of 32 adapters on attention saved in bfloat16 over the base": ("32 adapters attention bfloat16", "base"),
    "32 adapters over PEFT": ("PEFT", "32 adapters"),
    "32 adapters saved in bfloat16 over PEFT": ("PEFT", "32 adapters bfloat16"),
    "32 adapters over PEFT, spread lengths": ("PEFT spread", "32 adapters spread"),
}


def main() -> None:
    parser = arguments(__doc__, quick="8 requests, one round", processor_time=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--slow-rounds", type=int, default=5, help="of PEFT, transformers and spread lengths")
    parser.add_argument("--spread-requests", type=int, default=64)
    parser.add_argument("--traces", type=Path, help="folder of public traces")
    parser.add_argument("--llama-cpp", type=Path, metavar="DIR", help="folder of a build of llama.cpp")
    parser.add_argument("--only", help="comma-separated systems; nothing written")
    parser.add_argument("--kinds", action="store_true", help="kinds of adapters beside plain LoRA, and nothing else")
    options = parser.parse_args()
    clock = clock_of(options)
    if options.kinds:
        measure_kinds(options.rounds, is_quick=options.quick)
        return
    left_out = reason_to_leave_out(options.llama_cpp)
    if left_out is not None:
        print(f"llama.cpp is left out: {left_out}")
    num_requests, rounds = (8, 1) if options.quick else (32, options.rounds)
    rng = np.random.default_rng(0)
    fixed = [PeerRequest(tuple(rng.integers(3, VOCAB, NUM_IN).tolist()), NUM_OUT) for _ in range(num_requests)]
    spread = draw_spread(8 if options.quick else options.spread_requests, options.traces, rng)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        num_parameters = make_model(path / "base")
        llama_cpp = None
        if left_out is None:
            llama_cpp = LlamaCpp(options.llama_cpp, path / "base", path / "base.gguf", torch.get_num_threads())
        ranks = [RANKS[index % len(RANKS)] for index in range(num_requests)]
        wide = make_adapters(path / "base", path / "float32", ranks)
        narrow = make_adapters(path / "base", path / "bfloat16", ranks, torch.bfloat16)
        sets = {"wide": wide, "narrow": narrow}
        for name, dtype in (("wide_attention", torch.float32), ("narrow_attention", torch.bfloat16)):
            sets[name] = make_adapters(path / "base", path / name, ranks, dtype, ATTENTION)
        ours = Ours(path / "base", sets, clock)
        systems = build_systems(path / "base", ours, llama_cpp, wide, fixed, spread, clock, options.only)
        seconds: dict[str, list[float]] = {name: [] for name in systems}
        beside: dict[str, list[float]] = {name: [] for name in systems}
        outside: list[float] = []
        others = Others()

        def measure(name: str, number: int) -> float:
            began = clock()
            systems[name]()
            took = clock() - began
            print(f"round {number:2} {name:24} {took:8.2f} s", flush=True)
            return took

        for number in range(-1, rounds):  # one round to warm up
            for name in systems:
                is_rare = is_spread(name) or name in ("PEFT", "transformers")
                if is_rare and number < max(0, rounds - options.slow_rounds):
                    continue
                if number >= 0 and is_against_base(name) and "base" in systems:
                    beside[name].append(measure("base", number))
                took = measure(name, number)
                if number >= 0:
                    seconds[name].append(took)
                if number >= 0 and name == "base":
                    outside.append(1 - ours.forward_s / took)
                if number >= 0 and not (options.quick or options.only):
                    write(
                        {
                            "command": "python bench/throughput.py"
                            + (" --traces DIR" if options.traces else "")
                            + (" --llama-cpp DIR" if llama_cpp else "")
                            + (" --processor-time" if options.processor_time else ""),
                            "processor_time": options.processor_time,
                            "parameters": num_parameters,
                            "requests": num_requests,
                            "adapter_bytes": ours.weight_bytes,
                            "outside_forward": statistics.median(outside),
                            "llama_cpp": llama_cpp.facts() if llama_cpp else None,
                        },
                        seconds,
                        beside,
                        {name: sum(a.num_out for a in (spread if is_spread(name) else fixed)) for name in seconds},
                        spread_of(spread, options.traces),
                        busy_share=others.share(),
                        is_last=number == rounds - 1 and name == list(systems)[-1],
                    )
        ours.close()
        if llama_cpp:
            llama_cpp.close()


def measure_kinds(num_rounds: int, *, is_quick: bool) -> None:
    """Time a batch of each kind of adapter beside the same batch of plain LoRA, and write it."""
    others, rows = Others(), []
    figures: dict[str, dict[str, list[float]]] = {}
    memory = torch.ones(1 << 26)
    with tempfile.TemporaryDirectory() as folder:
        for name, num_out in (("demo", 96), ("82M", 24)):
            base = Path(folder) / name
            if name == "82M":
                make_model(base)
            else:
                shutil.copytree(demo_model_path(), base)
            sets = {
                kind: make_adapters(base, base / kind, [16] * 32, use_dora=kind == "DoRA") for kind in ("plain", "DoRA")
            }
            ours = Ours(base, sets)
            asked = [PeerRequest(tuple(3 + (17 * i + 5 * j) % 100 for j in range(64)), num_out) for i in range(32)]
            names = {f"{kind} {num}": [f"{kind}-{i % num}" for i in range(32)] for num in (8, 32) for kind in sets}
            runs = {one: partial(ours.run, asked, adapters) for one, adapters in names.items()}
            seconds = time_in_turns(runs, 1 if is_quick else num_rounds)
            numbers = ours.weight_bytes["DoRA"] - ours.weight_bytes["plain"]
            began = time.perf_counter()
            memory.sum()
            read_s = numbers / 32 * num_out * (time.perf_counter() - began) / memory.nbytes
            figures[name] = seconds
            for num in (8, 32):
                plain, dora = (seconds[f"{kind} {num}"] for kind in ("plain", "DoRA"))
                floor = 1 + num * read_s / statistics.median(plain)
                rows.append((name, num, f"{statistics.median(plain):.2f}", ratio_by_round(dora, plain), f"{floor:.3f}"))
            ours.close()
    heads = ("base", "adapters", "plain LoRA, s", "time of DoRA over plain LoRA (95 %)", "floor")
    text = "\n".join(
        [
            "# Kinds of adapters beside plain LoRA",
            "",
            f"`python bench/throughput.py --kinds` on {describe_machine(torch.device('cpu'))}: 32 requests of 64 "
            "tokens in, rank 16 on all linears, fp32; medians of the rounds. The floor: the time of reading a number "
            "per output and adapter in each step, beside plain LoRA. Other processes took "
            f"{others.share():.1%} of the machine's processor time.",
            "",
            *table(heads, rows),
        ]
    )
    refused = reason_to_refuse(num_rounds, others.share())
    publish("kinds", figures, text, is_kept=not is_quick, refused=refused)


def is_against_base(name: str) -> bool:
    return (name, "base") in RATIOS.values()


def is_spread(name: str) -> bool:
    return name.endswith("spread")


def spread_of(spread: list[PeerRequest], traces: Path | None) -> dict[str, Any]:
    return {
        "requests": len(spread),
        "lengths": TRACE if traces else "gamma distributions",
        "mean_in": float(np.mean([len(one.prompt) for one in spread])),
        "mean_out": float(np.mean([one.num_out for one in spread])),
    }


def write(
    facts: dict[str, Any],
    seconds: dict[str, list[float]],
    beside: dict[str, list[float]],
    num_tokens: dict[str, int],
    spread: dict[str, Any],
    *,
    busy_share: float,
    is_last: bool,
) -> None:
    """Write what is worth keeping of all that was measured so far; at the end, say why if nothing was."""
    ratios = {
        name: ratio_by_round(seconds[slow][-num:], of[-num:])
        for name, (slow, quick) in RATIOS.items()
        for of in [beside[slow] if quick == "base" else seconds.get(quick, [])]
        # A system that ran in the last rounds only stands beside the others' last rounds.
        if (num := min(len(seconds.get(slow, [])), len(of)))
    }
    least = min((len(one.rounds) for one in ratios.values()), default=0)
    refused = reason_to_refuse(least, busy_share)
    if refused is not None and not is_last:
        return
    report = {
        "machine": {"what": describe_machine(torch.device("cpu")), "python": platform.python_version()},
        **facts,
        "tokens_in": NUM_IN,
        "tokens_out": NUM_OUT,
        "ranks": RANKS,
        "spread": spread,
        "seconds": seconds,
        "seconds_of_base_beside": {name: times for name, times in beside.items() if times},
        "tokens_per_s": {name: num_tokens[name] / statistics.median(times) for name, times in seconds.items() if times},
        "ratios": {name: asdict(one) for name, one in ratios.items()},
        "busy_share": busy_share,
    }
    publish("throughput", report, page(report), is_shown=False, refused=refused)


def draw_spread(num: int, traces: Path | None, rng: np.random.Generator) -> list[PeerRequest]:
    """Draw lengths with the trace's spread and our means."""
    bounds = TokenBounds(min_prompt=4, max_prompt=LONGEST, max_output=LONGEST // 2)
    lengths: Lengths
    if traces is not None:
        lengths = TraceLengths(file=traces / TRACE, bounds=TokenBounds())
    else:
        lengths = ParametricLengths(
            prompt=GammaTokens(shape=1.338, scale=700.0), output=GammaTokens(shape=1.646, scale=300.0)
        )
    drawn = lengths.draw(num, rng)
    # Scaled so that this draw has the means, whatever the trace's are.
    prompt, _ = bounds.fit(drawn.prompt, drawn.output, NUM_IN / float(drawn.prompt.mean()))
    _, output = bounds.fit(drawn.prompt, drawn.output, NUM_OUT / float(drawn.output.mean()))
    return [
        PeerRequest(tuple(rng.integers(3, VOCAB, num_in).tolist()), num_out)
        for num_in, num_out in zip(prompt.tolist(), output.tolist(), strict=True)
    ]


def build_systems(
    base: Path,
    ours: Ours,
    llama_cpp: LlamaCpp | None,
    adapters: list[Path],
    fixed: list[PeerRequest],
    spread: list[PeerRequest],
    clock: Callable[[], float],
    only: str | None,
) -> dict[str, Callable[[], None]]:
    """Return what takes turns, by name."""

    def mixed(kind: str, asked: list[PeerRequest], num_adapters: int) -> Callable[[], None]:
        names = [f"{kind}-{index % num_adapters}" for index in range(len(asked))]
        return lambda: ours.run(asked, names)

    def base_beside(other: Bare) -> Callable[[], None]:
        def run() -> None:
            other.run(fixed)
            # The same tokens, but where two were all but equally likely.
            pairs = zip(other.answers, expected, strict=True)
            assert sum(theirs == mine for theirs, mine in pairs) >= len(fixed) * 3 // 4, "it computes something else"

        return run

    def llama_cpp_at_its_best(one: LlamaCpp) -> Callable[[], None]:
        one.choose(fixed, clock)
        one.check(fixed)
        checked = one.answers

        def run() -> None:
            one.run(fixed)
            assert one.answers == checked, "it answers otherwise than when it was checked"

        return run

    ours.run(fixed)
    expected = ours.answers
    chosen = set(only.split(",")) if only else None
    makers: dict[str, Callable[[], Callable[[], None]]] = {
        "base": lambda: lambda: ours.run(fixed),
        "bare torch": lambda: base_beside(Bare(base, is_packed=False)),
        "bare torch packed": lambda: base_beside(Bare(base, is_packed=True)),
        "8 adapters": lambda: mixed("wide", fixed, 8),
        "32 adapters": lambda: mixed("wide", fixed, len(adapters)),
        "32 adapters bfloat16": lambda: mixed("narrow", fixed, len(adapters)),
        "8 adapters attention": lambda: mixed("wide_attention", fixed, 8),
        "32 adapters attention": lambda: mixed("wide_attention", fixed, len(adapters)),
        "32 adapters attention bfloat16": lambda: mixed("narrow_attention", fixed, len(adapters)),
        "transformers": lambda: partial(Transformers(base).run, fixed),
        **({"llama.cpp": lambda: llama_cpp_at_its_best(llama_cpp)} if llama_cpp else {}),
        "PEFT": lambda: lambda: peft().run_mixed(fixed),
        "32 adapters spread": lambda: mixed("wide", spread, len(adapters)),
        "PEFT spread": lambda: lambda: peft().run_mixed(spread),
    }
    kept: list[Peft] = []

    def peft() -> Peft:
        if not kept:
            kept.append(Peft(base, adapters))
        return kept[0]

    return {name: make() for name, make in makers.items() if chosen is None or name in chosen}


def page(report: dict[str, Any]) -> str:
    rates, ratios, spread = report["tokens_per_s"], report["ratios"], report["spread"]
    megabytes = {name: size / 1e6 for name, size in report["adapter_bytes"].items()}
    lines = [
        "# Throughput on the CPU",
        "",
        f"`{report['command']}` on {report['machine']['what']}: an "
        f"{report['parameters'] / 1e6:.0f}M-parameter Llama in fp32, {report['requests']} requests, "
        f"{report['tokens_in']} tokens in, {report['tokens_out']} out, greedy"
        f"{'; seconds are processor time of one thread' if report['processor_time'] else ''}. "
        f"Adapters have rank {RANKS[0]} to {RANKS[-1]} on all linears; 32 of them are {megabytes['wide']:.0f} MB in "
        f"float32 and {megabytes['narrow']:.0f} MB in bfloat16; *attention*: on q, k, v and o alone, "
        f"{megabytes['wide_attention']:.0f} and {megabytes['narrow_attention']:.0f} MB. *Spread*: {spread['requests']} "
        "requests with lengths "
        f"from {spread['lengths']}, {spread['mean_in']:.0f} in and {spread['mean_out']:.0f} out on average. Generated "
        "tokens per second, prompts included in the time, medians over the rounds. A ratio is taken in each round, of "
        "two runs next to each other: its median over the rounds, and a 95 % interval. Other processes took "
        f"{report['busy_share']:.1%} of the machine's processor time.",
        "",
        *table(
            ("system", "tokens/s", "rounds"),
            ((name, f"{rate:.0f}", len(report["seconds"][name])) for name, rate in rates.items()),
        ),
        "",
        *table(
            ("ratio", "median of rounds (95 %)"),
            ((name, str(Ratio(**one))) for name, one in ratios.items()),
        ),
        "",
        f"Of a base run, {report['outside_forward']:.1%} is outside the model's forward.",
        *(["", *described(report["llama_cpp"])] if report["llama_cpp"] else []),
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
