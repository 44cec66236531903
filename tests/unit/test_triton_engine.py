"""The whole step on the Triton kernels, interpreted, gives the logits of the step on torch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_execution_executor import BLOCK, folders, load, run, sequence

from manylora.clock import WallClock
from manylora.config import EngineConfig, MemoryConfig, ModelConfig, SchedulerConfig
from manylora.engine.ports import EngineParts
from manylora.errors import ConfigError
from manylora.execution.build import build_parts
from manylora.execution.lora import choose_kernel
from manylora.execution.step_attention import choose_attention
from manylora.types import AdapterVersion, Tier

pytest.importorskip("triton")

__all__ = ["folders"]


def build(folders: dict[str, Path], lora_kernel: str, attention_kernel: str) -> EngineParts:
    config = EngineConfig(
        model=ModelConfig(
            model=str(folders["base"]), device="cpu", lora_kernel=lora_kernel, attention_kernel=attention_kernel
        ),
        memory=MemoryConfig(block_size=BLOCK, num_pages=64),
        scheduler=SchedulerConfig(max_num_seqs=4),
    )
    return build_parts(config, WallClock())


def serve(parts: EngineParts, folders: dict[str, Path]) -> list[torch.Tensor]:
    """Run a mixed prompt step, then decode; two adapters and the base."""
    versions: list[AdapterVersion] = []
    first = 40
    for name in ("one", "two"):
        version = parts.reader.read(name, str(folders[name]))
        assert load(parts, version, Tier.DEVICE, tuple(range(first, first + version.num_pages))[::-1]) is None
        first += version.num_pages
        versions.append(version)
    keys = [versions[0].key, None, versions[1].key, versions[0].key]
    tokens = [[(7 * i + 5 * s) % 100 for i in range(6 + s)] for s in range(4)]
    logits = [run(parts, *(sequence(tokens[s], 0, len(tokens[s]), 8 * s, keys[s], seq_id=s) for s in range(4)))]
    for _ in range(3):
        for s in range(4):
            tokens[s].append(int(logits[-1][s].argmax()))
        logits.append(
            run(parts, *(sequence(tokens[s], len(tokens[s]) - 1, 1, 8 * s, keys[s], seq_id=s) for s in range(4)))
        )
    return logits


def test_logits_equal_those_of_torch(folders: dict[str, Path]) -> None:
    found = []
    for kernels in (("grouped", "torch"), ("ragged", "triton")):
        parts = build(folders, *kernels)
        try:
            found.append(serve(parts, folders))
        finally:
            parts.close()
    for expected, logits in zip(*found, strict=True):
        torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)


def test_kernels_by_device(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert (choose_kernel("auto", cpu), choose_attention("auto", cpu)) == ("grouped", "torch")
    assert (choose_kernel("auto", gpu), choose_attention("auto", gpu)) == ("ragged", "triton")
    assert (choose_kernel("naive", gpu), choose_attention("torch", gpu)) == ("naive", "torch")
    monkeypatch.setattr("manylora.execution.triton_door.is_interpreted", lambda: False)
    with pytest.raises(ConfigError, match="lora_kernel = 'ragged', which cannot run here: Triton needs a GPU"):
        choose_kernel("ragged", cpu)
    with pytest.raises(ConfigError, match="attention_kernel = 'triton', which cannot run here"):
        choose_attention("triton", cpu)
