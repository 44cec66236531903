"""Run every benchmark here, one after the other, and say at the end what became of each: `make bench`.

    python bench/run_all.py [--traces DIR] [--quick] [--only NAME,NAME]

A benchmark that reads public traces is skipped where none are given (without them it would write another result than
the one in `results/`, or none), and named as such; so are, under `--quick`, those that have no smoke test. One that
fails does not stop those behind it. Behind the scripts come the commands of `manylora` whose results are kept here.
`gpu.sh` runs all that needs a GPU.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from publishing import RESULTS

HERE = Path(__file__).parent
ALWAYS = {"device.py": ("--compare",)}
TRACES = (
    "forecast_traces.py",
    "simulator.py",
    "throughput.py",
    "traces.py",
    "chameleon",
    "experiments",
    "rivals",
)
"""Benchmarks that read traces."""

COMMANDS: dict[str, list[str]] = {
    "caraserve": ["experiment", "report", "caraserve", f"--output={RESULTS / 'experiments' / 'caraserve'}"],
    "serverless": ["experiment", "report", "serverless", f"--output={RESULTS / 'experiments' / 'serverless'}"],
    "chameleon": [
        *("experiment", "report", "chameleon", "multi-lora", "--processes=2"),
        f"--output={RESULTS / 'experiments'}",
    ],
    "rivals": ["experiment", "report", "rivals", f"--output={RESULTS / 'experiments' / 'rivals'}"],
    "experiments": ["experiment", "report", "manylora", f"--output={RESULTS / 'experiments' / 'manylora'}"],
}
"""Commands of manylora by name."""

BY_HAND = (
    "bases.py",
    "bases_accuracy.py",
    "clients.py",
    "gpu.py",
    "peers.py",
    "scaling.py",
    "scaling_live.py",
    "versions.py",
    "vllm_churn.py",
    "vllm_plugin.py",
)
"""Not run here: `bases.py` needs llama.cpp built for the processor, `bases_accuracy.py` trains a model, `clients.py`
installs packages (`make clients`), `gpu.py` needs a GPU, `peers.py` is for a model of one's own, `scaling.py` and
`scaling_live.py` read one trace by its name, `versions.py` needs another checkout, `vllm_churn.py` and `vllm_plugin.py`
need the environment of `make vllm`. `forecast_traces.py` runs vLLM where that environment is, and keeps what was found
of it last where it is not."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a benchmark: ``ok``, ``failed`` or ``skipped``, and why; seconds it took."""

    script: str
    status: str
    reason: str = ""
    took_s: float = 0.0


def find_scripts(folder: Path) -> list[Path]:
    """Return the benchmarks in a folder: programs that publish a result. Others are parts, or started by benchmarks."""
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.py"))}
    programs = (path for path, text in texts.items() if "__main__" in text and "from publishing import" in text)
    return [path for path in programs if path.name not in (Path(__file__).name, *BY_HAND)]


def command(script: Path, traces: Path | None, *, is_quick: bool) -> list[str] | str:
    """Return the command of a benchmark, or the reason why it is skipped."""
    if script.name in TRACES and traces is None:
        return "reads traces: --traces DIR"
    reads = [f"--traces={traces}"] if script.name in TRACES else []
    if script.name in COMMANDS:
        return "has no --quick" if is_quick else [sys.executable, "-m", "manylora", *COMMANDS[script.name], *reads]
    if is_quick and "quick=" not in script.read_text(encoding="utf-8"):
        return "has no --quick"
    return [sys.executable, str(script), *ALWAYS.get(script.name, ()), *reads, *["--quick"] * is_quick]


def run_one(name: str, argv: Sequence[str]) -> Outcome:
    """Run a benchmark to its end, its output where ours goes."""
    began = time.perf_counter()
    code = subprocess.run(argv, check=False).returncode
    took_s = time.perf_counter() - began
    return Outcome(name, "failed" if code else "ok", f"exit code {code}" if code else "", took_s)


def run_all(scripts: Sequence[Path], traces: Path | None, *, is_quick: bool) -> list[Outcome]:
    """Run what can be run; Ctrl-C ends the script that runs and skips the others."""
    outcomes: list[Outcome] = []
    is_interrupted = False
    for script in scripts:
        given = "interrupted" if is_interrupted else command(script, traces, is_quick=is_quick)
        if isinstance(given, str):
            outcomes.append(Outcome(script.name, "skipped", given))
            continue
        print(f"== {' '.join(given[1:])}", flush=True)
        try:
            outcomes.append(run_one(script.name, given))
        except KeyboardInterrupt:
            is_interrupted = True
            outcomes.append(Outcome(script.name, "failed", "interrupted"))
    return outcomes


def summary(outcomes: Sequence[Outcome]) -> str:
    """Return a line for each script, and how many there are of each kind."""
    width = max(len(one.script) for one in outcomes)
    lines = [
        f"{one.script:{width}}  {one.status:7}  {one.reason or f'{one.took_s:.0f} s'}".rstrip() for one in outcomes
    ]
    counts = {status: sum(one.status == status for one in outcomes) for status in ("ok", "failed", "skipped")}
    return "\n".join(["", *lines, ", ".join(f"{count} {status}" for status, count in counts.items())])


def main(argv: Sequence[str] | None = None, *, folder: Path = HERE) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, metavar="DIR", help="folder of public traces")
    parser.add_argument("--quick", action="store_true", help="smoke tests: nothing is written")
    parser.add_argument("--only", metavar="NAME,NAME", help="these alone, without .py")
    options = parser.parse_args(argv)
    if options.traces is not None and not options.traces.is_dir():
        parser.error(f"Got --traces {str(options.traces)!r}, and there is no such folder")
    scripts = [*find_scripts(folder), *(map(Path, COMMANDS) if folder == HERE else ())]
    if options.only is not None:
        asked = options.only.split(",")
        if unknown := sorted({*asked} - {path.stem for path in scripts}):
            parser.error(f"Got --only {unknown[0]!r}, expected some of {', '.join(path.stem for path in scripts)}")
        scripts = [path for path in scripts if path.stem in asked]
    traces = options.traces.resolve() if options.traces is not None else None
    outcomes = run_all(scripts, traces, is_quick=options.quick)
    print(summary(outcomes), flush=True)
    return 1 if any(one.status == "failed" for one in outcomes) else 0


if __name__ == "__main__":
    raise SystemExit(main())
