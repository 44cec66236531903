"""Every kind of adapter on every architecture, in one batch with plain LoRA and the base: PEFT's logits."""

from __future__ import annotations

from pathlib import Path

import pytest
from kind_cases import kinds_of, make_kinds
from parity_cases import ARCHITECTURES, FURTHER_ARCHITECTURES, OracleResult, run_oracle

NUM_TOKENS = 24

pytestmark = pytest.mark.filterwarnings("ignore:.*:UserWarning:peft.*")


def check(result: OracleResult, architecture: str) -> None:
    assert result.num_rows == NUM_TOKENS * (len(kinds_of(architecture)) + 4)
    assert result.max_error <= 2e-5
    assert result.num_wrong_tokens == 0
    assert result.smallest_effect > 0.01  # hundreds of times the bound
    assert result.num_chunked_prompts > 0


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, *FURTHER_ARCHITECTURES, "gpt2", "gpt_oss", "deepseek_v3"])
def test_logits_equal_peft(architecture: str, tmp_path: Path) -> None:
    result = run_oracle(architecture, tmp_path, num_tokens=NUM_TOKENS, make=make_kinds)
    check(result, architecture)
    assert result.num_preemptions > 0
    assert result.num_cached_tokens > 0
    assert result.num_mixed_steps > 0


@pytest.mark.parametrize("mode", ["assist", "layers"])
@pytest.mark.parametrize("architecture", ["qwen2", "gemma3"])
def test_cold_requests_equal_peft(architecture: str, mode: str, tmp_path: Path) -> None:
    """From the host copy, and layer by layer as pages come."""
    result = run_oracle(architecture, tmp_path, num_tokens=NUM_TOKENS, cold_start=mode, make=make_kinds)
    check(result, architecture)
    assert result.stats is not None and result.stats.num_disk_loads > 0


@pytest.mark.parametrize("stored", ["bfloat16", "int8", "int4"])
def test_bases_in_fewer_bits_equal_peft_over_the_same_weights(stored: str, tmp_path: Path) -> None:
    """DoRA's norms and trained biases are of the weights that are served."""
    pytest.importorskip("numba")
    check(run_oracle("qwen2", tmp_path, num_tokens=NUM_TOKENS, stored=stored, make=make_kinds), "qwen2")


@pytest.mark.parametrize("kernel", ["reference", "naive"])
def test_other_kernels_equal_peft(kernel: str, tmp_path: Path) -> None:
    check(run_oracle("llama", tmp_path, num_tokens=NUM_TOKENS, lora_kernel=kernel, make=make_kinds), "llama")
