"""A method beside plain LoRA, from its folder to logits, in batches with plain LoRA and rows of the base."""

from __future__ import annotations

import json
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from bad_adapters import adapter_config, adapter_tensors, tiny_base, write_good_adapter
from column_scaled import PEFT_TYPE, ColumnScaledLora
from live_executor import BLOCK, executor_of, load, run, sequence
from msgspec import structs
from safetensors.numpy import load_file, save_file
from transformers import Qwen2Config, Qwen2ForCausalLM
from unpacked import lora_reference

from manylora.core.adapters.folder import read_config
from manylora.core.adapters.layout import lay_out
from manylora.core.adapters.method import METHODS, parse_settings
from manylora.core.adapters.packed import PackedAdapter
from manylora.core.adapters.read import ReadRules, read_adapter
from manylora.core.adapters.report import inspect_adapter
from manylora.core.adapters.shape import BaseShape, ModuleKind
from manylora.core.adapters.sources import open_folder
from manylora.core.adapters.tensors import ModuleWeights, VectorKind
from manylora.core.adapters.weight_file import WeightFile
from manylora.core.clock import WallClock
from manylora.core.config import EngineConfig, MemoryConfig, ModelConfig, SchedulerConfig
from manylora.core.errors import AdapterError
from manylora.core.plan import IN_HOST
from manylora.core.ports import EngineParts
from manylora.core.types import Tier
from manylora.execution.build import build_parts
from manylora.execution.kernels.linear import BaseLinear
from manylora.execution.lora.batch import LoraBatch, LoraSegment, StepContext
from manylora.execution.lora.kernels import LORA_KERNELS, TABLE_KERNELS
from manylora.execution.lora.tables import LoraSpace
from manylora.execution.model.modules import AdaptedLinear
from manylora.execution.storage.adapter_files import InlineReader
from manylora.execution.storage.page_tensor import PageTensor, image_tensor
from manylora.execution.storage.resident import ResidentAdapter, make_resident
from manylora.execution.storage.tile_tables import GroupDirectory, make_template

if TYPE_CHECKING:
    from manylora.execution.assist.exchange import Assistant

LIMIT = 1 << 26
METHOD = ColumnScaledLora()
LINEAR = ("q_proj", "v_proj", "gate_proj", "down_proj", "lm_head")

pytestmark = pytest.mark.usefixtures("two_threads")


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, PEFT_TYPE, METHOD)


def write_scaled(directory: Path, base: BaseShape, *, rank: int, targets: Sequence[str], seed: int = 0) -> Path:
    write_good_adapter(directory, base, rank=rank, targets=targets, seed=seed, peft_type=PEFT_TYPE)
    rng = np.random.default_rng(seed)
    scales = {
        f"base_model.model.{module.name}.lora_column_scale": rng.uniform(0.5, 1.5, module.out_features).astype("f4")
        for module in base.modules
        if module.name.rpartition(".")[2] in targets
    }
    save_file(adapter_tensors(base, rank, targets, seed) | scales, directory / "adapter_model.safetensors")
    return directory


def read(directory: Path, base: BaseShape, dtype: str | None = None) -> PackedAdapter:
    return read_adapter(directory.name, directory, ReadRules(base=base, max_bytes=LIMIT, dtype=dtype))


def weights_of(directory: Path, base: BaseShape) -> dict[str, ModuleWeights]:
    folder = open_folder("mine", directory)
    config = read_config(folder)
    with WeightFile(folder, LIMIT) as file:
        weights = parse_settings("mine", config).match(file.tensors, base)
        return {w.module.name: w for w in file.fetch(weights)}


