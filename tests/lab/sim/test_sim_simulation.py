"""Whole runs: invariants under every policy."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from harness import tiny_base

from manylora.core.config import AdapterConfig, MemoryConfig, SchedulerConfig
from manylora.core.errors import AdapterError, ConfigError
from manylora.core.scheduling import POLICIES
from manylora.core.types import Tier
from manylora.lab.costs.model import FixedCost
from manylora.lab.costs.workers import CpuWorkers
from manylora.lab.sim.run.contents import PromptMaker, adapter_versions
from manylora.lab.sim.run.simulation import Run, SimulationConfig, simulate
from manylora.lab.sim.setup import Setup, make_config
from manylora.lab.workloads import AdapterSpec, RequestSpec, Workload

BASE = tiny_base(max_model_len=512)
COST = FixedCost(step_s=0.01, token_s=0.001, copy_bytes_per_s=1e6, disk_bytes_per_s=1e6)


def config(**changes: object) -> SimulationConfig:
    settings: dict[str, object] = {"base": BASE, "cost": COST, "num_pages": 200}
    return SimulationConfig(**(settings | changes))  # type: ignore[arg-type]


def workload(num_requests: int = 120, rate: float = 20.0, seed: int = 0) -> Workload:
    rng, at, requests = random.Random(seed), 0.0, []
    for _ in range(num_requests):
        at += rng.expovariate(rate)
        adapter = None if rng.random() < 0.1 else f"a{int(12 * rng.random() ** 2)}"
        requests.append(
            RequestSpec(
                arrival_s=at,
                num_prompt_tokens=rng.randint(1, 90),
                num_output_tokens=rng.randint(1, 40),
                adapter=adapter,
            )
        )
    adapters = tuple(AdapterSpec(name=f"a{index}", rank=(4, 8, 16)[index % 3]) for index in range(12))
    return Workload(name="mixed", requests=tuple(requests), adapters=adapters)


def alone(*requests: RequestSpec, **changes: object) -> Run:
    adapters = (AdapterSpec(name="a", rank=8), AdapterSpec(name="b", rank=16))
    return simulate(Workload(name="few", requests=requests, adapters=adapters), config(**changes))


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_everybody_gets_their_answer_to_the_token(policy: str):
    scheduler = SchedulerConfig(policy=policy, predictor="noisy", max_num_batched_tokens=64)
    asked = workload()
    run = simulate(asked, config(scheduler=scheduler, num_pages=60))
    assert [record.num_output_tokens for record in run.records] == [one.num_output_tokens for one in asked.requests]
    assert [record.arrived_at for record in run.records] == [one.arrival_s for one in asked.requests]
    assert all(len(record.gaps_s) == record.num_output_tokens - 1 for record in run.records)
    for record in run.records:
        assert record.error is None
        assert record.ttft_s is not None
        assert sum(record.gaps_s) == pytest.approx(record.e2e_s - record.ttft_s)
        assert record.queueing_s is not None
        if not record.num_preemptions:
            assert 0 <= record.adapter_wait_s <= record.queueing_s + 1e-9


def test_a_cold_adapter_is_waited_for_once_and_a_warm_one_not_at_all():
    first = RequestSpec(arrival_s=0.0, num_prompt_tokens=10, num_output_tokens=1, adapter="a")
    cold, warm = alone(first, replace(first, arrival_s=9.0)).records
    copy_s = adapter_versions([AdapterSpec(name="a", rank=8)], BASE)["a"].host_bytes / COST.copy_bytes_per_s
    assert cold.adapter_wait_s == pytest.approx(copy_s)
    assert cold.ttft_s == pytest.approx(copy_s + 0.01 + 10 * 0.001)
    assert warm.adapter_wait_s == 0.0
    assert warm.ttft_s == pytest.approx(0.02)
    assert (cold.was_resident, warm.was_resident) == (False, True)


def test_a_load_that_another_wait_hides_is_nobodys_wait():
    long = RequestSpec(arrival_s=0.0, num_prompt_tokens=50, num_output_tokens=60)
    hidden = RequestSpec(arrival_s=0.001, num_prompt_tokens=5, num_output_tokens=1, adapter="b")
    _, record = alone(long, hidden, scheduler=SchedulerConfig(max_num_seqs=1)).records
    assert record.queueing_s is not None
    assert record.queueing_s > 0.5
    assert record.adapter_wait_s == 0.0


def test_deciding_takes_the_time_that_it_is_said_to_take():
    request = RequestSpec(arrival_s=0.0, num_prompt_tokens=10, num_output_tokens=5)
    (fast,), (slow,) = alone(request).records, alone(request, scheduler_time_s=0.1).records
    assert slow.e2e_s == pytest.approx(fast.e2e_s + 5 * 0.1)


def test_the_engine_learns_the_length_of_an_answer_when_it_ends():
    """A policy that looks at lengths acts on the cap where truths differ and caps do not."""
    short = RequestSpec(arrival_s=0.0, num_prompt_tokens=5, num_output_tokens=2)
    requests = [replace(short, num_output_tokens=40), short, replace(short, num_output_tokens=40), short]

    def order(predictor: str) -> list[str]:
        scheduler = SchedulerConfig(policy="sjf", predictor=predictor, max_num_seqs=1)
        run = alone(*requests, scheduler=scheduler, max_tokens=64)
        return [one.request_id for one in sorted(run.records, key=lambda one: one.finished_at)]

    assert order("quantile") == ["0", "1", "2", "3"]
    assert order("oracle").index("3") < order("oracle").index("2")


def test_prefixes_are_shared_where_the_workload_says_so():
    def cached(*prefixes: tuple[int, ...]) -> list[int]:
        specs = [
            RequestSpec(
                arrival_s=float(index),
                num_prompt_tokens=100,
                num_output_tokens=3,
                prefix=prefix,
                prefix_block_tokens=32,
            )
            for index, prefix in enumerate(prefixes)
        ]
        run = alone(*specs, memory=MemoryConfig(prefix_caching=True))
        return [record.num_cached_tokens for record in run.records]

    assert cached((7, 8, 9), (7, 8, 4), (7,), (8, 7), ()) == [0, 64, 32, 0, 0]


def test_activated_adapters_find_what_the_base_or_another_has_computed():
    asked = RequestSpec(
        arrival_s=0.0, num_prompt_tokens=100, num_output_tokens=3, prefix=(7, 8, 9), prefix_block_tokens=32
    )
    requests = [replace(asked, arrival_s=float(at), adapter=name) for at, name in enumerate(["a", "b", None, "a"])]

    def served(is_activated: bool) -> Run:
        adapters = tuple(AdapterSpec(name=name, rank=8, is_activated=is_activated) for name in "ab")
        chain = Workload(name="chain", requests=tuple(requests), adapters=adapters)
        return simulate(chain, config(memory=MemoryConfig(prefix_caching=True)))

    activated, plain = served(True), served(False)
    assert [one.num_cached_tokens for one in activated.records] == [0, 96, 96, 96]
    assert [one.num_cached_tokens for one in plain.records] == [0, 0, 0, 96]
    assert activated.stats[0].num_prefix_pages < plain.stats[0].num_prefix_pages / 2


def test_prompts_are_as_long_as_asked():
    maker = PromptMaker(500, 100)
    for num_tokens in (1, 2, 5, 33, 100):
        for prefix in ((), (1,), (1, 123456)):
            spec = RequestSpec(
                arrival_s=0, num_prompt_tokens=num_tokens, num_output_tokens=1, prefix=prefix, prefix_block_tokens=32
            )
            prompt = maker.prompt(987654321, spec)
            assert len(prompt) == num_tokens
            assert 0 <= min(prompt) <= max(prompt) < 500
    own = RequestSpec(arrival_s=0, num_prompt_tokens=20, num_output_tokens=1)
    assert len({maker.prompt(index, own) for index in range(3000)}) == 3000


def test_what_cannot_be_served_is_recorded_with_its_reason():
    fits = RequestSpec(arrival_s=0.0, num_prompt_tokens=5, num_output_tokens=2, adapter="a")
    run = alone(fits, replace(fits, num_prompt_tokens=600), fits)
    assert [record.error is None for record in run.records] == [True, False, True]
    assert "600 input tokens" in (run.records[1].error or "")
    assert run.records[1].adapter == "a"
    summary = run.summary()
    assert (summary.num_requests, summary.num_errors) == (3, 1)


def test_the_timeline_accounts_for_every_page_and_every_load():
    run = simulate(workload(), config(num_pages=90, sample_every_s=0.25, adapters=AdapterConfig(max_cpu_loras=6)))
    (timeline,), (stats,) = run.timelines, run.stats
    gauges = timeline.gauges
    pages = ("num_free_pages", "num_kv_pages", "num_prefix_pages", "num_adapter_pages")
    assert len(timeline.at) > 10
    assert all(sum(gauges[name][row] for name in pages) == 90 for row in range(len(timeline.at)))
    assert len(timeline.loads[Tier.DEVICE].at) == stats.num_loads
    assert len(timeline.loads[Tier.HOST].at) == stats.num_disk_loads > 0
    assert len(timeline.steps.took_s) == stats.num_steps
    busy_s = sum(timeline.loads[Tier.DEVICE].busy_s)
    assert busy_s == pytest.approx(sum(timeline.loads[Tier.DEVICE].num_bytes) / COST.copy_bytes_per_s)


@pytest.mark.parametrize("router", ["affinity", "random"])
def test_replicas_share_the_work(router: str):
    run = simulate(workload(rate=80.0), config(num_replicas=3, router=router, num_pages=60))
    assert len(run.stats) == len(run.timelines) == 3
    assert {record.replica for record in run.records} == {0, 1, 2}
    assert [record.request_id for record in run.records] == [str(index) for index in range(120)]
    per_replica = [stats.num_generated_tokens for stats in run.stats]
    assert sum(per_replica) == sum(record.num_output_tokens for record in run.records)


def test_requests_kept_with_their_adapters_load_fewer_of_them():
    def num_loads(router: str) -> int:
        run = simulate(workload(400, rate=60.0), config(num_replicas=3, router=router, num_pages=60))
        return sum(stats.num_loads for stats in run.stats)

    assert num_loads("affinity") < 0.7 * num_loads("random")


@pytest.mark.parametrize("router", ["rank-aware", "auto"])
def test_routers_by_time_use_every_replica(router: str):
    run = simulate(
        workload(rate=80.0), config(num_replicas=3, router=router, num_pages=60, router_options={"tbt_s": 0.05})
    )
    assert {record.replica for record in run.records} == {0, 1, 2}


def test_a_replica_does_what_it_would_do_alone():
    """What one engine decides does not depend on how often another wakes the loop."""
    asked = workload(rate=60.0)
    together = simulate(asked, config(num_replicas=2, router="random", num_pages=60))
    for replica in (0, 1):
        mine = [record for record in together.records if record.replica == replica]
        requests = tuple(asked.requests[int(record.request_id)] for record in mine)
        by_itself = simulate(Workload(name="half", requests=requests, adapters=asked.adapters), config(num_pages=60))
        assert [one.finished_at for one in by_itself.records] == [one.finished_at for one in mine]


def test_progress_reaches_the_end():
    seen: list[int] = []
    simulate(workload(30), config(), on_progress=lambda num_ended, now: seen.append(num_ended))
    assert seen == sorted(seen)
    assert seen[-1] == 30


def test_adapters_are_sized_by_their_layout_and_are_themselves():
    specs = [AdapterSpec(name="a", rank=8), AdapterSpec(name="b", rank=8), AdapterSpec(name="c", rank=32)]
    versions = adapter_versions(specs, BASE)
    assert versions["a"].key != versions["b"].key
    assert versions["a"].num_pages == versions["b"].num_pages < versions["c"].num_pages
    # q, k, v and o of both layers, A and B, 64 wide, 4 bytes less than a page may be left over
    assert versions["a"].weight_bytes == 2 * 4 * 2 * 64 * 8 * BASE.page.element_bytes


def test_wrong_settings_are_named():
    with pytest.raises(ConfigError, match="num_replicas = 0"):
        config(num_replicas=0)
    with pytest.raises(ConfigError, match="block_size = 8"):
        config(memory=MemoryConfig(block_size=8))
    with pytest.raises(ConfigError, match="'nearest'"):
        simulate(workload(1), config(router="nearest"))
    wrong = Workload(name="w", requests=(), adapters=(AdapterSpec(name="x", rank=8, targets=("conv",)),))
    with pytest.raises(AdapterError, match=r"'x'.*conv applies to no module"):
        simulate(wrong, config())


def test_where_steps_read_the_host_no_first_token_waits_for_a_copy():
    cost = FixedCost(step_s=0.01, token_s=0.0, copy_bytes_per_s=1e4, disk_bytes_per_s=1e9)
    one = RequestSpec(arrival_s=0.0, num_prompt_tokens=8, num_output_tokens=3, adapter="a")
    waits = [alone(one, cost=cost, reads_host=reads_host).records[0] for reads_host in (False, True)]
    assert waits[0].ttft_s > 0.5 and waits[0].adapter_wait_s > 0.5
    assert waits[1].ttft_s == pytest.approx(0.01) and waits[1].adapter_wait_s == 0


def test_with_all_adapters_resident_no_request_waits_for_one():
    asked = workload()
    run = simulate(asked, config(num_pages=60, all_resident=True))
    assert all(record.was_resident in (None, True) and record.adapter_wait_s == 0.0 for record in run.records)
    assert run.stats[0].num_evictions == 0
    # The adapters take no pages from the pool.
    small = simulate(asked, config(num_pages=20, all_resident=True, max_tokens=40))
    assert all(record.error is None for record in small.records)


def test_requests_start_sooner_in_every_mode_than_by_waiting_for_a_slow_link():
    asked = workload(num_requests=60, rate=4.0)
    setup = Setup(
        model="llama-2-7b",
        hardware="a10",
        link_share=0.02,
        waits_by_layer=True,
        workers=CpuWorkers(cores=16),
    )
    first_tokens, steps = {}, {}
    for mode in ("wait", "assist", "layers", "auto"):
        adapters = AdapterConfig(cold_start=mode, eviction="none", look_ahead=0)
        run = simulate(asked, make_config(replace(setup, adapters=adapters)))
        assert [one.num_output_tokens for one in run.records] == [one.num_output_tokens for one in asked.requests]
        assert all(one.error is None for one in run.records)
        first_tokens[mode] = sum(one.ttft_s or 0.0 for one in run.records)
        steps[mode] = max(gap for one in run.records for gap in one.gaps_s)
        starts = {one.mode: one.num_starts for one in run.stats[0].cold_starts}
        assert mode == "auto" or starts[mode] == sum(starts.values()) > 30
    assert first_tokens["assist"] < first_tokens["layers"] < first_tokens["wait"]
    assert first_tokens["auto"] < first_tokens["wait"]
    assert steps["layers"] > 1.5 * steps["wait"], "sequences beside a cold one wait with it"
