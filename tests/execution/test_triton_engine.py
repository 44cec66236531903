"""The whole step on the Triton kernels, interpreted, gives the logits of the step on torch."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from expert_cases import write_single_experts
from live_executor import BLOCK, KERNELS, executor_of, finish, folders, load_all, run, sequence
from msgspec import structs
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from manylora.core.clock import WallClock
from manylora.core.config import EngineConfig, MemoryConfig, ModelConfig, SchedulerConfig
from manylora.core.costs.arriving import WaitBudget
from manylora.core.errors import ConfigError
from manylora.core.plan import IN_HOST, StepPlan, StepResult
from manylora.core.ports import EngineParts
from manylora.core.types import AdapterKey
from manylora.execution.attention.call import choose_attention
from manylora.execution.build import build_parts
from manylora.execution.device import DeviceOps
from manylora.execution.lora.kernels import choose_kernel
from manylora.execution.model.precision import Precision, round_to_codes
from manylora.execution.runner import OffDevice
from manylora.execution.step_graphs import batch_buckets, token_buckets
from manylora.execution.storage.adapter_files import InlineReader
from manylora.execution.storage.arrival import Arrival, ArrivingAdapter

pytest.importorskip("triton")

__all__ = ["folders"]


def build(folders: dict[str, Path], kernels: str) -> EngineParts:
    config = EngineConfig(
        model=ModelConfig(model=str(folders["base"]), device="cpu", **KERNELS[kernels]),
        memory=MemoryConfig(block_size=BLOCK, num_pages=256, kv_cache_dtype="float32"),
        scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=32),
    )
    return build_parts(config, WallClock(), is_checked=True, readers=[InlineReader()])


def serve(parts: EngineParts, folders: dict[str, Path]) -> list[torch.Tensor]:
    """Run a mixed prompt step, then decode: the base alone, then with one adapter, then with two."""
    versions = load_all(parts, {name: folders[name] for name in ("one", "two")})
    keys = [None, *(version.key for version in versions.values())]
    tokens = [[(7 * i + 5 * s) % 100 for i in range(6 + s)] for s in range(3)]
    logits = [run(parts, *(sequence(tokens[s], 0, len(tokens[s]), 8 * s, keys[s], seq_id=s) for s in range(3)))]
    last = [row.argmax() for row in logits[0]]
    for batch in ([0], [1, 0], [0, 1, 2], [2, 0, 1]):
        for s in batch:
            tokens[s].append(int(last[s]))
        rows = run(parts, *(sequence(tokens[s], len(tokens[s]) - 1, 1, 8 * s, keys[s], seq_id=s) for s in batch))
        logits.append(rows)
        for row, s in zip(rows, batch, strict=True):
            last[s] = row.argmax()
    return logits


@pytest.fixture(scope="module")
def expected(folders: dict[str, Path]) -> list[torch.Tensor]:
    parts = build(folders, "torch")
    try:
        return serve(parts, folders)
    finally:
        parts.close()


@pytest.mark.parametrize("kernels", ["triton", "graphs"])
def test_logits_equal_those_of_torch(
    kernels: str, folders: dict[str, Path], expected: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Little room at first: the second adapter must make the tables grow.
    monkeypatch.setattr("manylora.execution.step_graphs.ROOM_RANK", 1)
    monkeypatch.setattr("manylora.execution.step_graphs.ROOM_TILES", 1)
    parts = build(folders, kernels)
    try:
        found = serve(parts, folders)
        graphs = executor_of(parts).runner._graphs
        assert (graphs is not None) == ("graphs" in kernels)
        assert graphs is None or {(1, False), (2, False), (4, False), (32, True)} <= {key[0] for key in graphs._graphs}
    finally:
        parts.close()
    for rows, of_torch in zip(found, expected, strict=True):
        torch.testing.assert_close(rows, of_torch, atol=1e-5, rtol=1e-5)


def test_experts_of_a_mixture_equal_those_of_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured, so that no step may ask which experts were chosen; the kernels of the CPU are told."""
    monkeypatch.setattr("manylora.execution.step_graphs.ROOM_EXPERT_RANK", 6)  # the second adapter needs more
    torch.manual_seed(4)
    config = MixtralConfig(
        vocab_size=100,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        num_local_experts=4,
    )
    MixtralForCausalLM(config).save_pretrained(tmp_path / "base")
    folders = {"base": tmp_path / "base"}
    for rank, name in ((3, "one"), (9, "two")):  # 6 and 18 of gate and up: one tile, and two
        folders[name] = write_single_experts("mixtral", folders["base"], tmp_path / name, r=rank, lora_alpha=6)
    found = {}
    for kernels in ("torch", "graphs"):
        parts = build(folders, kernels)
        try:
            found[kernels] = serve(parts, folders)
        finally:
            parts.close()
    for rows, expected in zip(found["graphs"], found["torch"], strict=True):
        torch.testing.assert_close(rows, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("is_tied", [False, True], ids=["", "tied"])
@pytest.mark.parametrize("base", ["int8", "int4"])
def test_a_base_in_codes_is_its_numbers(
    base: str, is_tied: bool, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole step over codes, as on a GPU, gives the logits of the step over the weights that they stand for."""
    pytest.importorskip("numba")
    config = LlamaConfig.from_pretrained(folders["base"])
    config.tie_word_embeddings = is_tied
    torch.manual_seed(3)
    model = LlamaForCausalLM(config)
    model.save_pretrained(tmp_path / "base")
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            numbers = "int8" if name == "lm_head" else base
            module.weight.data = round_to_codes(module.weight.data, numbers).dequantise()
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == is_tied
    model.save_pretrained(tmp_path / "rounded")
    parts = build({"base": tmp_path / "rounded"}, "torch")
    try:
        expected = serve(parts, folders)
    finally:
        parts.close()
    precision = Precision(torch.float32, base, is_rounded=False, is_by_row=True)
    monkeypatch.setattr(Precision, "choose", lambda *_: precision)
    parts = build({"base": tmp_path / "base"}, "graphs")
    try:
        assert any(line.startswith(f"{base}, a scale for ") for line in parts.base_weights)
        found = serve(parts, folders)
    finally:
        parts.close()
    for rows, of_numbers in zip(found, expected, strict=True):
        torch.testing.assert_close(rows, of_numbers, atol=1e-5, rtol=1e-5)


def test_a_step_that_cannot_be_captured_runs_eagerly(
    folders: dict[str, Path],
    expected: list[torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(self: DeviceOps, work: Callable[[], None]) -> Callable[[], None]:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(DeviceOps, "capture", refuse)
    parts = build(folders, "graphs")
    try:
        found = serve(parts, folders)
    finally:
        parts.close()
    assert "graphs_off reason=operation not permitted" in caplog.text
    torch.testing.assert_close(found[-1], expected[-1], atol=1e-5, rtol=1e-5)


def test_a_step_whose_adapters_are_all_copied_is_replayed(folders: dict[str, Path]) -> None:
    """On a GPU the copies are in their stream then, and a graph has only to wait for the last of them."""
    parts = build(folders, "graphs")
    try:
        runner, (version,) = executor_of(parts).runner, load_all(parts, {"one": folders["one"]}).values()
        part = sequence([5, 6, 7], 0, 3, 0, version.key)
        rows: list[torch.Tensor] = []
        runner.logits_hook = lambda plan, logits: rows.append(logits)
        plan, weights = StepPlan(step_id=1, sequences=(part,)), runner.resident[version.key]
        assert runner.run(plan).launch_s == 0.0
        for num_pages, is_replayed in ((version.num_pages, True), (version.num_pages - 1, False)):
            arrival, budget = Arrival(version.num_pages), WaitBudget(0.0)
            arrival.advance(num_pages)
            adapter = ArrivingAdapter(weights, weights.memory.layout.groups, arrival, budget)
            result = runner.run(plan, OffDevice(arriving={version.key: adapter}, wait_budget=budget))
            assert (result.launch_s == 0.0) == bool(result.tokens) == is_replayed != adapter.is_late
        torch.testing.assert_close(rows[1], rows[0], atol=0, rtol=0)
    finally:
        parts.close()


def test_rows_of_padding_hold_numbers(folders: dict[str, Path]) -> None:
    """Nobody writes a padded row's attention: what memory held before must not go through the model in its place."""
    parts = build(folders, "graphs")
    try:
        run(parts, *(sequence([s + 1], 0, 1, 8 * s, None, seq_id=s) for s in range(3)))
        graphs = executor_of(parts).runner._graphs
        assert graphs is not None and (4, False) in {key[0] for key in graphs._graphs}
        assert graphs._logits.isfinite().all()
    finally:
        parts.close()


def test_an_order_made_ahead_is_dropped_with_a_sequence_that_is_left_out(folders: dict[str, Path]) -> None:
    """Both steps are launched before the first begins, and the second lacks an adapter whose files are gone."""
    parts = build(folders, "graphs")
    try:
        executor, may_begin = executor_of(parts), threading.Event()
        (version,) = load_all(parts, {"one": folders["one"]}).values()
        gone = replace(version, key=AdapterKey("gone"), source=str(folders["one"] / "gone"))
        executor._copied[gone.key] = gone
        prompts = [sequence([5, 6, 7], 0, 3, 0, version.key, 0), sequence([8, 9], 0, 2, 8, None, 1)]
        one, two = (structs.replace(part, start=part.num_tokens, num_tokens=1) for part in prompts)
        cold = structs.replace(sequence([3, 4], 0, 2, 16, gone.key, 2), placement=IN_HOST)
        ahead = [structs.replace(two, awaits_token=True), cold, structs.replace(one, awaits_token=True)]
        executor._steps.submit(may_begin.wait)
        plans = [StepPlan(step_id=number, sequences=tuple(own)) for number, own in enumerate((prompts, ahead))]
        steps = [executor.launch(plan, 0.0) for plan in plans]
        may_begin.set()
        first, second = (finish(step) for step in steps)
        assert isinstance(first, StepResult) and isinstance(second, StepResult)
        assert second.failed.keys() == {cold.seq_id} and second.launch_s == 0.0, "the others are replayed"
        tokens = {part.seq_id: [*part.tokens, first.tokens[part.seq_id].token_id] for part in (one, two)}
        filled = tuple([structs.replace(part, tokens=tokens[part.seq_id]) for part in (one, two)])
        assert second.tokens == executor.runner.run(StepPlan(step_id=2, sequences=filled)).tokens
    finally:
        parts.close()


def test_buckets() -> None:
    assert batch_buckets(1) == (1,)
    assert batch_buckets(30) == (1, 2, 4, 8, 16, 24, 30)
    sizes = batch_buckets(512)
    assert sizes == tuple(sorted(set(sizes))) and sizes[-1] == 512 and len(sizes) < 36
    assert token_buckets(8) == (8,) and token_buckets(20) == (8, 16, 20) and token_buckets(640)[-3:] == (384, 512, 640)


def test_kernels_by_device(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert (choose_kernel("auto", cpu), choose_attention("auto", cpu)) == ("grouped", "torch")
    assert (choose_kernel("auto", gpu), choose_attention("auto", gpu)) == ("ragged", "triton")
    assert (choose_kernel("naive", gpu), choose_attention("torch", gpu)) == ("naive", "torch")
    monkeypatch.setattr("manylora.execution.kernels.triton.support.is_interpreted", lambda: False)
    with pytest.raises(ConfigError, match="lora_kernel = 'ragged', which cannot run here: Triton needs a GPU"):
        choose_kernel("ragged", cpu)
    with pytest.raises(ConfigError, match="attention_kernel = 'triton', which cannot run here"):
        choose_attention("triton", cpu)


def test_a_bucket_in_use_gets_a_graph_of_its_own_groups(
    folders: dict[str, Path], expected: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The start's graph of all groups serves at once; one of fewer launches takes over, and is not kept too long."""
    captured: list[None] = []

    def capture(self: DeviceOps, work: Callable[[], None]) -> Callable[[], None]:
        captured.append(None)
        return work

    monkeypatch.setattr(DeviceOps, "capture", capture)
    parts = build(folders, "graphs")
    try:
        graphs = executor_of(parts).runner._graphs
        assert graphs is not None and graphs._space is not None
        graphs._space.compile(8)
        graphs.narrow_after = 1
        graphs.warm()
        assert len(captured) == len(graphs._graphs) == 2 * sum(map(len, graphs._sizes.values()))
        found = serve(parts, folders)
        own = {key for key in graphs._graphs if key[1] not in (b"", graphs._every)}
        assert own and len({key[1] for key in own}) == 1, "graphs of fewer groups have gone"
    finally:
        parts.close()
    for rows, of_torch in zip(found, expected, strict=True):
        torch.testing.assert_close(rows, of_torch, atol=1e-5, rtol=1e-5)
