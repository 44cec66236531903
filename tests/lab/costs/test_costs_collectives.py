"""Devices that share a model: what they exchange, how long that takes, and what each holds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from manylora.core.costs.features import StepFeatures, step_features
from manylora.core.errors import ConfigError, ModelTooLarge
from manylora.core.types import AdapterKey
from manylora.execution import step_graphs
from manylora.lab.catalog.dims import LatentAttention, ModelDims
from manylora.lab.catalog.hardware import find_hardware
from manylora.lab.catalog.models import find_dims
from manylora.lab.costs.collectives import MOST_TOKENS, ROOM_RANK, CollectiveCall, CollectiveCost
from manylora.lab.costs.model import SyntheticSequence, synthetic_plan
from manylora.lab.costs.roofline import RooflineCost, StepParts, memory_for_pool
from manylora.lab.sim.setup import Setup, make_config

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
COUNTED = ModelDims(
    name="counted",
    hidden_size=512,
    num_layers=4,
    num_heads=8,
    num_kv_heads=4,
    head_dim=64,
    intermediate_size=1408,
    vocab_size=4096,
    max_model_len=512,
    dtype="float32",
)


def decode(num: int, context: int = 512, rank: int = 0) -> StepFeatures:
    keys = [AdapterKey(str(index)) if rank else None for index in range(num)]
    return step_features(synthetic_plan(SyntheticSequence(context - 1, 1, key, rank) for key in keys))


def collectives(hardware: str, size: int, dims: ModelDims = COUNTED, *, is_by_table: bool = False) -> CollectiveCost:
    return CollectiveCost(dims, find_hardware(hardware), size, ALL, is_by_table=is_by_table)


@pytest.mark.parametrize(("size", "base"), [(2, 1_703_936), (4, 1_441_792)])
def test_calls_and_bytes_are_those_that_were_counted(size: int, base: int) -> None:
    """`bench/results/tensor_parallel.md`: 64 tokens, rank 16 on all linears."""
    calls = list(collectives("a40", size).calls(decode(64, rank=16)))
    for purpose, num_calls, num_bytes in (("base", 10, base), ("lora", 16, 114_688)):
        own = [call for call in calls if call.purpose == purpose]
        assert sum(call.num_calls for call in own) == num_calls
        assert sum(call.num_calls * call.num_bytes for call in own) == num_bytes


@pytest.mark.parametrize("size", [2, 4, 8])
def test_sums_are_rings_over_the_link(size: int) -> None:
    nvlink, pcie = collectives("h100", size), collectives("l40s", size)
    hops, ring = 2 * (size - 1), 2 * (size - 1) / size
    small, large = CollectiveCall("base", 1, 1024), CollectiveCall("base", 1, 1 << 30)
    assert nvlink.time_s(small) == pytest.approx(6.6e-6 + hops * 0.6e-6 + ring * 1024 / 87.7e9)
    assert nvlink.time_s(large) == pytest.approx(8.4e-6 + hops * 3.4e-6 + ring * large.num_bytes / 360e9)
    assert pcie.time_s(small) == pytest.approx(6.6e-6 + hops * 1e-6 + ring * 1024 / 2.5e9)
    assert pcie.time_s(large) == pytest.approx(8.4e-6 + hops * 5.7e-6 + ring * large.num_bytes / 10e9)
    gathered = CollectiveCall("base", 1, 1 << 30, is_gather=True)
    assert nvlink.time_s(gathered) == pytest.approx(8.4e-6 + 3.4e-6 + (size - 1) * large.num_bytes / 360e9)


def test_a_sum_of_medium_size_takes_the_protocol_between() -> None:
    num_bytes = 8 << 20
    expected = 14e-6 + 14 * 1.9e-6 + 1.75 * num_bytes / (0.92 * 360e9)
    assert collectives("h100", 8).time_s(CollectiveCall("base", 1, num_bytes)) == pytest.approx(expected)
    times = [collectives("h100", 8).time_s(CollectiveCall("base", 1, 1 << power)) for power in range(34)]
    assert times == sorted(times)


def test_tables_add_up_their_room() -> None:
    cost = collectives("h100", 2, is_by_table=True)
    (decoding,) = (call for call in cost.calls(decode(64, rank=16)) if call.purpose == "lora")
    assert decoding == CollectiveCall("lora", 16, 64 * 384 * 4)
    (wide,) = (call for call in cost.calls(decode(64, rank=256)) if call.purpose == "lora")
    assert wide.num_bytes == 64 * 3 * 256 * 4
    (eager,) = (call for call in cost.calls(decode(1200, rank=16)) if call.purpose == "lora")
    assert eager.num_bytes == 1200 * 3 * 16 * 4


def test_the_room_of_tables_is_that_of_captured_steps() -> None:
    assert (ROOM_RANK, MOST_TOKENS) == (step_graphs.ROOM_RANK, step_graphs.MOST_TOKENS)


def test_a_step_without_samples_gathers_nothing_and_without_adapters_adds_nothing() -> None:
    step = decode(3)
    unsampled = StepFeatures(**{name: getattr(step, name) for name in step.__struct_fields__} | {"num_sampled": 0})
    assert [call.num_calls for call in collectives("h100", 2).calls(unsampled)] == [9]
    assert all(call.purpose == "base" for call in collectives("h100", 2).calls(step))
    none = RooflineCost("llama-3-8b", "h100", lora_kernel="none", tensor_parallel_size=2)
    assert none.price(decode(8, rank=16)) == none.price(decode(8))


def test_experts_that_all_tokens_use_add_a_sum() -> None:
    mixture = replace(
        COUNTED, num_experts=8, experts_per_token=2, num_shared_experts=1, num_dense_layers=1, dense_size=512
    )
    (sums, _) = CollectiveCost(mixture, find_hardware("h100"), 2, (), is_by_table=False).calls(decode(1))
    assert sums.num_calls == 1 + 2 * 4 + 3


ONE_DEVICE = [
    ("llama-7b", "a40", "s-lora-mbgmm", "0x1.c1c62a1f4f886p-6", 29237698560),
    ("llama-3-8b", "h100", "ragged", "0x1.f322119be07b1p-8", 59950867087),
    ("mixtral-8x7b", "h200", "padded", "0x1.b6857e3001347p-6", 41283362160),
]
"""Prices and pools from before devices shared layers, to the last bit."""


@pytest.mark.parametrize(("model", "hardware", "kernel", "price", "pool"), ONE_DEVICE)
def test_one_device_is_priced_as_ever(model: str, hardware: str, kernel: str, price: str, pool: int) -> None:
    rows = [
        SyntheticSequence(500, 1, AdapterKey("a"), 16),
        SyntheticSequence(700, 1, AdapterKey("b"), 64),
        SyntheticSequence(100, 30),
    ]
    parts = RooflineCost(model, hardware, lora_kernel=kernel).price(step_features(synthetic_plan(rows)))
    assert (sum(parts).hex(), parts.network_s) == (price, 0.0)
    assert memory_for_pool(model, hardware) == pool


def test_a_step_is_divided_but_for_what_each_device_does_whole() -> None:
    one, four = (RooflineCost("llama-3-70b", "h200", tensor_parallel_size=size) for size in (1, 4))
    alone, shared = (cost.price(decode(64, rank=16)) for cost in (one, four))
    for name in ("layers_s", "attention_s"):
        assert getattr(shared, name) == pytest.approx(getattr(alone, name) / 4)
    launches_s = 2 * 2 * 80 * one.hardware.launch_s  # of two groups, by every device
    assert shared.adapters_s - launches_s == pytest.approx((alone.adapters_s - launches_s) / 4)
    assert (shared.launches_s, shared.host_s) == (alone.launches_s, alone.host_s)
    sampler_s = 64 * 4 * 4 * one.dims.vocab_size / one.rates.bytes_per_s  # by one device
    assert shared.head_s - sampler_s == pytest.approx((alone.head_s - sampler_s) / 4)
    calls = collectives("h200", 4, one.dims, is_by_table=True)
    qkvo = CollectiveCost(one.dims, one.hardware, 4, ALL[:4], is_by_table=True)
    assert shared.network_s == pytest.approx(qkvo.step_time_s(decode(64, rank=16)))
    assert shared.network_s < calls.step_time_s(decode(64, rank=16))  # adapters on more groups


def test_routers_and_keys_of_few_heads_are_on_every_device() -> None:
    mixture, dense = find_dims("mixtral-8x7b"), find_dims("llama-2-70b")
    router, keys = (
        mixture.num_layers * mixture.hidden_size * 8,
        2 * dense.num_layers * dense.hidden_size * dense.kv_size,
    )
    assert mixture.repeated_weights(4) == 3 * router
    assert (dense.repeated_weights(8), dense.repeated_weights(16)) == (0, keys)
    assert dense.weight_bytes_on(1) == dense.weight_bytes
    assert dense.weight_bytes_on(4) == dense.weight_bytes + 3 * 2 * (2 * 80 + 1) * 8192
    latent = replace(COUNTED, num_kv_heads=8, latent=LatentAttention(kv_rank=32, rope_dim=16, query_rank=48))
    assert latent.repeated_weights(2) == 4 * 512 * (32 + 16 + 48)


def decoding_tokens(cost: RooflineCost, tokens: int) -> StepParts:
    return cost.price(decode(tokens))


def test_arithmetic_of_routers_is_not_divided() -> None:
    one, two = (RooflineCost("mixtral-8x7b", "h200", tensor_parallel_size=size) for size in (1, 2))
    router = 2 * 32 * 4096 * 8 / one.rates.flops_per_s
    alone, shared = (decoding_tokens(cost, 8000).layers_s / 8000 for cost in (one, two))
    assert shared == pytest.approx((alone + router) / 2)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_pages_have_the_memory_of_all_devices_less_what_is_on_each(size: int) -> None:
    dims, device = find_dims("llama-3-8b"), find_hardware("h200")
    one, many = (memory_for_pool(dims, device, each, max_num_batched_tokens=1) for each in (1, size))
    rows = 1 * 4 * dims.hidden_size * 2 + 2 * 128 * dims.vocab_size * 4  # activations that are whole on each
    norms = dims.norm_weights * 2
    expected = size * (0.9 * device.memory_bytes - device.context_bytes - rows - norms)
    divided = dims.weight_bytes - norms + 3 * dims.intermediate_size * 2
    assert many == pytest.approx(expected - divided, abs=size)
    assert many > size * one


def test_a_page_spans_the_devices_and_holds_copies_of_few_heads() -> None:
    eight, sixteen = (
        make_config(Setup(model="llama-3-70b", hardware="h100", tensor_parallel_size=size)) for size in (8, 16)
    )
    page = find_dims("llama-3-70b").page_shape(16)
    assert eight.base.page == page
    assert sixteen.base.page.num_bytes == 2 * page.num_bytes
    assert sixteen.base.modules == eight.base.modules


def test_devices_that_cannot_divide_a_model_are_refused() -> None:
    for size, message in ((0, "expected at least 1"), (3, "expected a divisor of hidden_size = 8192 of llama-3-70b")):
        with pytest.raises(ConfigError, match=message):
            RooflineCost("llama-3-70b", "h100", tensor_parallel_size=size)
    odd = replace(COUNTED, num_kv_heads=6, num_heads=12, hidden_size=768)
    with pytest.raises(ConfigError, match="a divisor or a multiple of num_kv_heads = 6"):
        odd.check_divides(4)
    with pytest.raises(ConfigError, match="LoRA of experts is not divided"):
        RooflineCost("mixtral-8x7b", "h100", tensor_parallel_size=2, targets=("down_proj",))
    with pytest.raises(ModelTooLarge, match="on 2 x a40 needs"):
        memory_for_pool("llama-3-70b", "a40", 2)
