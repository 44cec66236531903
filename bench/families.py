"""Which families of transformers' models are served, with the logits of transformers?

    python bench/families.py [FAMILY ...]

Of each family a model of two layers, 32 wide, with random weights and, where the family has windows, one of 8 tokens.
One sequence of 60 tokens goes through the engine's runner in two chunks and twenty decoding steps; each logit is
compared with transformers' own attention in one pass, in float32. A family that cannot be served is listed with the
engine's reason. Adapters, mixed batches and pre-emption are the subject of ``tests/parity``, on fewer families.

Writes ``bench/results/families.md``.
"""

from __future__ import annotations

import contextlib
import io
import logging
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import transformers
from publishing import RESULTS

from manylora.core.clock import WallClock
from manylora.core.config import EngineConfig, MemoryConfig, ModelConfig
from manylora.core.errors import ManyloraError
from manylora.core.plan import PlannedSequence, StepPlan
from manylora.core.types import SamplingParams
from manylora.execution.build import build_parts
from manylora.execution.executor import TorchExecutor
from manylora.execution.model.load import auto_class

MODEL: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GPT = {"vocab_size": 100, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}
LATENT["num_key_value_heads"] = 4
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
ROUTED = {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
ROUTED |= {"n_group": 1, "topk_group": 1}
WINDOW = {"sliding_window": 8}
SIDE = {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
TOWER = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
TOWER |= {"image_size": 28, "patch_size": 14}
QWEN_TOWER = {"depth": 1, "num_heads": 2, "hidden_size": 16, "intermediate_size": 24, "out_hidden_size": 32}
THIRDS = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}


def of(name: str, **fields: Any) -> Callable[[], Any]:
    """Return a maker of the configuration of that name, with ``MODEL`` below ``fields``."""
    return lambda: getattr(transformers, f"{name}Config")(**{**MODEL, **fields})


def bare(name: str, **fields: Any) -> Callable[[], Any]:
    """Return a maker of a configuration with no other fields."""
    return lambda: getattr(transformers, f"{name}Config")(**fields)


def seeing(name: str, kind: str, tower: Mapping[str, Any], **fields: Any) -> Callable[[], Any]:
    """Return a maker of a multimodal configuration whose text is of a ``kind``; ``fields`` are of the text."""
    text = {**MODEL, "model_type": kind, **fields}
    return lambda: getattr(transformers, f"{name}Config")(text_config=text, vision_config=dict(tower))


FAMILIES: dict[str, Callable[[], Any]] = {
    "AFMoE": of("Afmoe", **EXPERTS, **WINDOW, head_dim=8, num_dense_layers=1),
    "Apertus": of("Apertus"),
    "Arcee": of("Arcee"),
    "BitNet": of("BitNet"),
    "CodeGen": bare("CodeGen", **GPT, rotary_dim=8),
    "Cohere": of("Cohere"),
    "Cohere 2": of("Cohere2", **WINDOW),
    "DeepSeek V2": of("DeepseekV2", **LATENT, **ROUTED, first_k_dense_replace=1),
    "DeepSeek V3": of("DeepseekV3", **LATENT, **ROUTED, first_k_dense_replace=1),
    "dots.1": of("Dots1", **ROUTED, **WINDOW, first_k_dense_replace=1),
    "ERNIE 4.5": of("Ernie4_5", head_dim=8),
    "ERNIE 4.5 MoE": of("Ernie4_5_Moe", moe_num_experts=4, moe_k=2, moe_intermediate_size=24),
    "EXAONE 4": of("Exaone4", **WINDOW),
    "Falcon": bare("Falcon", **SIDE, num_kv_heads=2, new_decoder_architecture=True),
    "Falcon, one KV head": bare("Falcon", **SIDE, multi_query=True),
    "Gemma": of("Gemma", head_dim=8),
    "Gemma 2": of("Gemma2", **WINDOW, head_dim=8),
    "Gemma 3 (text)": of("Gemma3Text", **WINDOW, head_dim=8),
    "GLM": of("Glm", head_dim=8),
    "GLM 4": of("Glm4", head_dim=8),
    "GLM 4 MoE": of("Glm4Moe", **ROUTED, head_dim=8),
    "GLM 4 MoE Lite": of("Glm4MoeLite", **LATENT, **ROUTED),
    "GPT-2": bare("GPT2", **GPT),
    "GPT-BigCode": bare("GPTBigCode", **GPT),
    "GPT-J": bare("GPTJ", **GPT, rotary_dim=8),
    "GPT-NeoX": of("GPTNeoX"),
    "gpt-oss": of("GptOss", **LOCAL, **WINDOW, head_dim=8),
    "Granite": of("Granite"),
    "Granite MoE": of("GraniteMoe", **LOCAL),
    "Granite MoE, shared experts": of("GraniteMoeShared", **LOCAL, shared_intermediate_size=24),
    "Helium": of("Helium", head_dim=8),
    "Hunyuan": of("HunYuanDenseV1", head_dim=8),
    "Llama": of("Llama"),
    "MiniCPM 3": of("MiniCPM3", **LATENT),
    "MiniMax M2": of("MiniMaxM2", **LOCAL, head_dim=8),
    "Ministral": of("Ministral", **WINDOW, head_dim=8),
    "Ministral 3": of("Ministral3", head_dim=8),
    "Mistral": of("Mistral", **WINDOW),
    "Mixtral": of("Mixtral", **LOCAL),
    "nanochat": of("NanoChat"),
    "Nemotron": of("Nemotron"),
    "OLMo": of("Olmo"),
    "OLMo 2": of("Olmo2"),
    "OLMo 3": of("Olmo3", **WINDOW),
    "OLMoE": of("Olmoe", num_experts=4, num_experts_per_tok=2),
    "OPT": bare("OPT", **SIDE, ffn_dim=48, max_position_embeddings=128, word_embed_proj_dim=16),
    "Persimmon": of("Persimmon"),
    "Phi": of("Phi"),
    "Phi 3": of("Phi3", **WINDOW),
    "Phi 3.5 MoE": of("Phimoe", **LOCAL),
    "Qwen 2": of("Qwen2"),
    "Qwen 2 MoE": of("Qwen2Moe", **EXPERTS, shared_expert_intermediate_size=24),
    "Qwen 3": of("Qwen3", head_dim=8),
    "Qwen 3 MoE": of("Qwen3Moe", **EXPERTS, head_dim=8),
    "Seed-OSS": of("SeedOss", head_dim=8),
    "SmolLM 3": of("SmolLM3"),
    "Solar Open": of("SolarOpen", **ROUTED),
    "StableLM": of("StableLm"),
    "StarCoder 2": of("Starcoder2"),
    "VaultGemma": of("VaultGemma", **WINDOW, head_dim=8),
    "Gemma 3, text of": seeing("Gemma3", "gemma3_text", {**TOWER, "model_type": "siglip_vision_model"}, head_dim=8),
    "LLaVA, text of": seeing("Llava", "llama", {**TOWER, "model_type": "clip_vision_model"}),
    "Mistral 3, text of": seeing("Mistral3", "mistral", {**TOWER, "model_type": "pixtral", "head_dim": 8}),
    "PaliGemma, text of": seeing("PaliGemma", "gemma", {**TOWER, "model_type": "siglip_vision_model"}, head_dim=8),
    "Qwen 2 VL, text of": seeing("Qwen2VL", "qwen2_vl_text", {"depth": 1, "embed_dim": 16, "num_heads": 2}, **THIRDS),
    "Qwen 2.5 VL, text of": seeing("Qwen2_5_VL", "qwen2_5_vl_text", QWEN_TOWER, **THIRDS),
    "Qwen 3 VL, text of": seeing("Qwen3VL", "qwen3_vl_text", QWEN_TOWER, **THIRDS, head_dim=8),
    "SmolVLM, text of": seeing("SmolVLM", "llama", TOWER),
    "BLOOM": bare("Bloom", vocab_size=100, hidden_size=32, n_layer=2, n_head=4),
    "DeepSeek V3.2": of("DeepseekV32", **LATENT, **ROUTED),
    "Falcon H1": of("FalconH1", mamba_d_ssm=32, mamba_n_heads=4, mamba_d_state=8, mamba_d_head=8, mamba_chunk_size=8),
    "GPT-Neo": bare(
        "GPTNeo", vocab_size=100, hidden_size=32, num_layers=2, num_heads=4, attention_types=[[["local"], 2]]
    ),
    "LFM 2": of("Lfm2", layer_types=["conv", "full_attention"]),
    "Llama 4 (text)": of("Llama4Text", head_dim=8, num_local_experts=2, intermediate_size_mlp=48),
    "Mamba 2": bare(
        "Mamba2", vocab_size=100, hidden_size=32, num_hidden_layers=2, num_heads=8, head_dim=8, state_size=4
    ),
    "MiMo V2 Flash": of("MiMoV2Flash"),
    "MPT": bare("Mpt", d_model=32, n_heads=4, n_layers=2, max_seq_len=128, vocab_size=100),
    "Qwen 3 Next": of("Qwen3Next", head_dim=8, **EXPERTS, shared_expert_intermediate_size=24),
    "Qwen 3.5 (text)": of("Qwen3_5Text", head_dim=8),
}

TOKENS = [(7 * i + 3) % 97 + 3 for i in range(60)]
STEPS = ((0, 25), (25, 40), *((i, i + 1) for i in range(40, 60)))
NUM_PAGES, PAGES = 256, tuple(range(3, 18))


def main() -> None:
    """Compare the families named, or all, and write the table."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    logging.getLogger("manylora").setLevel(logging.ERROR)
    rows = []
    for name in sys.argv[1:] or FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            rows.append((name, *compare(FAMILIES[name], folder)))
        print(*rows[-1], sep="  ", flush=True)
    if len(sys.argv) == 1:
        (RESULTS / "families.md").write_text(page(rows))


def compare(make: Callable[[], Any], folder: str) -> tuple[str, str]:
    """Return the largest difference of logits and their spread, or nothing and the reason why there are none."""
    config = make()
    own = auto_class(config)
    save(own, config, folder)
    try:
        found = serve(folder)
    except ManyloraError as error:
        return "", str(error).split("'", 2)[-1].partition("not supported: ")[2] or str(error)
    expected = refer(own, folder)
    return f"{float((found - expected).abs().max()):.1e}", f"{float(expected.std()):.2f}"


def save(own: Any, config: Any, folder: str) -> None:
    """Save a model whose logits spread enough for an error to show."""
    torch.manual_seed(0)
    with quiet():
        model = own.from_config(config)
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.data.add_(0.2 * torch.randn_like(parameter))
            elif "bias" in name:
                parameter.data.normal_(std=0.3)
            elif "emb" in name or "lm_head" in name:
                parameter.data.normal_(std=0.15)
            elif parameter.ndim:
                parameter.data.normal_(std=1.0 / parameter.shape[-1] ** 0.5)
        model.save_pretrained(folder)


def serve(folder: str, base_dtype: str = "auto") -> torch.Tensor:
    """Return the logits of each step ``[steps, vocab]``."""
    model = ModelConfig(model=folder, device="cpu", base_dtype=base_dtype, activation_dtype="float32")
    parts = build_parts(EngineConfig(model=model, memory=MemoryConfig(block_size=4, num_pages=NUM_PAGES)), WallClock())
    assert isinstance(parts.executor, TorchExecutor)
    runner, rows = parts.executor.runner, []
    runner.logits_hook = lambda plan, logits: rows.append(logits.clone())
    try:
        for number, (start, stop) in enumerate(STEPS):
            # Layers with states keep them in pages in front of those of KV.
            pages = (*range(NUM_PAGES - parts.base.num_state_pages, NUM_PAGES), *PAGES)
            runner.run(StepPlan(step_id=number, sequences=(part(start, stop, pages),), released=()))
    finally:
        parts.close()
    return torch.cat(rows)


def refer(own: Any, folder: str) -> torch.Tensor:
    """Return the same logits of transformers."""
    with torch.inference_mode(), quiet():
        model = own.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
        logits: torch.Tensor = model(input_ids=torch.tensor([TOKENS]), use_cache=False).logits[0]
    return logits[[stop - 1 for _, stop in STEPS]]


def part(start: int, stop: int, pages: tuple[int, ...]) -> PlannedSequence:
    """Return tokens ``[start, stop)`` as a step's only sequence."""
    return PlannedSequence(
        seq_id=1,
        tokens=TOKENS,
        num_prompt_tokens=len(TOKENS),
        start=start,
        num_tokens=stop - start,
        pages=pages,
        adapter=None,
        rank=0,
        sampling=SamplingParams(temperature=0.0),
        is_sampled=True,
        seed=0,
    )


def page(rows: list[tuple[str, str, str]]) -> str:
    """Return the page."""
    served = [f"| {name} | {error} | {spread} |" for name, error, spread in rows if error]
    refused = [f"| {name} | {reason.replace('|', '/')} |" for name, error, reason in rows if not error]
    intro, _, method = (__doc__ or "").strip().partition("\n\n    python bench/families.py [FAMILY ...]\n\n")
    return "\n".join(
        [
            "# Families of models",
            "",
            f"`python bench/families.py`: {intro[0].lower()}{intro[1:]}",
            "",
            method.partition("\n\nWrites")[0].replace("``", "`"),
            "",
            "| family | largest difference | std of logits |",
            "|---|---:|---:|",
            *served,
            "",
            "| refused | reason |",
            "|---|---|",
            *refused,
            "",
            f"On the CPU with torch {torch.__version__}, transformers {transformers.__version__}.",
            "",
        ]
    )


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hide transformers' warnings and progress bars."""
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


if __name__ == "__main__":
    main()
