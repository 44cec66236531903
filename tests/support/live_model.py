"""A tiny model with random weights and a tokenizer of bytes, for servers with the torch executor."""

from __future__ import annotations

from pathlib import Path

import torch
from serving import write_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB_SIZE = 257


def write_model(folder: Path) -> None:
    """Write the model that ``tiny_base(vocab=VOCAB_SIZE)`` is the shape of."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        eos_token_id=256,
        bos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    write_tokenizer(folder)
