"""What a scheduling decision costs; the same as `manylora bench core`, where it is explained.

Run it: `python bench/decision.py` (`--quick` for a smoke test, `--profile` for where the time goes); it writes
`results/decision.json` and `.md`.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from manylora.bench.core import SCALES, decision_table, measure_decision
from manylora.config import AdapterConfig
from manylora.scheduling import POLICIES

RESULTS = Path(__file__).parent / "results"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few steps, smallest scale, nothing written")
    parser.add_argument("--policy", choices=sorted(POLICIES), action="append")
    parser.add_argument("--eviction", default=AdapterConfig().eviction)
    parser.add_argument("--profile", action="store_true", help="where the time goes, instead of a table")
    options = parser.parse_args()
    num_steps = 50 if options.quick else 1000
    costs = []
    for scale in SCALES[:1] if options.quick else SCALES:
        for policy in options.policy or sorted(POLICIES):
            cost = measure_decision(policy, options.eviction, scale, num_steps=num_steps, profile=options.profile)
            print(
                f"{policy:14} {scale.running:4} running {scale.waiting:6} waiting: {cost.launch_us:7.0f} us decision, "
                f"{cost.launch_p90_us:7.0f} p90, {cost.turn_us:7.0f} us turn, goal {scale.goal_us:.0f}, "
                f"{cost.admitted_per_step:.2f} admitted, {cost.mean_running:.0f} running",
                flush=True,
            )
            costs.append(cost)
    if not (options.quick or options.profile):
        table = decision_table(
            costs, command="python bench/decision.py", eviction=options.eviction, num_steps=num_steps
        )
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "decision.json").write_text(json.dumps([asdict(cost) for cost in costs], indent=1) + "\n")
        (RESULTS / "decision.md").write_text(table)


if __name__ == "__main__":
    main()
