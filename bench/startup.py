"""The start of a server of a tiny model: seconds from the command to the line that says its address, by stage.

    python bench/startup.py [--quick] [--rounds 7] [--before DIR]

`manylora serve demo` starts and ends again and again, with the files of earlier starts in the page cache, the bytecode
written and the kernels compiled. With `--before DIR`, another checkout (its `src` is imported) takes turns with this
one. Stages are told apart by lines of the log, and begin where the one before ends:

* *command*: the interpreter, the options, and the configuration;
* *imports*: until the engine has imported torch and transformers, which it does beside the command and the text side;
* *weights*: read, fused and frozen, and the modules around them;
* *check*: kernels from their cache, and sequences that must not influence one another;
* *ready*: adapters are registered, the tokenizer is loaded, the server listens.

An older checkout does not log the stages within the engine: they are one there. *Processor time* is that of all
processes of a start, and the figure to compare on a busy machine. Figures are medians of the rounds, the ratio that of
`bench/ratios.py`. Writes `results/startup.json` and `.md`.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from publishing import Others, arguments, children_s, publish, reason_to_refuse, table
from ratios import ratio_by_round

from manylora.lab.bench.rounds import in_turns, machine

HERE = Path(__file__).resolve().parent.parent
MARKS = {
    "command": "; its address follows",
    "imports": "stage=imports",
    "weights": "stage=modules",
    "check": "model_loaded",
    "ready": "manylora serves",
}
"""The line at the end of each stage."""

TIMEOUT_S = 300.0


def start_once(checkout: Path) -> dict[str, float]:
    """Start a server and end it; return the seconds of its stages, of all, and of processors."""
    environment = {**os.environ, "PYTHONPATH": str(checkout / "src"), "PYTHONUNBUFFERED": "1"}
    environment["PYTHONDONTWRITEBYTECODE"] = ""  # kept, as after an installation
    used = children_s()
    began_at = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "manylora", "serve", "demo", "--port", "0"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=checkout,
    )
    assert process.stdout is not None
    stages: dict[str, float] = {}
    last_at = began_at
    for line in process.stdout:
        name = next((name for name, words in MARKS.items() if words in line and name not in stages), None)
        if name is not None:
            now = time.perf_counter()
            stages[name], last_at = now - last_at, now
        if name == "ready":
            break
        if time.perf_counter() - began_at > TIMEOUT_S:
            break
    process.terminate()
    rest = process.communicate()[0]
    if "ready" not in stages:
        raise SystemExit(f"the server of {checkout} did not start: {rest[-500:]}")
    return stages | {"whole": last_at - began_at, "processor": children_s() - used}


def page(found: Mapping[str, Sequence[Mapping[str, float]]], processor: str) -> str:
    """Return the page of starts by side."""

    def median(side: str, stage: str) -> str:
        values = [one[stage] for one in found[side] if stage in one]
        return f"{statistics.median(values):.2f}" if values else "-"

    sides = list(found)
    stages = [*MARKS, "whole", "processor"]
    rows = [[stage, *(median(side, stage) for side in sides)] for stage in stages]
    num_rounds = len(found[sides[-1]])
    beside = " --before CHECKOUT" if len(sides) == 2 else ""
    lines = ["# Start of a tiny model", "", f"`python bench/startup.py --rounds {num_rounds}{beside}`.", ""]
    lines += [f"Seconds, medians of {num_rounds} starts on {processor}.", ""]
    lines += table(["stage", *sides], rows)
    for stage in ("whole", "processor"):
        if len(sides) == 2:
            before, after = ([one[stage] for one in found[side]] for side in sides)
            lines += ["", f"{stage.capitalize()}, after over before: {ratio_by_round(after, before)}."]
    return "\n".join(lines)


def main() -> None:
    """Measure the starts of one or two checkouts."""
    parser = arguments(__doc__, quick="one round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--before", type=Path, help="another checkout to compare with")
    options = parser.parse_args()
    checkouts = {"after": HERE} if options.before is None else {"before": options.before.resolve(), "after": HERE}
    num_rounds = 1 if options.quick else options.rounds
    found: dict[str, list[dict[str, float]]] = {side: [] for side in checkouts}
    others = Others()
    for number, side in in_turns(list(checkouts), num_rounds, num_warm_up=0 if options.quick else 1):
        one = start_once(checkouts[side])
        if number >= 0:
            found[side].append(one)
    busy = others.share()
    about = machine()
    figures = {"machine": about, "num_rounds": num_rounds, "busy_share": busy, "starts": found}
    refused = reason_to_refuse(num_rounds, busy)
    publish("startup", figures, page(found, str(about["cpu"])), is_kept=not options.quick, refused=refused)


if __name__ == "__main__":
    main()
