"""A model that workers share: how it is divided, what they exchange, and their end."""

from __future__ import annotations

import os
import signal
import time
import warnings
from contextlib import suppress
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path
from queue import Empty, SimpleQueue
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest
import torch
import transformers
from live_executor import BLOCK, finish, folders, load, pages_for, sequence  # noqa: F401
from parity_cases import ARCHITECTURES, FURTHER_ARCHITECTURES
from peft import LoraConfig, get_peft_model
from shared_model import build_workers, join
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    OlmoeConfig,
    PreTrainedConfig,
)

from manylora.core.clock import WallClock
from manylora.core.config import EngineConfig, MemoryConfig, ModelConfig
from manylora.core.costs.features import step_features
from manylora.core.errors import AdapterError, ConfigError, EngineDead
from manylora.core.plan import PromptRows, StepPlan
from manylora.core.server_config import FleetConfig
from manylora.core.types import Tier
from manylora.execution import worker_group
from manylora.execution.build import build_parts
from manylora.execution.checkpoint.codes import make_codes
from manylora.execution.model.share import ModelShare, WeightCut, share_config
from manylora.execution.peers import Answer, Failed, Here
from manylora.lab.catalog.hardware import find_hardware
from manylora.lab.costs.collectives import CollectiveCost
from manylora.lab.sim.setup import read_dims
from manylora.serving.server.serve import engine_specs


def config_of(base: Path, size: int = 1) -> EngineConfig:
    model = ModelConfig(model=str(base), device="cpu", tensor_parallel_size=size)
    return EngineConfig(model=model, memory=MemoryConfig(block_size=BLOCK, num_pages=64))


def skeleton(config: PreTrainedConfig) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("architecture", ["llama", "phi3", "mixtral", "olmo2", "qwen3_moe"])
@pytest.mark.parametrize("size", [2, 4])
def test_shares_are_the_whole(architecture: str, size: int) -> None:
    """Every number of a divided weight is on one worker, or of keys on as many as there are copies."""
    config = (ARCHITECTURES | FURTHER_ARCHITECTURES)[architecture]
    whole, part = skeleton(config), skeleton(share_config(config, size))
    shares = [ModelShare.of(whole, part, rank, size) for rank in range(size)]
    own = dict(part.named_parameters())
    for name, parameter in whole.named_parameters():
        numbers = torch.arange(parameter.numel()).view(parameter.shape)
        parts = [share.cut(name, numbers) for share in shares]
        assert {tuple(one.shape) for one in parts} == {tuple(own[name].shape)}
        held = torch.cat([one.flatten() for one in parts])
        assert torch.equal(held.unique(), numbers.flatten()), name
        if name in shares[0].cuts and not any(part in name for part in ("k_", "v_", "qkv")):
            assert held.numel() == numbers.numel(), name


def test_a_width_that_the_experts_do_not_have_divides_nothing() -> None:
    """transformers keeps every field of ``config.json``, also of another family."""
    config = MixtralConfig(num_hidden_layers=1, moe_intermediate_size=24, intermediate_size=64)
    whole, part = skeleton(config), skeleton(share_config(config, 2))
    cut = ModelShare.of(whole, part, 1, 2).cuts["model.layers.0.mlp.experts.gate_up_proj"]
    assert cut.runs == ((32, 64), (96, 128))


def test_codes_are_divided_with_their_scales_or_refused() -> None:
    codes = torch.randint(0, 256, (8, 64), dtype=torch.uint8)
    whole = make_codes("int8", codes, torch.rand(8, 4), 16)
    for axis, run in ((0, (4, 8)), (1, (32, 64))):
        part = WeightCut((8, 64), axis, (run,)).of("w", whole)
        assert torch.equal(part.dequantise(), whole.dequantise().narrow(axis, run[0], run[1] - run[0]))
    by_row = replace(whole, scales=whole.scales[:, :1].contiguous(), group=64)
    part = WeightCut((8, 64), 1, ((8, 16),)).of("w", by_row)
    assert torch.equal(part.dequantise(), by_row.dequantise()[:, 8:16])
    with pytest.raises(ConfigError, match=r"'down' in codes in groups of 16, which workers cannot divide"):
        WeightCut((8, 64), 1, ((8, 16),)).of("down", whole)


