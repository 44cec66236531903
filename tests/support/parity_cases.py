"""The oracle: what we compute against transformers + PEFT, row by row.

For one architecture: a tiny random model, twelve adapters that differ in everything PEFT lets them differ in,
sixteen requests in one engine whose budget cuts prompts into chunks, whose prefix cache is on and whose pool
is too small for all of them. The reference runs every finished sequence alone through ``PeftModel`` and
compares each sampled row's logits, and that its own greedy token is the one we chose (so by induction its
greedy answer is ours).

Runs of one process share what does not depend on the engine: a model, its adapters, and the reference's logits of a
sequence that it has seen.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import json
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora.variants import calculate_alora_offsets
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BambaConfig,
    DeepseekV2Config,
    DeepseekV3Config,
    Ernie4_5_MoeConfig,
    FalconConfig,
    FalconH1Config,
    Gemma2Config,
    Gemma3Config,
    Gemma3TextConfig,
    Glm4MoeConfig,
    GPT2Config,
    GPTJConfig,
    GPTJForCausalLM,
    GptOssConfig,
    GraniteConfig,
    Lfm2Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    NemotronConfig,
    Olmo2Config,
    OlmoeConfig,
    OPTConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    SiglipVisionConfig,
    StableLmConfig,
)

from manylora.core.clock import WallClock
from manylora.core.config import AdapterConfig, EngineConfig, MemoryConfig, ModelConfig, SchedulerConfig
from manylora.core.engine.core import EngineCore
from manylora.core.engine.loop import EngineLoop
from manylora.core.engine.status import EngineStats
from manylora.core.plan import ARRIVING, ON_DEVICE, StepPlan
from manylora.core.ports import EngineParts
from manylora.core.types import Output, Request, SamplingParams, Tier
from manylora.execution.build import OpenAssistant, build_parts, open_assistant_workers
from manylora.execution.executor import TorchExecutor
from manylora.execution.peers import SharedExecutor
from manylora.execution.storage.adapter_files import InlineReader

PeftModel.create_or_update_model_card = lambda *_: None  # a page for people, which takes longer than the weights

VOCAB = 320
NUM_TOKENS = 40
_STORED = (torch.float32, torch.bfloat16, torch.float16)
BASE_NAME = "base"

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

_LATENT = {
    **_COMMON,
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "moe_intermediate_size": 48,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}

_GEMMA = _COMMON | {"head_dim": 16, "sliding_window": 20, "query_pre_attn_scalar": 16}

_VISION = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_MIXTURE = _COMMON | {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2}

_GPT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "n_embd": 64,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

ARCHITECTURES: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**_COMMON),
    "qwen2": Qwen2Config(**_COMMON),
    "qwen3": Qwen3Config(**_COMMON, head_dim=24),
    "mistral": MistralConfig(**_COMMON, sliding_window=24, head_dim=16),
    "gemma3": Gemma3TextConfig(**_GEMMA, layer_types=["sliding_attention"] * 2 + ["full_attention"]),
    "phi3": Phi3Config(**_COMMON),
    "mixtral": MixtralConfig(**_COMMON, num_local_experts=4, num_experts_per_tok=2),
}
"""The seven architectures that the project promises."""

FURTHER_ARCHITECTURES: dict[str, PreTrainedConfig] = {
    "gemma2": Gemma2Config(**_GEMMA, attn_logit_softcapping=5.0, final_logit_softcapping=8.0),
    "granite": GraniteConfig(**_COMMON, logits_scaling=2.0, embedding_multiplier=3.0, residual_multiplier=0.5),
    "olmo2": Olmo2Config(**_COMMON),
    "qwen3_moe": Qwen3MoeConfig(**_COMMON, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48),
}
"""Architectures that work because nothing in the executor knows one."""

OTHER_ARCHITECTURES: dict[str, PreTrainedConfig] = {
    "gpt2": GPT2Config(**_GPT),
    # A token meets all experts where KV is rounded too: rounding may send it to another.
    "gpt_oss": GptOssConfig(**_COMMON, head_dim=16, sliding_window=20, num_local_experts=3, num_experts_per_tok=3),
    "deepseek_v2": DeepseekV2Config(**_LATENT, num_experts_per_tok=2, q_lora_rank=None),
    "deepseek_v3": DeepseekV3Config(**_LATENT, num_experts_per_tok=4, q_lora_rank=24),
    "nemotron": NemotronConfig(**_COMMON),
    "opt": OPTConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        ffn_dim=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=256,
        word_embed_proj_dim=48,
        tie_word_embeddings=False,
    ),
    "stablelm": StableLmConfig(**_COMMON, use_qkv_bias=True),
    "falcon": FalconConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_kv_heads=2,
        new_decoder_architecture=True,
        tie_word_embeddings=False,
    ),
    "gemma3_vision": Gemma3Config(
        text_config=Gemma3TextConfig(**_GEMMA),
        vision_config=SiglipVisionConfig(**_VISION),
        mm_tokens_per_image=4,
    ),
}
"""Architectures whose attention, or whose way to it, is another: sinks, values of another size than keys, layers that
hand down no keywords or attend by themselves, a decoder inside the model, vision beside it."""

_MAMBA = _COMMON | {"mamba_n_groups": 2, "mamba_d_state": 12, "mamba_chunk_size": 8}

HYBRIDS: dict[str, PreTrainedConfig] = {
    "lfm2": Lfm2Config(**_COMMON, layer_types=["conv", "conv", "full_attention"], block_auto_adjust_ff_dim=False),
    "falcon_h1": FalconH1Config(
        **_MAMBA,
        head_dim=16,
        mamba_d_ssm=48,
        mamba_n_heads=6,
        mamba_d_head=8,
        mamba_d_conv=4,
        mamba_rms_norm=False,
        ssm_multipliers=[0.5, 0.7, 0.9, 0.8, 0.6],
        ssm_in_multiplier=0.8,
    ),
    "bamba": BambaConfig(**_MAMBA, attn_layer_indices=[2], mamba_n_heads=8, mamba_d_head=16),
    "qwen3_next": Qwen3NextConfig(
        **_COMMON,
        head_dim=16,
        layer_types=["linear_attention", "linear_attention", "full_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=12,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
        shared_expert_intermediate_size=32,
        partial_rotary_factor=0.5,
    ),
}
"""Bases with layers that keep a state of each sequence: short convolutions, Mamba 2, gated delta nets."""

MIXTURES: dict[str, PreTrainedConfig] = {
    "mixtral": MixtralConfig(**_MIXTURE, num_local_experts=5, num_experts_per_tok=2),
    "qwen3_moe": Qwen3MoeConfig(
        **_MIXTURE, head_dim=8, num_experts=6, num_experts_per_tok=3, moe_intermediate_size=24, norm_topk_prob=True
    ),
    "olmoe": OlmoeConfig(**_MIXTURE, num_experts=5, num_experts_per_tok=2),
    "glm4_moe": Glm4MoeConfig(
        **_MIXTURE,
        head_dim=8,
        n_routed_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        n_shared_experts=1,
    ),
    "ernie4_5_moe": Ernie4_5_MoeConfig(
        **_MIXTURE, moe_num_experts=5, moe_k=2, moe_intermediate_size=24, moe_num_shared_experts=1
    ),
}
"""Mixtures of experts with LoRA on the experts and routers: two layers, small."""

if GPTJForCausalLM._supports_attention_backend:  # transformers 5.24; its k and v stand before its q
    FURTHER_ARCHITECTURES["gptj"] = GPTJConfig(**_GPT, rotary_dim=8, tie_word_embeddings=False)


@dataclass(frozen=True, slots=True)
class Case:
    """One request of the oracle."""

    request_id: str
    adapter: str | None
    prompt: tuple[int, ...]


@dataclass(slots=True)
class OracleResult:
    """How far we were from the reference, and whether the engine met what it should have met."""

    architecture: str
    max_error: float = 0.0
    logit_std: float = 0.0
    num_rows: int = 0
    num_wrong_tokens: int = 0
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    num_chunked_prompts: int = 0
    num_mixed_steps: int = 0
    num_narrow: int = 0
    num_in_host: int = 0
    num_cancelled_cold: int = 0
    num_arriving: int = 0
    stats: EngineStats | None = None
    smallest_effect: float = float("inf")


def make_model(config: PreTrainedConfig, path: Path, seed: int = 0) -> None:
    """Save a random model whose logits spread by about one, so that an error of 1e-4 would show."""
    torch.manual_seed(seed)
    with _quiet():
        model = AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if "norm" in name or "ln_" in name:
            parameter.data.add_(0.2 * torch.randn_like(parameter))
        elif "bias" in name:
            parameter.data.normal_(std=0.3)
        elif "embed" in name or "lm_head" in name:
            parameter.data.normal_(std=0.15)
        else:
            parameter.data.normal_(std=1.0 / parameter.shape[-1] ** 0.5)
    with _quiet():
        model.save_pretrained(path)


_MODULES = {
    "llama": (["q_proj", "k_proj", "v_proj", "o_proj"], ["gate_proj", "up_proj", "down_proj"]),
    "phi3": (["qkv_proj", "o_proj"], ["gate_up_proj", "down_proj"]),
    "mixtral": (["q_proj", "k_proj", "v_proj", "o_proj"], ["o_proj"]),
    "qwen3_moe": (["q_proj", "k_proj", "v_proj", "o_proj"], ["o_proj"]),
    "gptj": (["q_proj", "k_proj", "v_proj", "out_proj"], ["fc_in", "fc_out"]),
    "gpt_oss": (["q_proj", "k_proj", "v_proj", "o_proj"], ["o_proj"]),
    "deepseek_v2": (["q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"], ["o_proj"]),
    "deepseek_v3": (
        ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"],
        ["o_proj"],
    ),
    "nemotron": (["q_proj", "k_proj", "v_proj", "o_proj"], ["up_proj", "down_proj"]),
    "opt": (["q_proj", "k_proj", "v_proj", "out_proj"], ["fc1", "fc2"]),
    "falcon": (["query_key_value", "dense"], ["dense_h_to_4h", "dense_4h_to_h"]),
    "gpt2": (["c_attn", "attn.c_proj"], ["c_fc", "mlp.c_proj"]),
    "lfm2": (["q_proj", "k_proj", "v_proj", "in_proj", "out_proj"], ["w1", "w2", "w3"]),
    "falcon_h1": (["q_proj", "k_proj", "v_proj", "in_proj", "o_proj"], ["gate_proj", "down_proj"]),
    "bamba": (["q_proj", "k_proj", "v_proj", "in_proj", "o_proj"], ["gate_proj", "down_proj"]),
    "qwen3_next": (
        ["q_proj", "k_proj", "v_proj", "in_proj_qkvz", "in_proj_ba", "out_proj", "o_proj"],
        ["out_proj", "o_proj"],
    ),
}
"""Modules of attention and MLP by architecture, Llama's where it has none."""


