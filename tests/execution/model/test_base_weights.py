"""The base's weights as one frozen buffer: what is in it, who may write to it, and another process that maps it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig, PreTrainedConfig, Qwen2Config

from manylora.core.clock import WallClock
from manylora.core.config import EngineConfig, MemoryConfig, ModelConfig
from manylora.core.errors import ConfigError
from manylora.core.plan import PlannedSequence, StepPlan
from manylora.core.types import SamplingParams
from manylora.execution.attention.call import ATTENTION_NAME
from manylora.execution.build import build_parts
from manylora.execution.executor import TorchExecutor
from manylora.execution.kernels.linear import (
    can_share_packed,
    linear,
    pack,
    packed_bytes,
    packed_layout,
    packed_over,
    reorder,
)
from manylora.execution.model.base_weights import BaseWeights, WeightsManifest
from manylora.execution.model.freeze import freeze, gather, load_weights
from manylora.execution.model.load import LoadedModel, load_model
from manylora.execution.model.precision import Precision
from manylora.execution.model.sealed_memory import MemoryWriter, SealedMemory
from manylora.execution.storage.adapter_files import InlineReader

SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
NUMBERS = Precision(torch.float32, "float32", is_rounded=False)
FAMILIES: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SMALL),
    "tied": Gemma2Config(**SMALL, head_dim=8),
    "biases": Qwen2Config(**SMALL),
}


def save(config: PreTrainedConfig, path: Path) -> ModelConfig:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data.normal_()
    model.save_pretrained(path)
    return ModelConfig(model=str(path), device="cpu")


def logits(model: ModelConfig, weights: BaseWeights | None = None) -> torch.Tensor:
    """Build an engine and return the logits behind a prompt."""
    config = EngineConfig(model=model, memory=MemoryConfig(block_size=4, num_pages=8))
    parts = build_parts(config, WallClock(), weights=weights, readers=[InlineReader()])
    assert isinstance(parts.executor, TorchExecutor)
    rows: list[torch.Tensor] = []
    parts.executor.runner.logits_hook = lambda plan, found: rows.append(found.clone())
    sequence = PlannedSequence(
        seq_id=1,
        tokens=[3, 1, 4, 1, 5, 9],
        num_prompt_tokens=6,
        start=0,
        num_tokens=6,
        pages=(0, 1),
        adapter=None,
        rank=0,
        sampling=SamplingParams(temperature=0.0),
        is_sampled=True,
        seed=0,
    )
    step = parts.executor.launch(StepPlan(step_id=0, sequences=(sequence,), released=()), 0.0)
    while step.poll(0.0) is None:
        time.sleep(0.001)
    parts.close()
    return rows[0]


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> ModelConfig:
    return save(FAMILIES[request.param], tmp_path)


def test_attached_weights_give_the_same_logits(model: ModelConfig) -> None:
    _, weights = load_weights(model, load_model)
    manifest = weights.manifest
    assert weights.memory is not None
    attached = BaseWeights.attach(
        msgspec.json.decode(msgspec.json.encode(manifest), type=WeightsManifest), weights.memory.map(is_strict=True)
    )
    assert torch.equal(logits(model, attached), logits(model))


def test_weights_that_were_gathered_on_a_device_are_fused_without_a_copy(model: ModelConfig) -> None:
    loaded = load_model(model)
    buffer, memory = gather(loaded, torch.device("cpu"))
    weights = freeze(loaded, NUMBERS, buffer, memory)
    assert memory is None
    names = [name for entry in weights.manifest.entries for name in entry.names]
    assert {"model.layers.0.self_attn.qkv.weight", "model.layers.1.mlp.gate_up.weight"} <= set(names)
    lowest, highest = buffer.data_ptr(), buffer.data_ptr() + buffer.numel()
    assert all(lowest <= tensor.data_ptr() < highest for tensor in weights.tensors.values())
    torch.testing.assert_close(logits(model, weights), logits(model))


def test_weights_are_gathered_one_at_a_time(model: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load_model(model)
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    read = type(loaded).read

    def copied(self: LoadedModel, name: str) -> torch.Tensor:
        assert len(alive) <= 1, f"{name} is read beside others"
        weight = read(self, name)
        assert isinstance(weight, torch.Tensor)
        alive.add(copy := weight.clone())
        return copy

    monkeypatch.setattr(type(loaded), "read", copied)
    gather(loaded, torch.device("cpu"))


def test_a_tied_weight_may_be_stored_by_either_name(tmp_path: Path) -> None:
    config = save(FAMILIES["tied"], tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    expected = logits(config)
    save_file(tensors, file, metadata={"format": "pt"})
    loaded = load_model(config)
    weights = freeze(loaded, NUMBERS, *gather(loaded, torch.device("cpu")))
    torch.testing.assert_close(logits(config, weights), expected)


def test_every_tensor_is_in_the_table_once_and_tied_ones_stay_tied(model: ModelConfig) -> None:
    loaded, weights = load_weights(model, load_model)
    entries = {name: entry for entry in weights.manifest.entries for name in entry.names}
    assert len(entries) == sum(len(entry.names) for entry in weights.manifest.entries)
    assert any(name.endswith("inv_freq") for name in entries)
    is_tied = loaded.text_config.tie_word_embeddings
    assert (entries["lm_head.weight"] is entries["model.embed_tokens.weight"]) == is_tied
    weights.install(loaded.model)
    assert (loaded.model.lm_head.weight is loaded.model.model.embed_tokens.weight) == is_tied
    ends = [entry.offset + entry.num_bytes for entry in weights.manifest.entries]
    assert all(entry.offset >= end for entry, end in zip(weights.manifest.entries[1:], ends, strict=False))
    assert ends[-1] <= weights.manifest.num_bytes


@pytest.mark.parametrize("is_gathered", [False, True])
def test_a_bias_that_siblings_lack_is_zeros(is_gathered: bool, tmp_path: Path) -> None:
    loaded = load_model(save(FAMILIES["biases"], tmp_path))
    model = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=ATTENTION_NAME)
    loaded = replace(loaded, model=model.requires_grad_(False).eval(), checkpoint=None)
    attention = loaded.model.get_submodule("model.layers.0.self_attn")
    expected = torch.cat([attention.q_proj.bias, torch.zeros(16), attention.v_proj.bias])
    attention.k_proj.bias = None
    gathered = gather(loaded, loaded.device) if is_gathered else ()
    weights = freeze(loaded, NUMBERS, *gathered)
    assert torch.equal(weights.tensors["model.layers.0.self_attn.qkv.bias"], expected)


def test_nothing_writes_to_sealed_memory() -> None:
    writer = MemoryWriter()
    offsets = [writer.append(torch.arange(n, dtype=torch.uint8).numpy()) for n in (3, 70, 0, 1)]
    memory = writer.seal()
    assert offsets == [0, 64, 192, 192]
    with pytest.raises(PermissionError):
        os.pwrite(memory.fd, b"x", 0)
    with pytest.raises(PermissionError):
        os.ftruncate(memory.fd, 0)
    # A stray write changes a copy that no other mapping sees.
    memory.map()[64] = 7
    assert memory.map()[64:67].tolist() == memory.map(is_strict=True)[64:67].tolist() == [0, 1, 2]


def test_memory_is_given_back() -> None:
    memory = MemoryWriter().seal()
    fd, mapped = memory.fd, memory.map()
    del memory
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(fd)
    assert mapped[:2].tolist() == [0, 0]


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    model = save(FAMILIES["llama"], tmp_path / "model")
    other = save(FAMILIES["llama"], tmp_path / "other")
    _, weights = load_weights(model, load_model)
    with pytest.raises(ConfigError, match=r"weights of '.*/model', expected those of '.*/other'"):
        logits(other, weights)
    manifest, buffer = weights.manifest, weights.buffer
    kept = tuple(entry for entry in manifest.entries if entry.names != ("model.norm.weight",))
    with pytest.raises(ConfigError, match=re.escape("without model.norm.weight")):
        logits(model, BaseWeights.attach(msgspec.structs.replace(manifest, entries=kept), buffer))
    with pytest.raises(ConfigError, match="expected"):
        BaseWeights.attach(manifest, buffer[:-1])


@pytest.mark.skipif(not can_share_packed(), reason="this build of torch has no oneDNN")
@pytest.mark.parametrize("shape", [(64, 64), (100, 70), (1000, 333), (513, 1025)], ids=str)
@pytest.mark.parametrize("num_rows", [1, 3, 40])
def test_a_packed_weight_over_other_memory_gives_the_same_product(shape: tuple[int, int], num_rows: int) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(num_rows, shape[1]), torch.randn(shape)
    packed = reorder(weight)
    memory = packed_bytes(packed).copy()
    memory.flags.writeable = False
    other = packed_over(memory.ctypes.data, weight.shape, packed_layout(packed))
    assert torch.equal(linear(x, other), linear(x, packed))
    torch.testing.assert_close(linear(x, other), functional.linear(x, weight), atol=1e-3, rtol=1e-5)


def in_another_process(folder: str, fd: int, manifest: str) -> None:
    """Run a prompt over weights of another process that cannot be written to, and print what came of it."""
    torch.set_num_threads(1)
    model = ModelConfig(model=folder, device="cpu")
    table = msgspec.json.decode(Path(manifest).read_bytes(), type=WeightsManifest)
    memory = SealedMemory(fd, table.num_bytes)
    logits(save(FAMILIES["llama"], Path(folder) / "other"))  # what is imported and allocated once
    before = private_bytes("smaps_rollup")
    found = logits(model, BaseWeights.attach(table, memory.map(is_strict=True)))
    own = private_bytes("smaps_rollup") - before
    print(json.dumps({"logits": found.tolist(), "private": own, "mapped": private_bytes("smaps", "manylora-weights")}))


def private_bytes(file: str, mapping: str = "") -> int:
    """Return what this process alone holds and has written, in all mappings or in those of a name."""
    total, is_asked = 0, not mapping
    for line in Path(f"/proc/self/{file}").read_text().splitlines():
        if mapping and re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            is_asked = mapping in line
        elif is_asked and line.startswith("Private_Dirty:"):
            total += int(line.split()[1]) * 1024
    return total


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_another_process_maps_the_weights_and_holds_no_second_copy(tmp_path: Path) -> None:
    sizes = {"vocab_size": 8000, "hidden_size": 512, "intermediate_size": 1024}
    model = save(LlamaConfig(**SMALL | sizes, tie_word_embeddings=False), tmp_path)
    _, weights = load_weights(model, load_model)
    manifest = weights.manifest
    assert weights.memory is not None and manifest.num_bytes > 40e6
    assert any(entry.packing for entry in manifest.entries) == pack(torch.zeros(512, 512)).is_mkldnn
    (tmp_path / "manifest").write_bytes(msgspec.json.encode(manifest))
    arguments: list[Any] = [str(tmp_path), weights.memory.fd, str(tmp_path / "manifest")]
    code = f"import test_base_weights; test_base_weights.in_another_process(*{arguments!r})"
    done = subprocess.run(
        [sys.executable, "-c", code],
        pass_fds=[weights.memory.fd],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    assert torch.equal(torch.tensor(answer["logits"]), logits(model, weights))
    assert answer["mapped"] == 0
    assert answer["private"] < manifest.num_bytes / 4