def test_a_folder_is_read_by_the_method_it_asks_for(tmp_path: Path) -> None:
    base = tiny_base()
    folder = write_scaled(tmp_path / "scaled", base, rank=3, targets=LINEAR)
    plain = write_good_adapter(tmp_path / "plain", base, rank=3, targets=LINEAR)
    version, like = read(folder, base).version, read(plain, base).version
    assert version.key != like.key
    columns = sum(m.out_features for m in base.modules if m.name.rpartition(".")[2] in LINEAR)
    assert version.weight_bytes == like.weight_bytes + 4 * columns
    ranks = {m.name: 3 for m in base.modules if m.name.rpartition(".")[2] in LINEAR}
    vectors = tuple((name, (VectorKind.FACTOR,)) for name in ranks)
    for scaled, packed in ((vectors, version), ((), like)):
        layout = lay_out(ranks, base, vectors=scaled)
        assert (layout.num_pages, layout.weight_bytes) == (packed.num_pages, packed.weight_bytes)
    report = inspect_adapter(folder, base, max_bytes=LIMIT)
    assert report.version == version and len(report.modules) == len(ranks)
    (folder / "adapter_config.json").write_text(json.dumps(adapter_config(peft_type="NO_SUCH_METHOD")))
    with pytest.raises(AdapterError, match="peft_type is 'NO_SUCH_METHOD', expected one of LORA"):
        read(folder, base)


def test_a_changed_scale_is_another_version_in_float32_beside_narrow_matrices(tmp_path: Path) -> None:
    base = tiny_base()
    folder = write_scaled(tmp_path / "a", base, rank=2, targets=["q_proj"])
    tensors = {
        key: value.astype(np.float16).astype(np.float32)
        for key, value in load_file(folder / "adapter_model.safetensors").items()
    }
    save_file(tensors, folder / "adapter_model.safetensors")
    half = read(folder, base, "auto")
    key = next(key for key in tensors if key.endswith("scale"))
    save_file(tensors | {key: tensors[key] + np.float32(1e-7)}, folder / "adapter_model.safetensors")
    whole = read(folder, base, "auto")
    assert (half.layout.dtype, whole.layout.dtype) == ("float16", "float16")
    assert half.version.key != whole.version.key
    assert not np.array_equal(half.image, whole.image)


DECODE, PROMPTS = (1, 2, 1, 1), (1, 20, 3, 70)
"""Rows of the base, of plain LoRA and of two scaled adapters."""


def resident(packed: PackedAdapter, base: BaseShape, pool: PageTensor, first: int) -> tuple[ResidentAdapter, int]:
    pages = range(first, first + packed.layout.num_pages)
    pool.write(pages, image_tensor(packed.image))
    template = make_template(packed.layout, GroupDirectory.of(base))
    return make_resident(packed.layout, pages, pool, template), pages.stop


@pytest.mark.parametrize("block_size", [1, 64])
@pytest.mark.parametrize(
    ("kernel", "rows"),
    [(kernel, DECODE) for kernel in sorted(LORA_KERNELS)]
    # Padded kernels have a row block for each row of a prompt, which takes the interpreter minutes.
    + [(kernel, PROMPTS) for kernel in sorted(LORA_KERNELS) if kernel != "padded"],
)
def test_rows_get_what_the_method_says(kernel: str, rows: tuple[int, ...], block_size: int, tmp_path: Path) -> None:
    """Rows of the base, of plain LoRA and of two scaled adapters, in tiles cut by small pages and in whole ones."""
    if kernel in TABLE_KERNELS:
        pytest.importorskip("triton")
    base = tiny_base(block_size=block_size, vocab=200, num_layers=1)
    folders = [
        write_good_adapter(tmp_path / "plain", base, rank=5, targets=LINEAR, seed=1),
        write_scaled(tmp_path / "scaled", base, rank=4, targets=LINEAR, seed=2),
        write_scaled(tmp_path / "few", base, rank=17, targets=["v_proj"], seed=3),
    ]
    pool = PageTensor(base.page, 900, torch.device("cpu"))
    adapters, page = [], 0
    for folder in folders:
        adapter, page = resident(read(folder, base), base, pool, page)
        adapters.append(adapter)
    starts = np.cumsum([0, *rows]).tolist()
    segments = tuple(
        LoraSegment(adapter, start, stop, start, stop)
        for adapter, start, stop in zip(adapters, starts[1:], starts[2:], strict=False)
    )
    space = LoraSpace(GroupDirectory.of(base), pool.flat, TABLE_KERNELS[kernel]) if kernel in TABLE_KERNELS else None
    step = StepContext(LORA_KERNELS[kernel], lora=LoraBatch(segments, space))
    weights = [weights_of(folder, base) for folder in folders]
    torch.manual_seed(0)
    groups: dict[str, list] = {}
    for module in base.modules[1:]:
        groups.setdefault(module.group, []).append(module)
    for group, modules in groups.items():
        width = sum(module.out_features for module in modules)
        x, weight, bias = torch.randn(starts[-1], modules[0].in_features), None, torch.randn(width)
        weight = torch.randn(width, modules[0].in_features)
        found = AdaptedLinear(BaseLinear(weight, bias), group, step)(x)
        expected = x.double().numpy() @ weight.double().numpy().T
        for segment, modules_of in zip(segments, weights, strict=True):
            part = slice(segment.start, segment.stop)
            for module in modules:
                if module.name in modules_of:
                    columns = slice(module.offset, module.offset + module.out_features)
                    one = modules_of[module.name]
                    expected[part, columns] = lora_reference(x[part].double().numpy(), expected[part, columns], one)
        np.testing.assert_allclose(found, expected + bias.double().numpy(), atol=2e-4, rtol=1e-4, err_msg=group)


