"""Model classes imported without training and compilation: what is left out stays there for whoever asks for it."""

from __future__ import annotations

import subprocess
import sys

LEFT_OUT = """
import sys
from manylora.execution.imports import import_model_classes
import_model_classes()
from manylora.core.config import ModelConfig
from manylora.demo import demo_model_path
from manylora.execution.model.load import load_model, load_skeleton
for load in (load_model, load_skeleton):
    load(ModelConfig(model=str(demo_model_path())))
assert "torch._dynamo" not in sys.modules
import torch, transformers
from transformers.masking_utils import TransformGetItemToIndex
config = transformers.LlamaConfig(
    vocab_size=16, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
)
model = transformers.LlamaForCausalLM(config).eval()
ids = torch.tensor([[1, 2, 3]])
expected = model(ids).logits
assert torch.distributed.is_available()
with TransformGetItemToIndex():
    assert ids[0, 1] == 2
assert "torch._dynamo" in sys.modules
import accelerate, scipy.optimize, torch.distributed.tensor
compiled = torch.compile(model, backend="eager")
assert torch.equal(compiled(ids).logits, expected)
"""
"""What was left out is imported as ever afterwards."""

NEEDED = """
import sys
from manylora.execution import imports
compiler = imports._compiler
def with_less():
    module = compiler()
    del module.allow_in_graph
    return module
imports._compiler = with_less
imports.import_model_classes()
assert "transformers" not in sys.modules
from transformers import LlamaForCausalLM
from transformers.utils import is_torch_distributed_available
assert is_torch_distributed_available() and "torch.distributed.tensor" in sys.modules
"""
"""Transformers asks for more of the compiler: it is imported as a whole."""


def run(code: str) -> str:
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return ran.stderr


def test_what_is_left_out_can_be_imported_afterwards() -> None:
    assert "whole_transformers" not in run(LEFT_OUT)


def test_a_release_that_needs_what_is_left_out_is_imported_as_a_whole() -> None:
    assert "whole_transformers_imported" in run(NEEDED)
