"""Accuracy of the demo models on held-out prompts, as the table that `python bench/demo_train.py --check` prints."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import torch
from demo_examples import chat_text
from demo_tasks import MAX_PROMPT_CHARS, SHAPES, held_out_prompts
from peft import PeftModel
from transformers import AutoTokenizer, LlamaForCausalLM

from manylora.demo import EXAMPLE_PROMPTS, check

MIN_ADAPTER_ACCURACY = 0.95
MAX_BASE_ACCURACY = 0.05


@torch.inference_mode()
def greedy_answers(model: Any, tokenizer: Any, prompts: Sequence[str], *, batch_size: int = 128) -> list[str]:
    """Answer every prompt with `generate`, greedily, in batches padded on the left."""
    answers: list[str] = []
    for first in range(0, len(prompts), batch_size):
        texts = [chat_text(tokenizer, prompt) for prompt in prompts[first : first + batch_size]]
        inputs = tokenizer(texts, return_tensors="pt", padding=True)
        outputs = model.generate(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            max_new_tokens=2 * MAX_PROMPT_CHARS + 16,
            do_sample=False,
        )
        new_ids = outputs[:, inputs["input_ids"].shape[1] :]
        answers += tokenizer.batch_decode(new_ids, skip_special_tokens=True)
    return answers


def measure(out: Path, *, names: Sequence[str], num_prompts: int, seed: int) -> bool:
    """Print accuracy on held-out prompts, adapter beside base; return whether every adapter passes.

    An adapter passes at ``MIN_ADAPTER_ACCURACY`` if the base stays below ``MAX_BASE_ACCURACY`` on its task and all
    example prompts, which the documents show, are answered right.
    """
    tokenizer = AutoTokenizer.from_pretrained(out / "base")
    base = LlamaForCausalLM.from_pretrained(out / "base", dtype=torch.float32).eval()
    prompts = held_out_prompts(Random(seed), num_prompts)
    base_answers = greedy_answers(base, tokenizer, prompts)
    base_example = greedy_answers(base, tokenizer, EXAMPLE_PROMPTS[:1])[0]
    model: PeftModel | None = None
    all_pass = True
    print(
        f"{num_prompts} held-out prompts a task, greedy; required: adapter >= {MIN_ADAPTER_ACCURACY:.0%}, "
        f"base <= {MAX_BASE_ACCURACY:.0%}, all {len(EXAMPLE_PROMPTS)} examples right\n"
    )
    print("| adapter | rank | held-out | base alone | examples | size | answer to 'hello world' |")
    print("|---|---:|---:|---:|---:|---:|---|")
    for name in names:
        folder = out / "adapters" / name
        if model is None:
            model = PeftModel.from_pretrained(base, folder, adapter_name=name).eval()
        else:
            model.load_adapter(folder, adapter_name=name)
        model.set_adapter(name)
        answers = greedy_answers(model, tokenizer, [*prompts, *EXAMPLE_PROMPTS])
        accuracy = sum(map(check, [name] * num_prompts, prompts, answers)) / num_prompts
        base_accuracy = sum(map(check, [name] * num_prompts, prompts, base_answers)) / num_prompts
        examples = answers[num_prompts:]
        num_examples = sum(map(check, [name] * len(examples), EXAMPLE_PROMPTS, examples))
        is_met = (
            accuracy >= MIN_ADAPTER_ACCURACY
            and base_accuracy <= MAX_BASE_ACCURACY
            and num_examples == len(EXAMPLE_PROMPTS)
        )
        all_pass &= is_met
        size_kb = (folder / "adapter_model.safetensors").stat().st_size / 1000
        print(
            f"| {name} | {SHAPES[name].rank} | {accuracy:.1%} | {base_accuracy:.1%} | {num_examples}/{len(examples)} "
            f"| {size_kb:.0f} kB | `{examples[0]}` |{'' if is_met else ' <- MISSED'}",
            flush=True,
        )
    print(f"\nThe base alone answers `{base_example}`.")
    return all_pass
