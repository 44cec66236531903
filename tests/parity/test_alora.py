"""Adapters that are activated inside a prompt (aLoRA), in one batch with plain LoRA and the base: PEFT's logits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from parity_cases import _MODULES, VOCAB, Case, OracleResult, _load, _quiet, run_oracle
from peft import LoraConfig, get_peft_model

NUM_TOKENS = 20
BLOCK, BUDGET = 8, 40
"""Tokens of a block and of a step, of the oracle."""

INVOCATIONS = {"short": (5, 6, 5), "long": tuple(range(10, 22)), "one": (9,)}


def make_adapters(architecture: str, model_path: Path, path: Path) -> dict[str, Path]:
    """Save plain LoRA and three adapters that are activated: one with biases, one of the head as well."""
    attention, mlp = _MODULES.get(architecture, _MODULES["llama"])
    options = {
        "plain": {"r": 8, "target_modules": attention + mlp},
        "short": {"r": 8, "target_modules": attention + mlp, "use_rslora": True},
        "long": {"r": 5, "target_modules": attention, "lora_bias": True},
        "one": {"r": 4, "target_modules": [*mlp, attention[1], "lm_head"]},
    }
    for seed, (name, given) in enumerate(options.items()):
        torch.manual_seed(500 + seed)
        with _quiet():
            invocation = list(INVOCATIONS[name]) if name in INVOCATIONS else None
            config = LoraConfig(
                **given,
                lora_alpha=8,
                init_lora_weights=False,
                task_type="CAUSAL_LM",
                alora_invocation_tokens=invocation,
            )
            tuned = get_peft_model(_load(model_path), config)
            for parameter_name, parameter in tuned.named_parameters():
                if "lora_" in parameter_name:
                    parameter.data.normal_(std=0.12)
            tuned.save_pretrained(path / name, save_embedding_layers=False)
    return {name: path / name for name in options}


def make_cases(adapters: Sequence[str]) -> list[Case]:
    """Return requests over one context, activated at every place that matters."""
    generator = torch.Generator().manual_seed(8)

    def draw(num_tokens: int) -> tuple[int, ...]:
        return tuple(torch.randint(30, VOCAB, (num_tokens,), generator=generator).tolist())

    short, long, one = INVOCATIONS.values()
    context = draw(50)
    asked: list[tuple[str | None, tuple[int, ...]]] = [
        (None, context),
        ("short", context + short),
        ("plain", context + draw(3)),
        ("long", context + long + draw(2)),
        ("one", context + one),
        ("short", context + draw(9)),  # never activated
        ("short", draw(6) + short + draw(11) + short + draw(20)),  # the last occurrence counts
        ("long", long + draw(30)),
        ("one", one),
        ("short", context[: BUDGET - 1] + short + draw(5)),
        ("long", context[:BUDGET] + long + draw(5)),
        ("one", context[: BUDGET + 1] + one + draw(5)),
        ("short", context[: BLOCK - 1] + short),
        ("long", draw(3) + long[:-1] + long),  # a part of it before it
    ]
    return [Case(f"r{number}", name, prompt) for number, (name, prompt) in enumerate(asked)]


def check(result: OracleResult) -> None:
    assert result.num_rows == NUM_TOKENS * 14
    assert result.max_error <= 2e-5
    assert result.num_wrong_tokens == 0
    assert result.smallest_effect > 0.01  # hundreds of times the bound
    assert result.num_chunked_prompts > 0


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_logits_equal_peft(architecture: str, tmp_path: Path) -> None:
    result = run_oracle(architecture, tmp_path, num_tokens=NUM_TOKENS, make=make_adapters, make_cases=make_cases)
    check(result)
    assert result.num_preemptions > 0
    assert result.num_cached_tokens > 0


@pytest.mark.parametrize("mode", ["assist", "layers"])
def test_cold_requests_equal_peft(mode: str, tmp_path: Path) -> None:
    """From the host copy, and layer by layer as pages come."""
    result = run_oracle(
        "llama", tmp_path, num_tokens=NUM_TOKENS, cold_start=mode, make=make_adapters, make_cases=make_cases
    )
    check(result)
    assert (result.num_in_host if mode == "assist" else result.num_arriving) > 0