@pytest.mark.parametrize(
    ("config", "size", "reason"),
    [
        (GPT2Config(), 2, "no tensor-parallel plan for models of type 'gpt2'"),
        (LlamaConfig(num_attention_heads=6, hidden_size=96), 4, "num_attention_heads = 6 is not a multiple of it"),
        (LlamaConfig(hidden_size=66, num_attention_heads=3), 4, "hidden_size = 66 is not a multiple of it"),
        (LlamaConfig(intermediate_size=90), 4, "intermediate_size = 90 is not a multiple of it"),
        (LlamaConfig(num_attention_heads=12, num_key_value_heads=3, hidden_size=96), 2, "num_key_value_heads = 3 is"),
    ],
)
def test_what_cannot_be_divided_is_refused_by_name(config: PreTrainedConfig, size: int, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        share_config(config, size)


@pytest.mark.skipif(not hasattr(transformers, "Gemma4UnifiedTextConfig"), reason="this transformers is older")
def test_layers_that_differ_in_their_heads_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="layers of models of type 'gemma4_unified_text' differ in their heads"):
        share_config(transformers.Gemma4UnifiedTextConfig(num_hidden_layers=2), 2)


@pytest.mark.parametrize("kind", ["GPTNeoX", "GPTJ", "CodeGen"])
def test_heads_whose_size_is_that_of_all_workers_are_refused(kind: str) -> None:
    """Their code divides the hidden size by the number of heads: half the heads would be twice as wide."""
    config = getattr(transformers, f"{kind}Config")(num_hidden_layers=1)
    whole, part = skeleton(config), skeleton(share_config(config, 2))
    with pytest.raises(ConfigError, match="which transformers plans to divide, but the configuration has no size"):
        ModelShare.of(whole, part, 0, 2)


