"""The base as llama.cpp reads it; llama.cpp itself is checked where it runs, by its logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from llama_cpp_base import ALTERNATIVES, LlamaCpp, Settings, interleaved, reason_to_leave_out, write_gguf
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

HEADS, KV_HEADS, SIZE, HIDDEN = 4, 2, 8, 32


def test_scores_of_interleaved_rows_are_those_of_transformers() -> None:
    """llama.cpp rotates neighbours, transformers halves; with the rows in the other order both give the same scores."""
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(5, HIDDEN, generator=rng)
    weights = [torch.randn(HEADS * SIZE, HIDDEN, generator=rng) for _ in "qk"]
    angles = torch.outer(torch.arange(5.0), 10_000.0 ** (-torch.arange(0, SIZE, 2) / SIZE))

    halves = [(x @ weight.T).view(1, 5, HEADS, SIZE).transpose(1, 2) for weight in weights]
    cos, sin = (torch.cat([one, one], -1)[None] for one in (angles.cos(), angles.sin()))
    query, key = apply_rotary_pos_emb(*halves, cos, sin)

    def rotated(weight: torch.Tensor) -> torch.Tensor:
        pairs = (x @ interleaved(weight, HEADS).T).view(5, HEADS, SIZE // 2, 2)
        turned = torch.view_as_complex(pairs) * torch.polar(torch.ones_like(angles), angles)[:, None]
        return torch.view_as_real(turned).reshape(1, 5, HEADS, SIZE).transpose(1, 2)

    mine = rotated(weights[0]) @ rotated(weights[1]).transpose(-1, -2)
    torch.testing.assert_close(mine, query @ key.transpose(-1, -2), rtol=1e-4, atol=1e-3)
    assert not torch.allclose(
        (x @ weights[0].T).view(5, HEADS, SIZE), (x @ interleaved(weights[0], HEADS).T).view(5, HEADS, SIZE)
    )


@pytest.mark.parametrize("is_tied", [False, True])
def test_the_file_holds_every_weight_and_what_decides_the_logits(tmp_path: Path, is_tied: bool) -> None:
    gguf: Any = pytest.importorskip("gguf")
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=128,
        rms_norm_eps=3e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 5e5},
        tie_word_embeddings=is_tied,
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(tmp_path / "model")

    write_gguf(tmp_path / "model", tmp_path / "model.gguf")

    read = gguf.GGUFReader(tmp_path / "model.gguf")
    tensors = {tensor.name: tensor for tensor in read.tensors}
    assert {tensor.tensor_type.name for tensor in tensors.values()} == {"F32"}
    assert sum(tensor.data.size for tensor in tensors.values()) == sum(one.numel() for one in model.parameters())
    assert ("output.weight" in tensors) == (not is_tied)
    keys = interleaved(model.model.layers[1].self_attn.k_proj.weight.detach(), KV_HEADS)
    assert (tensors["blk.1.attn_k.weight"].data == keys.numpy()).all()
    values = {
        name: read.get_field(f"llama.{name}").contents()
        for name in ("attention.layer_norm_rms_epsilon", "rope.freq_base")
    }
    assert values == {"attention.layer_norm_rms_epsilon": pytest.approx(3e-6), "rope.freq_base": 5e5}


def test_the_sweep_keeps_the_best_of_each_group() -> None:
    """The sweep is driven without a library: the slower side of every setting is told to it as slower."""
    one = LlamaCpp.__new__(LlamaCpp)
    one.swept = []
    tried = []
    for settings in one.to_try():
        tried.append(settings)
        took = settings.batch_tokens + settings.ubatch_tokens + settings.is_unified - settings.has_flash_attention
        one.swept.append((settings, took - (settings.kv == "f32")))

    assert one.best() == Settings(batch_tokens=512, ubatch_tokens=512, kv="f32")
    assert len(tried) == len({*tried}) == 1 + sum(map(len, ALTERNATIVES))


def test_without_a_build_it_is_left_out_with_a_reason() -> None:
    assert "--llama-cpp" in (reason_to_leave_out(None) or "")
