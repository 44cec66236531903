"""vLLM in the forecast on traces: what its sweep asks, what its records say, and what its twin begins with."""

from __future__ import annotations

from random import Random

import pytest
from forecast_vllm import CONTEXT, NUM_HOST, NUM_SLOTS, after, bursts, records_of
from planner_live import SCHEDULER
from vllm_child import Round
from vllm_log import Served
from vllm_twin import BASE, TARGETS, serve_simulated, vllm_rules

from manylora.lab.costs.model import FixedCost
from manylora.lab.workloads import AdapterSpec, RequestSpec, Workload

NAMES = [f"a{number}" for number in range(24)]
ADAPTERS = tuple(AdapterSpec(name=name, rank=64, targets=TARGETS) for name in NAMES)


def workload(*requests: tuple[float, str, int]) -> Workload:
    return Workload(
        name="w",
        requests=tuple(
            RequestSpec(arrival_s=at, num_prompt_tokens=8, num_output_tokens=tokens, adapter=name)
            for at, name, tokens in requests
        ),
        adapters=ADAPTERS,
    )


def test_a_twin_begins_with_the_adapters_that_are_there() -> None:
    recent = NAMES[:NUM_HOST]
    held, evicted, fresh = recent[-NUM_SLOTS], recent[0], NAMES[-1]
    begun = after(workload((0.0, held, 4), (50.0, evicted, 4), (100.0, fresh, 4)), recent)
    assert [one.arrival_s for one in begun.requests[-3:]] == [160.0, 210.0, 260.0]
    served = serve_simulated(begun.requests, vllm_rules(), BASE, FixedCost())
    assert [(kind, name) for kind, name, *_, ended in served.loads if ended > 160.0] == [
        ("copy", evicted),
        ("read", fresh),
        ("copy", fresh),
    ]


def test_records_are_in_order_of_arrival_and_checked() -> None:
    asks = workload((0.0, "a3", 2), (0.5, "a1", 1))
    times = {"8": [13.0], "7": [11.0, 12.0]}
    done = Round(Served({"7": ("a3", 10.0), "8": ("a1", 10.5)}, times, [], 3.0), [])
    records = records_of(asks, done)
    assert [(one.adapter, one.ttft_s, one.finished_at) for one in records] == [("a3", 1.0, 12.0), ("a1", 2.5, 13.0)]
    with pytest.raises(AssertionError):
        records_of(workload((0.0, "a3", 3), (0.5, "a1", 1)), done)


def test_a_sweep_names_an_adapter_in_every_request_and_fits_the_context() -> None:
    drawn = bursts(NAMES, Random(0))
    asked = [one for _ in range(200) for one in next(drawn)]
    assert {one.adapter for one in asked} == set(NAMES)
    assert max(one.num_prompt_tokens + one.num_output_tokens for one in asked) <= CONTEXT
    assert max(one.num_prompt_tokens for one in asked) > SCHEDULER.max_num_batched_tokens, "prompts are cut"