GROUP = 32


def store(base: Path, folder: Path, numbers: str) -> Path:
    """Write a checkpoint whose linears are ``numbers``, and give the base of the reference the same weights."""
    tensors = load_file(base / "model.safetensors")
    stored: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        if numbers == "bfloat16":
            stored[name] = tensor.bfloat16()
            tensors[name] = stored[name].float()
        elif not module.endswith(("proj", "fc_in", "fc_out")) or tensor.ndim != 2:
            stored[name] = tensor
        else:
            most = 127 if numbers == "int8" else 7
            groups = torch.nn.functional.pad(tensor, (0, -tensor.shape[1] % GROUP)).unflatten(1, (-1, GROUP))
            scales = (groups.abs().amax(-1) / most).half()
            codes = (groups / scales.float()[..., None]).round().clamp(-most, most)
            tensors[name] = (codes * scales.float()[..., None]).flatten(1)[:, : tensor.shape[1]].contiguous()
            codes = codes.flatten(1)[:, : tensor.shape[1]].to(torch.int8)
            stored[f"{module}.weight_scale"] = scales
            if numbers == "int8":
                stored[f"{module}.weight"] = codes
            else:
                nibbles = (codes + 8).view(torch.uint8).unflatten(1, (-1, 2))
                stored[f"{module}.weight_packed"] = (nibbles[..., 0] | nibbles[..., 1] << 4).view(torch.int32)
                stored[f"{module}.weight_shape"] = torch.tensor(tensor.shape)
    folder.mkdir()
    config = json.loads((base / "config.json").read_text())
    if numbers != "bfloat16":
        weights = {
            "num_bits": int(numbers[3:]),
            "type": "int",
            "symmetric": True,
            "strategy": "group",
            "group_size": GROUP,
        }
        config["quantization_config"] = {
            "quant_method": "compressed-tensors",
            "format": "int-quantized" if numbers == "int8" else "pack-quantized",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
            "ignore": ["lm_head"],
        }
    (folder / "config.json").write_text(json.dumps(config))
    save_file(
        {name: tensor.contiguous() for name, tensor in stored.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    save_file(tensors, base / "model.safetensors", {"format": "pt"})
    return folder


def adapter_configs(architecture: str) -> dict[str, LoraConfig]:
    """Return the twelve variants by name, in the names of the architecture's modules."""
    attention, mlp = _MODULES.get(architecture, _MODULES["llama"])
    embedding = {"gptj": "wte", "gpt2": "wte", "falcon": "word_embeddings"}.get(architecture, "embed_tokens")
    # On a mixture of experts PEFT takes "all-linear" to mean the experts too: ``expert_cases``.
    is_mixture = architecture in ("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v2", "deepseek_v3", "qwen3_next")
    # Nor does it take the last linear of this one's Mamba layers.
    every_linear = attention if is_mixture or architecture == "falcon_h1" else "all-linear"
    first, last = attention[0], attention[-1]
    variants: dict[str, dict[str, Any]] = {
        "plain": {"r": 8, "lora_alpha": 16, "target_modules": attention + mlp},
        "rslora": {"r": 4, "lora_alpha": 4, "target_modules": attention, "use_rslora": True},
        "patterns": {
            "r": 4,
            "lora_alpha": 8,
            "target_modules": attention + mlp,
            "rank_pattern": {first: 12, rf".*\.1\..*{last}": 3},
            "alpha_pattern": {first: 6, mlp[-1]: 2},
        },
        "one-layer": {"r": 8, "lora_alpha": 24, "target_modules": attention + mlp, "layers_to_transform": [1]},
        "attention": {"r": 16, "lora_alpha": 16, "target_modules": [first, last]},
        "mlp": {"r": 5, "lora_alpha": 10, "target_modules": mlp},
        "all-linear": {"r": 2, "lora_alpha": 4, "target_modules": every_linear},
        "embedding": {"r": 6, "lora_alpha": 12, "target_modules": [embedding]},
        "head": {"r": 7, "lora_alpha": 14, "target_modules": ["lm_head"]},
        "both-ends": {"r": 3, "lora_alpha": 6, "target_modules": [embedding, "lm_head", last], "use_rslora": True},
        "regex": {"r": 9, "lora_alpha": 9, "target_modules": rf".*\.(0|2)\.(self_)?att\w+\.({first}|{last})"},
        "wide": {"r": 80, "lora_alpha": 40, "target_modules": attention + mlp, "exclude_modules": [last]},
    }
    if architecture == "gemma3_vision":  # else PEFT takes the vision's modules of these names too
        for options in variants.values():
            options["exclude_modules"] = "|".join(
                [".*vision.*", *(rf".*\.{n}" for n in options.get("exclude_modules", []))]
            )
    return {
        name: LoraConfig(**options, init_lora_weights=False, task_type="CAUSAL_LM")
        for name, options in variants.items()
    }


def make_adapters(
    architecture: str, model_path: Path, path: Path, names: Collection[str] | None = None
) -> dict[str, Path]:
    """Save the adapters, or those of some ``names``, with random A and B; return their directories by name."""
    folders, base = {}, _load(model_path)
    for seed, (name, config) in enumerate(adapter_configs(architecture).items()):
        if names is not None and name not in names:
            continue
        torch.manual_seed(100 + seed)
        with _quiet():
            peft_model = get_peft_model(deepcopy(base), config)
            for parameter_name, parameter in peft_model.named_parameters():
                if "lora_embedding" in parameter_name:
                    parameter.data.mul_(0.2)
                if "lora_" in parameter_name:
                    # A third each as 16-bit checkpoints have them: those are kept in 16 bits, beside float32 ones.
                    parameter.data = parameter.data.to(_STORED[seed % len(_STORED)]).float()
            peft_model.save_pretrained(path / name, save_embedding_layers=False)
        folders[name] = path / name
    return folders


def make_cases(adapters: Sequence[str]) -> list[Case]:
    """Return a request of every adapter, of some twice over one prefix, and of the base: sixteen for twelve."""
    generator = torch.Generator().manual_seed(7)

    def draw(num_tokens: int) -> tuple[int, ...]:
        return tuple(torch.randint(3, VOCAB, (num_tokens,), generator=generator).tolist())

    cases = [Case(f"r{i}", name, draw(5 + (13 * i) % 37)) for i, name in enumerate([*adapters, None])]
    num = len(cases)
    cases.append(Case(f"r{num}", cases[1].adapter, (*cases[1].prompt, *draw(12))))
    cases.append(Case(f"r{num + 1}", cases[2].adapter, (*cases[2].prompt, *draw(4))))
    cases.append(Case(f"r{num + 2}", None, (*cases[num - 1].prompt, *draw(9))))
    return cases


SLOW_LINK = 100_000
"""Bytes a second at which hardly a copy arrives within the run."""

COLD = AdapterConfig(link_bytes_per_s=1_000_000, eviction="none", max_cpu_loras=5, look_ahead=0)
"""Every request is cold: no adapter idles on the device, half are on disk, and a copy lasts for several steps."""

EARLY_GAP_S = 0.06
"""Between requests that wait by layer: a step that waits for one adapter would see others arrive as well."""

LEAST_STEP_S = 0.01
"""Duration of a step then, so that requests with gaps run together on a fast machine as well."""

DOOMED = (
    Case("chunked", "wide", tuple(range(3, 183))),
    Case("decoding", "patterns", tuple(range(20, 29))),
)
"""Requests that are cancelled in the middle of a prompt, and of an answer."""


def run_oracle(
    architecture: str,
    path: Path,
    *,
    lora_kernel: str = "grouped",
    cold_start: str | None = None,
    open_assistant: OpenAssistant = open_assistant_workers,
    num_tokens: int = NUM_TOKENS,
    link_bytes_per_s: int | None = COLD.link_bytes_per_s,
    stored: str | None = None,
    kv_cache_dtype: str = "float32",
    make: Callable[[str, Path, Path], dict[str, Path]] | None = None,
    make_cases: Callable[[Sequence[str]], list[Case]] = make_cases,
    build: Callable[..., EngineParts] = build_parts,
    reference_dtype: torch.dtype = torch.float32,
    configs: Mapping[str, PreTrainedConfig] = ARCHITECTURES | FURTHER_ARCHITECTURES | OTHER_ARCHITECTURES | HYBRIDS,
) -> OracleResult:
    """Serve the cases, compare with the reference and return the differences.

    Args:
        architecture: A name in ``configs``.
        path: Where model and adapters are written.
        lora_kernel: The implementation of adapters' arithmetic.
        cold_start: Serve as ``COLD`` says, in this mode, and the ``DOOMED`` requests as well; ``None`` for warm.
        open_assistant: Starts workers for adapters in host memory, as in ``build_parts``.
        num_tokens: Tokens of an answer.
        link_bytes_per_s: Speed of copies to the device, if it is cold.
        stored: Numbers in which the base's linears are stored: ``bfloat16``, or ``int8`` or ``int4`` codes. The
            reference has the same weights as float32, and activations are not rounded.
        kv_cache_dtype: Type of KV in pages.
        make: Makes the adapters, given the architecture, the base and a folder; ``make_adapters`` by default.
        make_cases: Makes the requests, given the names of the adapters.
        build: Builds the engine; ``build_parts`` by default.
        reference_dtype: Type that the reference computes in.
        configs: Models by architecture.
    """
    base, folders, reference = _prepare(architecture, configs[architecture], make or make_adapters, reference_dtype)
    if stored is not None:
        reference = Reference(path / "base", folders, reference_dtype)
        base = store(shutil.copytree(base, path / "base"), path / "stored", stored)
    result = OracleResult(architecture)
    cases = make_cases(list(folders))
    answers, logits = _serve(
        base,
        folders,
        cases,
        result,
        lora_kernel,
        num_tokens,
        link_bytes_per_s,
        cold_start=cold_start,
        kv_cache_dtype=kv_cache_dtype,
        # Reader processes for adapters that are read while steps run; their start is a third of a short run.
        build=partial(build, open_assistant=open_assistant, readers=() if cold_start else [InlineReader()]),
    )
    _compare(reference, cases, answers, logits, result)
    return result


@cache
def _place() -> Path:
    """Return a folder for what runs share; it goes with this process."""
    folder = Path(tempfile.mkdtemp(prefix="oracle-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


_PREPARED: dict[tuple[Any, ...], tuple[Path, dict[str, Path], Reference]] = {}


def _prepare(
    architecture: str, config: PreTrainedConfig, make: Callable[[str, Path, Path], dict[str, Path]], dtype: torch.dtype
) -> tuple[Path, dict[str, Path], Reference]:
    """Return a base, adapters for it, and their reference: made by the first run that asks for them."""
    key = (architecture, config.to_json_string(), make, dtype)
    if key not in _PREPARED:
        path = _place() / str(len(_PREPARED))
        make_model(config, path / "base")
        folders = make(architecture, path / "base", path / "adapters")
        _PREPARED[key] = (path / "base", folders, Reference(path / "base", folders, dtype))
    return _PREPARED[key]


def _serve(
    model_path: Path,
    folders: dict[str, Path],
    cases: list[Case],
    result: OracleResult,
    lora_kernel: str,
    num_tokens: int,
    link_bytes_per_s: int | None,
    *,
    cold_start: str | None,
    kv_cache_dtype: str,
    build: Callable[..., EngineParts],
) -> tuple[dict[str, list[int]], dict[str, dict[int, torch.Tensor]]]:
    clock = WallClock()
    engine = EngineConfig(
        model=ModelConfig(model=str(model_path), device="cpu", lora_kernel=lora_kernel, activation_dtype="float32"),
        memory=MemoryConfig(block_size=8, num_pages=4000, kv_cache_dtype=kv_cache_dtype),
        scheduler=SchedulerConfig(max_num_batched_tokens=40, max_num_seqs=16),
        adapters=AdapterConfig()
        if cold_start is None
        else replace(COLD, cold_start=cold_start, link_bytes_per_s=link_bytes_per_s),
    )
    parts = build(engine, clock)
    assert isinstance(parts.executor, TorchExecutor | SharedExecutor)
    versions = {name: parts.reader.read(name, str(folder)) for name, folder in folders.items()}
    result.num_narrow = sum(version.weight_bytes < 4 * _num_weights(folders[n]) for n, version in versions.items())
    # All adapters fit, the KV of all requests does not: some must be pre-empted.
    kv_pages = sum(-(-(len(case.prompt) + num_tokens) // engine.memory.block_size) for case in cases)
    num_pages = sum(version.num_pages for version in versions.values()) + kv_pages // 2
    assert num_pages <= parts.num_pages
    core = EngineCore(replace(parts, num_pages=num_pages), engine, served_name=BASE_NAME)
    for name, version in versions.items():
        core.adapters.register(name, version, clock.now())
    doomed = () if cold_start is None else tuple(case for case in DOOMED if case.adapter in folders)
    asked = [*cases[:6], *doomed, *cases[6:]]
    logits: dict[str, dict[int, torch.Tensor]] = {case.request_id: {} for case in asked}
    num_run: dict[str, int] = {case.request_id: 0 for case in asked}
    started_cold: set[str] = set()

    def note(plan: StepPlan, rows: torch.Tensor) -> None:
        if cold_start == "layers":
            time.sleep(LEAST_STEP_S)
        sampled = [s for s in plan.sequences if s.is_sampled]
        for sequence, row in zip(sampled, rows, strict=True):
            # Numbered in the order of arrival.
            logits[asked[sequence.seq_id].request_id][sequence.start + sequence.num_tokens - 1] = row.clone()
        for sequence in plan.sequences:
            request_id = asked[sequence.seq_id].request_id
            num_run[request_id] = sequence.start + sequence.num_tokens
            tier = sequence.placement.tier
            result.num_in_host += tier is Tier.HOST
            result.num_arriving += sequence.placement is ARRIVING
            if sequence.placement is not ON_DEVICE:
                started_cold.add(request_id)
            elif cold_start != "layers":  # a step that waits for the layers is the only one that does
                started_cold.discard(request_id)
        result.num_mixed_steps += len({s.adapter for s in plan.sequences}) > 4
        result.num_chunked_prompts += sum(1 for s in plan.sequences if 0 < s.start < s.num_prompt_tokens - 1)

    parts.executor.runner.logits_hook = note
    answers: dict[str, list[int]] = {case.request_id: [] for case in asked}
    left = set(answers)

    def take(outputs: list[Output], now: float) -> None:
        for output in outputs:
            assert output.error is None, output
            answers[output.request_id].extend(token.token_id for token in output.tokens)
            if output.finish:
                result.num_cached_tokens += output.num_cached_tokens
                left.discard(output.request_id)
        for case in doomed:
            least = {"chunked": 1, "decoding": len(case.prompt) + 5}[case.request_id]
            if num_run[case.request_id] >= least and core.cancel(case.request_id, now):
                result.num_cancelled_cold += case.request_id in started_cold
                left.discard(case.request_id)
        if not left and cold_start is not None:
            loop.stop()  # without the last copies over a slow link, which no request waits for

    greedy = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    requests = [
        Request(request_id=c.request_id, prompt=c.prompt, sampling=greedy, model=c.adapter or BASE_NAME) for c in asked
    ]
    start, gap_s = clock.now(), EARLY_GAP_S if cold_start == "layers" else 0.0
    arrivals = [(start + number * gap_s, request) for number, request in enumerate(requests)]
    loop = EngineLoop(core, clock, on_outputs=take, arrivals=arrivals)
    try:
        loop.run()
    finally:
        parts.close()
    result.stats = core.stats()
    result.num_preemptions = result.stats.num_preemptions
    return answers, logits


@dataclass(slots=True)
class Reference:
    """Logits by transformers + PEFT, of every sequence by itself."""

    model_path: Path
    folders: Mapping[str, Path]  # of the adapters
    dtype: torch.dtype
    # By adapter and prompt: the answer, its logits, and the largest effect of the adapter (``None`` for the base).
    _known: dict[tuple[str | None, tuple[int, ...]], tuple[list[int], torch.Tensor, float | None]] = field(
        default_factory=dict
    )
    _models: dict[str | None, Any] = field(default_factory=dict)  # by adapter, of one comparison

    def logits(self, case: Case, answer: list[int]) -> tuple[torch.Tensor, float | None]:
        """Return the logits of an answer's rows, and the largest effect of the adapter on those of the sequence."""
        known, rows, effect = self._known.get((case.adapter, case.prompt), ([], torch.empty(0), None))
        if not known or known[: len(answer)] != answer:
            rows, effect = self._compute(case, answer)
            self._known[case.adapter, case.prompt] = answer, rows, effect
        return rows[: len(answer)], effect

    def forget_models(self) -> None:
        """Give the memory of the models back; the logits stay."""
        self._models.clear()

    def _model(self, adapter: str | None) -> Any:
        if adapter not in self._models:
            if adapter is None:
                self._models[None] = _load(self.model_path, self.dtype)
            else:
                with _quiet():  # each adapter apart: PEFT does not mix kinds
                    self._models[adapter] = peft_model(deepcopy(self._model(None)), self.folders[adapter])
        return self._models[adapter]

    @torch.inference_mode()
    def _compute(self, case: Case, answer: list[int]) -> tuple[torch.Tensor, float | None]:
        ids = torch.tensor([[*case.prompt, *answer[:-1]]])
        first = len(case.prompt) - 1
        base_logits = self._model(None)(input_ids=ids, use_cache=False).logits[0]
        if case.adapter is None:
            return base_logits[first:].clone(), None
        model, options = self._model(case.adapter), {}
        [offset] = calculate_alora_offsets(model.peft_config, "default", torch.tensor([case.prompt]))
        is_activated = getattr(model.active_peft_config, "alora_invocation_tokens", None) is not None
        if is_activated:  # by the prompt alone: PEFT counts from the end, and looks at all that it is given
            options = {"alora_offsets": [offset if offset is None else offset + ids.shape[1] - len(case.prompt)]}
        expected = model(input_ids=ids, use_cache=False, **options).logits[0]
        effect = float((expected - base_logits).abs().max())
        if is_activated and offset is None:
            assert effect == 0.0
            return expected[first:].clone(), None
        return expected[first:].clone(), effect


def _compare(
    reference: Reference,
    cases: list[Case],
    answers: dict[str, list[int]],
    logits: dict[str, dict[int, torch.Tensor]],
    result: OracleResult,
) -> None:
    spreads = []
    for case in cases:
        answer, found = answers[case.request_id], logits[case.request_id]
        expected, effect = reference.logits(case, answer)
        result.smallest_effect = min(result.smallest_effect, float("inf") if effect is None else effect)
        first = len(case.prompt) - 1
        assert sorted(found) == list(range(first, first + len(answer))), f"{case.request_id}: sampled rows are missing"
        for number, (row, token) in enumerate(zip(expected, answer, strict=True)):
            error = float((found[first + number] - row).abs().max())
            result.max_error = max(result.max_error, error if error == error else float("inf"))
            result.num_wrong_tokens += int(row.argmax()) != token
            result.num_rows += 1
        assert len(answer) == len(answers[cases[0].request_id])
        spreads.append(float(expected.std()))
    reference.forget_models()
    result.logit_std = min(spreads)


def parts_of(folder: Path) -> tuple[Path, Path]:
    """Return where the two parts of an adapter lie that PEFT does not read as a whole: of the layers, and the rest."""
    return folder.with_name(f"{folder.name}.layers"), folder.with_name(f"{folder.name}.rest")


def peft_model(base: PreTrainedModel, folder: Path) -> PeftModel:
    """Return PEFT's model of an adapter; of one in parts, PEFT merges that of the layers first, on other modules."""
    layers, rest = parts_of(folder)
    if layers.exists():  # a list of modules is no model of transformers, whose names PEFT would change
        PeftModel.from_pretrained(base.model.layers, layers).merge_and_unload()
        folder = rest
    return PeftModel.from_pretrained(base, folder).eval()


def _num_weights(folder: Path) -> int:
    return sum(tensor.numel() for tensor in load_file(folder / "adapter_model.safetensors").values())


def _load(path: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    config = AutoConfig.from_pretrained(path)
    attention = "eager" if config.model_type in ("gemma2", "gpt_oss") else "sdpa"  # has no soft-capping, no sinks
    options = {"dtype": dtype, "attn_implementation": attention}
    if dtype is torch.float64:
        options["experts_implementation"] = "eager"  # the others have no kernel for it
    return AutoModelForCausalLM.from_pretrained(path, **options).eval()


@contextlib.contextmanager
def _quiet() -> Any:
    """PEFT and transformers warn and draw progress bars about what is meant here."""
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        yield