def test_a_share_that_cannot_run_is_refused_by_the_number_of_workers(tmp_path: Path) -> None:
    """Norms of OLMoE are over all heads, and their width follows from the hidden size alone."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_experts": 2}
    config = OlmoeConfig(**sizes, vocab_size=100, num_hidden_layers=1, max_position_embeddings=64, pad_token_id=0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    reason = "tensor_parallel_size = 2, but the model cannot be divided so. A worker's share of it: Got a model of type"
    with pytest.raises(ConfigError, match=reason):
        build_workers(config_of(tmp_path), WallClock(), 2)


def test_what_workers_do_not_do_is_refused() -> None:
    model = ModelConfig(model="m", tensor_parallel_size=2)
    with pytest.raises(ConfigError, match="tensor_parallel_size = 2, ray = 'auto'"):
        engine_specs(EngineConfig(model=model), FleetConfig(ray="auto"), served_name="m", builder="b")


def test_workers_exchange_what_is_stated_and_hold_their_part(folders: dict[str, Path]) -> None:  # noqa: F811
    clock = WallClock()
    workers, groups = build_workers(config_of(folders["base"]), clock, 2)
    shared, alone = join(workers, clock), build_parts(config_of(folders["base"]), clock)
    tokens = [5, 9, 70]
    try:
        rows = []
        for parts in (shared, alone):
            version = parts.reader.read("one", str(folders["one"]))
            assert load(parts, version, Tier.DEVICE, pages_for(version)) is None
            plan = StepPlan(
                step_id=1,
                sequences=(sequence(tokens, 0, 3, 0, adapter=version.key),),
                prompt_rows=(PromptRows(0, 0, 2, 3),),
            )
            for group in groups:
                group.calls.clear()
                group.num_bytes.clear()
            rows.append(finish(parts.executor.launch(plan, 0.0)))
            if parts is shared:
                counts = [(dict(group.calls), dict(group.num_bytes)) for group in groups]
                assert version.weight_bytes == 2 * 4 * (32 + 32 + 48 + 32) * 4 // 2  # layers, rank, A and B of both
        # The embedding, o and down of two layers, the head of the sampled row; the head of the reported rows.
        base = 6 + 1, 5 * 3 * 32 * 4 + 50 * 4 + 2 * 50 * 4
        lora = 4, 4 * 3 * 4 * 4  # q and down of two layers, 3 rows of rank 4 in float32
        assert priced(folders["base"], plan) == {"base": (base[0] - 1, base[1] - 2 * 50 * 4), "lora": lora}
        assert counts == [({"base": base[0], "lora": lora[0]}, {"base": base[1], "lora": lora[1]})] * 2
        ours, theirs = rows
        assert ours.tokens[0].token_id == theirs.tokens[0].token_id
        reports = [np.frombuffer(one.prompt_logprobs[0].logprobs, np.float32) for one in rows]
        assert np.allclose(*reports, atol=1e-5)
        with pytest.raises(AdapterError, match="magnitude, which is not supported with --tensor-parallel-size"):
            shared.reader.read("dora", str(save_dora(folders["base"], folders["base"].parent)))
        assert load(shared, replace(version, source="/nowhere"), Tier.HOST) is not None
    finally:
        shared.close()
        alone.close()


def priced(base: Path, plan: StepPlan) -> dict[str, tuple[int, int]]:
    """Return the calls and bytes of a step in the cost model, without reports: they are rows of a gather there."""
    step = step_features(replace(plan, prompt_rows=(), sequences=[msgspec.structs.replace(plan.sequences[0], rank=4)]))
    targets = ("q_proj", "down_proj")
    cost = CollectiveCost(read_dims(str(base)), find_hardware("a40"), 2, targets, is_by_table=False)
    counted: dict[str, tuple[int, int]] = {}
    for call in cost.calls(step):
        calls, num_bytes = counted.get(call.purpose, (0, 0))
        counted[call.purpose] = calls + call.num_calls, num_bytes + call.num_calls * call.num_bytes
    return counted


def save_dora(base: Path, path: Path) -> Path:
    model = LlamaForCausalLM.from_pretrained(base)
    lora = LoraConfig(r=2, target_modules=["q_proj"], use_dora=True, init_lora_weights=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        get_peft_model(model, lora).save_pretrained(path / "dora")
    return path / "dora"


def test_a_worker_that_is_killed_ends_the_engine(folders: dict[str, Path]) -> None:  # noqa: F811
    parts = build_parts(config_of(folders["base"], size=2), WallClock())
    plan = StepPlan(step_id=1, sequences=(sequence([5, 9, 70], 0, 3, 0),))
    try:
        assert finish(parts.executor.launch(plan, 0.0)).tokens
        (worker,) = [one for one in psutil.Process().children() if "worker_process" in " ".join(one.cmdline())]
        os.kill(worker.pid, signal.SIGKILL)
        deadline = time.monotonic() + 60
        with pytest.raises(EngineDead, match="Worker 1 of the model: it ended"):
            while time.monotonic() < deadline:
                with suppress(RuntimeError):  # of the collective, which may see the end first
                    finish(parts.executor.launch(plan, 0.0))
    finally:
        parts.close()
    assert not worker.is_running()


def test_a_worker_may_import_for_longer_than_it_may_be_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's libraries can take minutes from a disk that is shared; a worker gives no sign before it has them."""
    here, there = Pipe()
    monkeypatch.setattr(worker_group, "start_on_pipe", lambda *terms: (SimpleNamespace(pid=1), here))
    monkeypatch.setattr(worker_group, "PATIENCE_S", 0.05)
    setup = worker_group.WorkerSetup(config=config_of(Path()), rank=1, store="", log_level=0)
    answers = SimpleQueue[Answer]()
    worker_group._WorkerProcess(setup, lambda process, answer: answers.put(answer))
    with pytest.raises(Empty):
        answers.get(timeout=0.3)
    there.send(Here())
    assert answers.get(timeout=60) == Here()
    assert answers.get(timeout=60) == Failed("it gave no sign of life for 0.05 s")
