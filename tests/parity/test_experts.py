"""LoRA of experts and routers in one batch with plain LoRA and the base: PEFT's logits."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from expert_cases import make_expert_adapters
from parity_cases import MIXTURES, OracleResult, run_oracle

NUM_TOKENS = 16

pytestmark = pytest.mark.filterwarnings("ignore:.*:UserWarning:peft.*")

run = partial(run_oracle, num_tokens=NUM_TOKENS, make=make_expert_adapters, configs=MIXTURES)


def check(result: OracleResult) -> None:
    assert result.num_rows >= NUM_TOKENS * 10
    assert result.max_error <= 2e-5
    assert result.num_wrong_tokens == 0
    assert result.smallest_effect > 0.01  # hundreds of times the bound
    assert result.num_chunked_prompts > 0


@pytest.mark.parametrize("architecture", MIXTURES)
def test_logits_equal_peft(architecture: str, tmp_path: Path) -> None:
    result = run(architecture, tmp_path)
    check(result)
    assert result.num_preemptions > 0
    assert result.num_cached_tokens > 0
    assert result.num_mixed_steps > 0


@pytest.mark.parametrize("mode", ["assist", "layers"])
def test_cold_requests_equal_peft(mode: str, tmp_path: Path) -> None:
    """From the host copy, and layer by layer as pages come."""
    result = run("qwen3_moe", tmp_path, cold_start=mode)
    check(result)
    assert result.stats is not None and result.stats.num_disk_loads > 0


def test_the_definition_equals_peft(tmp_path: Path) -> None:
    """Without compiled kernels: expert by expert, row by row."""
    check(run("mixtral", tmp_path, lora_kernel="reference"))
