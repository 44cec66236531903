"""A run of functions is the same to the digit everywhere.

A changed digest is a change of behaviour: look at what changed, and if it is meant, print the new one with
``python tests/golden/test_function_runs.py``.
"""

from __future__ import annotations

import hashlib
import random

from manylora.lab.functions.setup import FunctionsSetup
from manylora.lab.functions.simulation import FunctionsRun, FunctionsSimulation
from manylora.lab.workloads import AdapterSpec, RequestSpec, Workload

DIGEST = "5f363ede686f12e872bff158756ed8d8"


def simulate() -> FunctionsRun:
    """Run bursts over eight functions of two models, on four devices that cannot hold all that is loaded."""
    rng = random.Random(5)
    at, requests = 60.0, []
    for _ in range(400):
        at += rng.expovariate(0.05) if rng.random() < 0.05 else rng.expovariate(4.0)
        requests.append(
            RequestSpec(
                arrival_s=at,
                num_prompt_tokens=rng.randint(10, 200),
                num_output_tokens=rng.randint(1, 200),
                adapter=f"f{rng.randrange(8)}",
            )
        )
    adapters = tuple(AdapterSpec(name=f"f{index}", rank=8 << index % 3) for index in range(8))
    published = {"joins": False, "patience": 0.0, "rents": False, "preload_copies": "node"}
    setup = FunctionsSetup(num_nodes=1, keep_alive_s=20.0, **published)  # type: ignore[arg-type]
    return FunctionsSimulation(Workload(name="golden", requests=tuple(requests), adapters=adapters), setup).run()


def digest(run: FunctionsRun) -> str:
    lines = [f"{one.number} {one.started_at!r} {one.answered_from!r} {one.finished_at!r}" for one in run.calls]
    lines += [f"{name} {tuple(usage)}" for name, usage in sorted(run.accounts.items())]
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=16).hexdigest()


def test_the_run_is_the_one_on_record() -> None:
    run = simulate()
    # The trace exercises what the digest is to guard.
    assert min(run.counts["starts"], run.counts["offloads"]) > 0
    assert run.counts["peak_batch"] > 3
    assert digest(run) == DIGEST


if __name__ == "__main__":
    print(digest(simulate()))
