"""The torch executor on a tiny model, its adapters, and steps by hand."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from manylora.core.clock import WallClock
from manylora.core.config import EngineConfig, MemoryConfig, ModelConfig
from manylora.core.plan import AdapterLoad, PlannedSequence, StepPlan, StepResult
from manylora.core.ports import EngineParts, Work
from manylora.core.types import AdapterKey, AdapterVersion, SamplingParams, Tier
from manylora.execution.build import build_parts
from manylora.execution.executor import TorchExecutor
from manylora.execution.storage.adapter_files import InlineReader

BLOCK = 4

KERNELS = {
    "torch": {"lora_kernel": "grouped", "attention_kernel": "torch", "decode_graphs": "off"},
    "triton": {"lora_kernel": "ragged", "attention_kernel": "triton", "decode_graphs": "off"},
    "graphs": {"lora_kernel": "ragged", "attention_kernel": "triton", "decode_graphs": "on"},
}
"""Options of a model by the kernels that its steps run on."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    from peft import LoraConfig, get_peft_model  # not on every machine with a GPU

    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=100,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        LlamaForCausalLM(config).save_pretrained(path / "base")
        for seed, name in enumerate(("one", "two")):
            torch.manual_seed(seed)
            model = LlamaForCausalLM.from_pretrained(path / "base")
            lora = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
            get_peft_model(model, lora).save_pretrained(path / name)
    return {name: path / name for name in ("base", "one", "two")}


def save_head_adapter(base: Path, path: Path) -> Path:
    """Save an adapter of the output head, whose weights come last."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(2)
    lora = LoraConfig(r=4, target_modules=["q_proj", "lm_head"], init_lora_weights=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_peft_model(LlamaForCausalLM.from_pretrained(base), lora)
        model.save_pretrained(path / "head", save_embedding_layers=False)
    return path / "head"


@pytest.fixture
def clock() -> WallClock:
    return WallClock()


READER_PROCESS = pytest.mark.parametrize("parts", [()], indirect=True, ids=["reader process"])
"""For tests of what an engine does as its reader dies, or ends."""


@pytest.fixture
def parts(folders: dict[str, Path], clock: WallClock, request: pytest.FixtureRequest) -> Iterator[EngineParts]:
    """An engine that reads adapters in this process, unless a test names other readers: theirs take longer to start."""
    config = EngineConfig(
        model=ModelConfig(model=str(folders["base"]), device="cpu"),
        memory=MemoryConfig(block_size=BLOCK, num_pages=64),
    )
    parts = build_parts(config, clock, readers=getattr(request, "param", [InlineReader()]))
    yield parts
    parts.close()


def executor_of(parts: EngineParts) -> TorchExecutor:
    assert isinstance(parts.executor, TorchExecutor)
    return parts.executor


def finish(work: Work) -> object:
    deadline = time.monotonic() + 60
    while (result := work.poll(0.0)) is None:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return result


def sequence(
    tokens: list[int], start: int, num_tokens: int, first_page: int, adapter: AdapterKey | None = None, seq_id: int = 0
) -> PlannedSequence:
    return PlannedSequence(
        seq_id=seq_id,
        tokens=tokens,
        num_prompt_tokens=len(tokens),
        start=start,
        num_tokens=num_tokens,
        pages=tuple(range(first_page, first_page + 8)),
        adapter=adapter,
        rank=4 if adapter else 0,
        sampling=SamplingParams(temperature=0.0),
        is_sampled=True,
        seed=0,
    )


def run(parts: EngineParts, *sequences: PlannedSequence) -> torch.Tensor:
    """Run a step; return its logits in the plan's order."""
    executor = executor_of(parts)
    rows: list[torch.Tensor] = []
    executor.runner.logits_hook = lambda plan, logits: rows.append(logits)
    result = finish(executor.launch(StepPlan(step_id=1, sequences=sequences), 0.0))
    executor.runner.logits_hook = None
    assert isinstance(result, StepResult) and set(result.tokens) == {s.seq_id for s in sequences}
    return rows[0]


def load(parts: EngineParts, version: AdapterVersion, tier: Tier, pages: tuple[int, ...] = ()) -> str | None:
    result = finish(parts.executor.load_adapter(AdapterLoad(version=version, tier=tier, pages=pages), 0.0))
    return result.error  # type: ignore[attr-defined,no-any-return]


def load_all(parts: EngineParts, folders: Mapping[str, Path]) -> dict[str, AdapterVersion]:
    """Load adapters to the pages from 40 on; return their versions by name."""
    versions: dict[str, AdapterVersion] = {}
    first = 40
    for name, folder in folders.items():
        version = versions[name] = parts.reader.read(name, str(folder))
        assert load(parts, version, Tier.DEVICE, pages_for(version, first)) is None
        first += version.num_pages
    assert first <= parts.num_pages
    return versions


def pages_for(version: AdapterVersion, first: int = 40) -> tuple[int, ...]:
    return tuple(range(first, first + version.num_pages))[::-1]
