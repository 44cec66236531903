"""A server from one GGUF file: weights, configuration, tokenizer; answers are transformers' over its weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoint_cases import build
from transformers import LlamaConfig

from manylora import Engine, SamplingParams
from manylora.core.errors import ConfigError
from manylora.serving.text import Tokenizer

pytest.importorskip("numba")

LETTERS = [chr(code) for code in range(ord("a"), ord("z") + 1)]
TOKENS = ["<pad>", "<eos>", *LETTERS, "Ġ", "th", "he", "Ġth", "in"]
MERGES = ["t h", "h e", "Ġ th", "i n"]
SIZES = {
    "vocab_size": len(TOKENS),
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 64,
}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """Return a file of 4-bit, 5-bit, 6-bit and 8-bit blocks, and its weights by transformers' names."""
    from gguf import GGMLQuantizationType as Kind
    from gguf_cases import write_gguf

    def kind_of(name: str, shape: tuple[int, ...]) -> Kind:
        if len(shape) == 1:
            return Kind.F32
        kinds = {"attn_q": Kind.Q8_0, "attn_v": Kind.Q4_0, "ffn_down": Kind.Q6_K, "ffn_up": Kind.Q5_K}
        return next((kind for part, kind in kinds.items() if part in name), Kind.F16)

    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    model = build(LlamaConfig(**SIZES))
    weights = write_gguf(path, model, "llama", kind_of, tokens=TOKENS, merges=MERGES, eos=1)
    return path, {name: torch.from_numpy(numbers) for name, numbers in weights.items()}


def test_its_tokenizer_is_read(file: tuple[Path, dict[str, torch.Tensor]]) -> None:
    tokenizer = Tokenizer.load(file[0])
    assert tokenizer.eos_token_ids == (1,)
    ids = tokenizer.encode("the thin")
    assert [TOKENS[token] for token in ids] == ["th", "e", "Ġth", "in"]


def test_answers_are_those_of_its_weights(file: tuple[Path, dict[str, torch.Tensor]]) -> None:
    path, weights = file
    reference = build(LlamaConfig(**SIZES))
    reference.load_state_dict(weights, strict=False)
    prompt = Tokenizer.load(path).encode("the thin")
    expected = list(prompt)
    with torch.inference_mode():
        for _ in range(12):
            expected.append(int(reference(torch.tensor([expected])).logits[0, -1].argmax()))
    sampling = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    with Engine(str(path), device="cpu", activation_dtype="float32", kv_cache_dtype="float32") as engine:
        (answer,) = engine.generate(["the thin"], sampling=sampling)
    assert list(answer.token_ids) == expected[len(prompt) :]


def test_a_file_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        Engine(str(tmp_path / "gone.gguf"), device="cpu")
    (tmp_path / "noise.gguf").write_bytes(b"noise")
    with pytest.raises(ConfigError, match=r"noise\.gguf"):
        Engine(str(tmp_path / "noise.gguf"), device="cpu")