def test_plain_batches_take_no_epilogue(tmp_path: Path) -> None:
    base = tiny_base()
    pool = PageTensor(base.page, 300, torch.device("cpu"))
    plain, page = resident(read(write_good_adapter(tmp_path / "plain", base), base), base, pool, 0)
    scaled, _ = resident(
        read(write_scaled(tmp_path / "scaled", base, rank=2, targets=["q_proj"]), base), base, pool, page
    )
    asked: list[bool] = []

    class SpiedLinear(BaseLinear):
        def product(self, x: torch.Tensor, *, has_bias: bool = True) -> torch.Tensor:
            asked.append(has_bias)
            return super().product(x, has_bias=has_bias)

    context = StepContext(LORA_KERNELS["grouped"])
    base_linear = SpiedLinear(torch.randn(64, 32), torch.randn(64))
    linear = AdaptedLinear(base_linear, "model.layers.0.self_attn.qkv", context)
    for adapter, kept in ((None, True), (plain, True), (scaled, False)):
        context.lora = LoraBatch((LoraSegment(adapter, 0, 1, 0, 1),)) if adapter is not None else None
        linear(torch.randn(2, 32))
        assert asked.pop() == kept


@dataclass
class Engines:
    base: Path
    model: Qwen2ForCausalLM


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Engines:
    """A model whose q, k and v have biases."""
    path = tmp_path_factory.mktemp("qwen")
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=100,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            tie_word_embeddings=False,
        )
    ).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.5)
    model.save_pretrained(path / "base")
    return Engines(path / "base", model)


def write_with_norms(directory: Path, base: BaseShape, **options) -> Path:
    """An adapter of plain LoRA that was trained with all norms."""
    write_good_adapter(directory, base, modules_to_save=["norm"], **options)
    rng = np.random.default_rng(0)
    norms = {
        f"base_model.model.{module.name}.weight": rng.uniform(0.5, 1.5, module.in_features).astype("f4")
        for module in base.modules
        if module.name.endswith("norm")
    }
    save_file(adapter_tensors(base, **options) | norms, directory / "adapter_model.safetensors")
    return directory


def merged(model: Qwen2ForCausalLM, weights: dict[str, ModuleWeights]) -> Qwen2ForCausalLM:
    """Return the model with an adapter in its own weights: the oracle."""
    copy = deepcopy(model)
    for name, one in weights.items():
        weight = copy.get_submodule(name).weight.data
        if one.module.kind is ModuleKind.NUMBERS:
            weight.copy_(torch.from_numpy(one.vectors[VectorKind.GAIN].as_float32().copy()))
            continue
        delta = one.scale * torch.from_numpy(one.b.as_float32() @ one.a.as_float32())
        is_embedding = name.endswith("embed_tokens")
        weight += delta.t() if is_embedding else delta
        if one.vectors:
            factors = torch.from_numpy(one.vectors[VectorKind.FACTOR].as_float32().copy())
            weight *= factors if is_embedding else factors[:, None]
    return copy


