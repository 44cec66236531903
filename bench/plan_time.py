"""The time that a plan takes: `manylora plan` as the README shows it, against the same in another checkout.

    python bench/plan_time.py --before CHECKOUT [--rounds 5]

The command runs in a process of its own, from start to end, the two checkouts taking turns; both use the environment of
this script, bytecode is kept, and they must print the same plan. A round to warm up does not count. Processor time is
that of all processes of a command. Figures are medians of the rounds with 95 % intervals, ratios those of
`bench/ratios.py`. Writes `results/plan_time.json` and `.md`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from publishing import Others, Steps, arguments, children_s, middle_of_rounds, publish, reason_to_refuse, table
from ratios import ratio_by_round

from manylora.lab.bench.rounds import in_turns, machine

HERE = Path(__file__).resolve().parent.parent
COMMAND = ("plan", "--gpu", "l40s", "--slo-ttft", "1", "--rate", "20")
GOAL_S = 60.0


def run_once(checkout: Path) -> tuple[float, float, str]:
    """Make the plan with a checkout; return seconds, seconds of processors, and what it printed."""
    environment = {**os.environ, "PYTHONPATH": str(checkout / "src"), "PYTHONDONTWRITEBYTECODE": ""}
    used, began_at = children_s(), time.perf_counter()
    command = [sys.executable, "-m", "manylora", *COMMAND]
    done = subprocess.run(command, env=environment, cwd=checkout, capture_output=True, text=True, check=False)
    took_s = time.perf_counter() - began_at
    if done.returncode:
        raise SystemExit(f"the plan of {checkout} failed: {done.stderr[-500:]}")
    return took_s, children_s() - used, done.stdout


def main() -> None:
    """Time the plans of two checkouts."""
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--before", type=Path, required=True, help="another checkout to compare with")
    options = parser.parse_args()
    checkouts = {"before": options.before.resolve(), "after": HERE}
    whole: dict[str, list[float]] = {side: [] for side in checkouts}
    processor: dict[str, list[float]] = {side: [] for side in checkouts}
    plans = set()
    steps, others = Steps(len(checkouts) * (1 + options.rounds)), Others()
    for number, side in in_turns(list(checkouts), options.rounds):
        whole_s, processor_s, plan = run_once(checkouts[side])
        if number >= 0:
            whole[side].append(whole_s)
            processor[side].append(processor_s)
        plans.add(plan)
        steps.done(f"{side}: {whole_s:.1f} s")
    if len(plans) > 1:
        raise SystemExit("the two checkouts print different plans:\n" + "\n".join(plans))
    busy, about = others.share(), machine()
    ratios = {"seconds": ratio_by_round(whole["after"], whole["before"])}
    ratios["of processors"] = ratio_by_round(processor["after"], processor["before"])
    rows = [
        [name, *(middle_of_rounds(values[side]) for side in checkouts), str(ratio)]
        for (name, ratio), values in zip(ratios.items(), (whole, processor), strict=True)
    ]
    lines = ["# Time of a plan", ""]
    lines += [f"`python bench/plan_time.py --before CHECKOUT --rounds {options.rounds}`.", ""]
    lines += [f"`manylora {' '.join(COMMAND)}`, {options.rounds} rounds on {about['cpu']}; the goal is {GOAL_S:.0f} s."]
    lines += ["Both checkouts print the same plan.", "", *table(["", "before", "after", "after over before"], rows)]
    figures = {"machine": about, "busy_share": busy, "whole_s": whole, "processor_s": processor}
    publish("plan_time", figures, "\n".join(lines), refused=reason_to_refuse(options.rounds, busy))


if __name__ == "__main__":
    main()
