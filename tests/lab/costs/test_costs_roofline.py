"""The price of a step: its limits, its laws, and that no more work is ever cheaper."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manylora.core.costs.features import step_features
from manylora.core.plan import AdapterLoad, PlannedSequence, StepPlan
from manylora.core.types import AdapterKey, AdapterVersion, SamplingParams, Tier
from manylora.lab.catalog.models import find_dims
from manylora.lab.costs.adapters import LORA_KERNELS
from manylora.lab.costs.roofline import RooflineCost, StepParts

FAMILIES = sorted(LORA_KERNELS.keys() - {"none"})
COSTS = {kernel: RooflineCost("llama-7b", "a40", lora_kernel=kernel) for kernel in LORA_KERNELS}
SAMPLING = SamplingParams()


def sequence(start: int, num_tokens: int, rank: int = 0, adapter: str = "", is_sampled: bool = True) -> PlannedSequence:
    return PlannedSequence(
        seq_id=0,
        tokens=range(start + num_tokens),
        num_prompt_tokens=start + num_tokens,
        start=start,
        num_tokens=num_tokens,
        pages=(),
        adapter=AdapterKey(adapter or f"rank-{rank}") if rank else None,
        rank=rank,
        sampling=SAMPLING,
        is_sampled=is_sampled,
        seed=0,
    )


def plan(*sequences: PlannedSequence) -> StepPlan:
    return StepPlan(step_id=0, sequences=sequences)


def parts(cost: RooflineCost, *sequences: PlannedSequence) -> StepParts:
    return cost.price(step_features(plan(*sequences)))


def adapter_time(kernel: str, *ranks: int, num_tokens: int = 1) -> float:
    """Seconds that distinct adapters of these ranks add."""
    batch = (sequence(100, num_tokens, rank, str(i)) for i, rank in enumerate(ranks))
    return parts(COSTS[kernel], *batch).adapters_s


def test_features_tell_adapted_sequences_apart() -> None:
    step = step_features(
        plan(sequence(10, 4, 8, "a", is_sampled=False), sequence(5, 1, 8, "a"), sequence(7, 1, 64, "b"), sequence(0, 3))
    )
    assert (step.context_tokens, step.prompt_context_tokens) == (6 + 8, 14 + 3)
    assert (step.num_adapted, step.num_adapted_tokens, step.num_adapters, step.num_ranks) == (3, 6, 2, 2)
    assert (step.max_rank, step.sum_rank, step.sequence_rank) == (64, 72, 80)
    assert step.row_rank == 8 * 4 + 8 + 64


def test_decoding_alone_is_reading_the_weights() -> None:
    cost = RooflineCost("llama-7b", "a40")
    layers = parts(cost, sequence(10, 1)).layers_s
    dims, device = cost.dims, cost.hardware
    read = dims.active_weights * 2 / (device.memory_bytes_per_s * device.memory_share)
    assert layers == pytest.approx(read)
    assert layers == parts(cost, *(sequence(10, 1) for _ in range(32))).layers_s  # a batch reads them once


def test_a_long_prompt_is_operations() -> None:
    cost = RooflineCost("llama-7b", "a40")
    time = cost.step_time_s(plan(sequence(0, 4096)))
    dims = cost.dims
    operations = 2 * (dims.active_weights + dims.head_weights) + 4 * dims.num_layers * dims.q_size * 2048
    floor = 4096 * operations / (cost.hardware.flops_per_s * cost.hardware.flops_share)
    assert floor * 0.95 < time < floor * 1.05  # less the head, which one row goes through; more for launches and host


def test_chunks_cost_as_many_scores_as_the_whole() -> None:
    whole = step_features(plan(sequence(0, 1000))).prompt_pairs
    assert whole == sum(step_features(plan(sequence(start, 250))).prompt_pairs for start in range(0, 1000, 250))


def test_kv_of_a_long_context_is_read_at_the_devices_bandwidth() -> None:
    cost = RooflineCost("llama-3-8b", "h100")
    batch = [sequence(8000, 1) for _ in range(64)]
    num_bytes = 64 * 8001 * cost.dims.kv_bytes_per_token
    assert parts(cost, *batch).attention_s == pytest.approx(num_bytes / cost.rates.bytes_per_s)


def test_a_mixture_reads_the_experts_it_touches() -> None:
    cost = RooflineCost("mixtral-8x7b", "h200")
    one, all_of_them = find_dims("mixtral-8x7b").active_weights, find_dims("mixtral-8x7b").num_parameters
    assert parts(cost, sequence(0, 1)).layers_s == pytest.approx(2 * one / cost.rates.bytes_per_s)
    many = parts(cost, *(sequence(0, 1) for _ in range(64))).layers_s
    assert many == pytest.approx(2 * all_of_them / cost.rates.bytes_per_s, rel=0.01)


def test_of_an_adapter_the_experts_that_its_tokens_touch_are_read() -> None:
    cost = RooflineCost("mixtral-8x7b", "h200", lora_kernel="ragged", targets=("gate_up_proj", "down_proj"))

    def read_s(num_tokens: int) -> float:
        """Return what 64 more ranks take: neither launches nor activations."""
        first, second = (
            parts(cost, *[sequence(0, 1, rank, "one") for _ in range(num_tokens)]).adapters_s for rank in (64, 128)
        )
        return second - first

    read_bytes = 2 * 64 * cost.dims.adapter_elements(cost.targets, num_experts=2)
    assert read_s(1) == pytest.approx(read_bytes / cost.rates.bytes_per_s)
    assert read_s(2) == pytest.approx(1.75 * read_s(1))  # 3.5 experts of 8
    assert read_s(64) == pytest.approx(4 * read_s(1))


@pytest.mark.parametrize("kernel", FAMILIES)
def test_no_adapter_no_cost(kernel: str) -> None:
    assert parts(COSTS[kernel], sequence(0, 10), sequence(5, 1)).adapters_s == 0
    assert adapter_time("none", 64, 8) == 0


def test_padded_kernels_grow_with_the_batch_times_the_largest_rank() -> None:
    fixed = adapter_time("padded", 8) - (adapter_time("padded", 16) - adapter_time("padded", 8))
    assert adapter_time("padded", 64, 8, 8, 8) == adapter_time("padded", 64, 64, 64, 64)
    assert adapter_time("padded", 64, 64) - fixed == pytest.approx(2 * (adapter_time("padded", 64) - fixed), rel=0.01)


@pytest.mark.parametrize("kernel", ["ragged", "s-lora-mbgmm"])
def test_unpadded_kernels_grow_with_the_sum_of_ranks(kernel: str) -> None:
    assert adapter_time(kernel, 64, 8, 8, 8) == pytest.approx(adapter_time(kernel, 22, 22, 22, 22))
    assert adapter_time(kernel, 64, 8, 8, 8) < adapter_time("padded", 64, 8, 8, 8)
    slope = adapter_time(kernel, 64) - adapter_time(kernel, 32)
    assert adapter_time(kernel, 128) - adapter_time(kernel, 64) == pytest.approx(2 * slope)


def test_one_adapter_for_many_is_read_once_only_when_rows_are_sorted() -> None:
    shared = [sequence(100, 1, 64, "same") for _ in range(8)]
    assert parts(COSTS["ragged"], *shared).adapters_s < 1.5 * adapter_time("ragged", 64)
    assert parts(COSTS["s-lora-mbgmm"], *shared).adapters_s == pytest.approx(adapter_time("s-lora-mbgmm", *[64] * 8))


def test_fewer_launches_are_quicker() -> None:
    ranks = [16] * 40
    times = [adapter_time(kernel, *ranks) for kernel in ("ragged", "grouped", "naive")]
    assert times == sorted(times)


def test_devices_share_the_work_and_pay_for_the_network() -> None:
    one, four = (RooflineCost("llama-2-70b", "a100-80", tensor_parallel_size=tp) for tp in (1, 4))
    batch = [sequence(500, 1, 32, str(i)) for i in range(16)]
    alone, together = parts(one, *batch), parts(four, *batch)
    assert together.layers_s == pytest.approx(alone.layers_s / 4)
    assert together.attention_s == pytest.approx(alone.attention_s / 4)
    assert alone.network_s == 0 < together.network_s
    assert 1 / 4 < sum(together) / sum(alone) < 1


def test_heads_of_kv_are_not_cut() -> None:
    eight, sixteen = (RooflineCost("llama-2-70b", "a100-80", tensor_parallel_size=tp) for tp in (8, 16))
    assert parts(sixteen, sequence(500, 1)).attention_s == pytest.approx(parts(eight, sequence(500, 1)).attention_s)


def test_loads_go_by_disk_or_by_link() -> None:
    cost = RooflineCost("llama-7b", "a40")
    version = AdapterVersion(
        key=AdapterKey("a"),
        source="",
        rank=32,
        num_modules=128,
        target_modules=(),
        num_pages=8,
        weight_bytes=64 << 20,
        host_bytes=64 << 20,
        disk_bytes=30 << 20,
    )
    assert cost.load_time_s(AdapterLoad(version=version, tier=Tier.HOST)) == (30 << 20) / 3e9
    device = cost.load_time_s(AdapterLoad(version=version, tier=Tier.DEVICE, pages=tuple(range(8))))
    assert device == pytest.approx((64 << 20) / 25e9, rel=0.01)
    assert (
        RooflineCost("llama-7b", "a40", lora_kernel="s-lora-mbgmm").load_time_s(
            AdapterLoad(version=version, tier=Tier.DEVICE)
        )
        > 2 * device
    )


SEQUENCES = st.builds(
    sequence,
    st.integers(0, 4000),
    st.one_of(st.just(1), st.integers(1, 2000)),
    st.sampled_from((0, 8, 16, 32, 64, 128)),
    is_sampled=st.booleans(),
)


@pytest.mark.parametrize("kernel", sorted(LORA_KERNELS))
@settings(max_examples=60)
@given(batch=st.lists(SEQUENCES, min_size=1, max_size=6), extra=SEQUENCES, more=st.integers(1, 500))
def test_more_work_is_never_cheaper(
    kernel: str, batch: list[PlannedSequence], extra: PlannedSequence, more: int
) -> None:
    cost = COSTS[kernel]
    before = cost.step_time_s(plan(*batch))
    tolerance = 1e-12
    assert cost.step_time_s(plan(*batch, extra)) >= before - tolerance
    first = batch[0]
    longer = sequence(first.start, first.num_tokens + more, first.rank, is_sampled=first.is_sampled)
    later = sequence(first.start + more, first.num_tokens, first.rank, is_sampled=first.is_sampled)
    assert cost.step_time_s(plan(longer, *batch[1:])) >= before - tolerance
    assert cost.step_time_s(plan(later, *batch[1:])) >= before - tolerance
    if first.rank:
        adapter = f"grown-{first.rank}"  # an adapter of its own on both sides
        own = sequence(first.start, first.num_tokens, first.rank, adapter, first.is_sampled)
        larger = sequence(first.start, first.num_tokens, 2 * first.rank, adapter, first.is_sampled)
        if kernel != "grouped":  # where two adapters of one rank share a product that two ranks do not, or the reverse
            assert cost.step_time_s(plan(larger, *batch[1:])) >= cost.step_time_s(plan(own, *batch[1:])) - tolerance


@given(batch=st.lists(SEQUENCES, min_size=1, max_size=6), share=st.floats(0.3, 0.9))
def test_better_hardware_is_never_slower(batch: list[PlannedSequence], share: float) -> None:
    cost = COSTS["ragged"]
    slower = replace(
        cost.hardware,
        flops_per_s=cost.hardware.flops_per_s * share,
        memory_bytes_per_s=cost.hardware.memory_bytes_per_s * share,
    )
    assert RooflineCost("llama-7b", slower).step_time_s(plan(*batch)) >= cost.step_time_s(plan(*batch))