ENGINES = {
    "compiled": {"lora_kernel": "grouped", "attention_kernel": "torch"},
    "reference": {"lora_kernel": "reference", "attention_kernel": "torch"},
    "triton": {"lora_kernel": "ragged", "attention_kernel": "triton"},
    "graphs": {"lora_kernel": "ragged", "attention_kernel": "triton", "decode_graphs": "on"},
    "assisted": {"lora_kernel": "grouped", "attention_kernel": "torch"},
    "padded graphs": {"lora_kernel": "padded", "attention_kernel": "triton", "decode_graphs": "on"},
}


def build(engines: Engines, kernels: str) -> EngineParts:
    config = EngineConfig(
        model=ModelConfig(model=str(engines.base), device="cpu", **ENGINES[kernels]),  # type: ignore[arg-type]
        memory=MemoryConfig(block_size=BLOCK, num_pages=128),
        scheduler=SchedulerConfig(max_num_seqs=4),
    )
    opens = {"open_assistant": open_assistant} if kernels == "assisted" else {}
    return build_parts(config, WallClock(), readers=[InlineReader()], **opens)


def open_assistant(device: torch.device, base: BaseShape) -> Assistant:
    """Return workers on the path of a GPU, whose stream is a thread."""
    from thread_stream import ThreadStream

    from manylora.execution.assist.exchange import Assistant

    return Assistant(ThreadStream(), base, num_workers=2)


@pytest.mark.parametrize("kernels", ENGINES)
def test_logits_are_those_of_merged_models(kernels: str, engines: Engines, tmp_path: Path) -> None:
    if kernels == "assisted":
        pytest.importorskip("numba")
    elif kernels not in ("compiled", "reference"):
        pytest.importorskip("triton")
    parts = build(engines, kernels)
    folders = [
        write_good_adapter(tmp_path / "plain", parts.base, rank=4, targets=["q_proj", "down_proj"], seed=1),
        write_scaled(tmp_path / "scaled", parts.base, rank=3, targets=LINEAR, seed=2),
        # What a table does not say, the embedding's share, is run without graphs.
        write_scaled(tmp_path / "embedding", parts.base, rank=2, targets=("embed_tokens", "k_proj"), seed=3),
        write_with_norms(tmp_path / "norms", parts.base, rank=2, targets=["o_proj"], seed=4),
    ]
    keys, models, first = [None], [engines.model], 40
    try:
        for folder in folders:
            packed = read(folder, parts.base)
            executor_of(parts)._host.put(packed)
            pages = tuple(range(first, first + packed.version.num_pages))
            assert load(parts, packed.version, Tier.DEVICE, pages) is None
            first += len(pages)
            keys.append(packed.version.key)
            models.append(merged(engines.model, weights_of(folder, parts.base)))
        tokens = [[(7 * i + 5 * s) % 100 for i in range(6 + s)] for s in range(5)]
        decoding = [[0, 1], [0, 1, 2], [0, 1, 2], [3, 2, 0, 1], [4, 0], [2, 4, 1, 0], [0, 1]]
        batches = [([0, 1, 2, 3], None), ([4], None), *((batch, 1) for batch in decoding)]
        for batch, length in batches:
            if length is not None:
                for s in batch:
                    tokens[s].append(11 * len(tokens[s]) % 100)
            counts = [length or len(tokens[s]) for s in batch]
            sequences = [
                sequence(tokens[s], len(tokens[s]) - n, n, 8 * s, keys[s], seq_id=s)
                for s, n in zip(batch, counts, strict=True)
            ]
            if kernels == "assisted":
                sequences = [structs.replace(one, placement=IN_HOST) if one.adapter else one for one in sequences]
            rows = run(parts, *sequences)
            for row, s in zip(rows, batch, strict=True):
                with torch.no_grad():
                    expected = models[s](torch.tensor([tokens[s]])).logits[0, -1]
                torch.testing.assert_close(row, expected, atol=2e-5, rtol=1e-4)
        graphs = executor_of(parts).runner._graphs
        if graphs is not None:
            adapted = {key for key in graphs._graphs if key[1]}
            assert len({key[1] for key in adapted}) >= 2, "a step with an epilogue has a graph of its own"
    finally:
        parts.close()
