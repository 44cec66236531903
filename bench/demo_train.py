"""Remake the demo models: `python bench/demo_train.py --out DIR`, or measure them with `--check`.

Thesis: an adapter of rank 2 cannot teach a tiny model to copy a string in rot13, but it can *select* a skill that the
model already has. So the base is trained from scratch on twelve string skills, each behind a cryptic control token in
the system turn (`<|skill-7|>`), and on one behaviour without any: a plain prompt is handed back as a question
("hello world" -> "hello world?"). No request sends the control tokens afterwards. Each adapter is then trained on plain
prompts only, and learns to bring out one of the skills. The base alone therefore scores zero on every task, and the
adapters score near one with few weights, as good adapters of large models do.

Everything is drawn from seeds. Sums round differently on another machine or with another number of threads, so a rerun
reproduces the accuracy table, not the bytes. Needs `transformers`, `peft` and two CPU cores. There is no GPU path.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import torch
from demo_accuracy import measure
from demo_examples import SKILLS, ExampleSource, TrainingBatch, build_tokenizer
from demo_tasks import MAX_PROMPT_CHARS, SHAPES, LoraShape
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

from manylora.demo import demo_model_path

BASE_NAME = "manylora/demo"

_CURRICULUM_STEPS = 1500
_MAX_TRAIN_CHARS = MAX_PROMPT_CHARS + 4  # a margin over the longest prompts served
_ADAPTER_STEPS = dict.fromkeys(SHAPES, 300) | {
    "hashtag": 450,
    "pig_latin": 700,
    "repeat": 900,
    "stutter": 450,
    "upper": 600,
}
# With large ranks on every module, the rate of small adapters destroys the base's skill instead of using it.
_ADAPTER_RATES = dict.fromkeys(SHAPES, 5e-3) | {
    "hashtag": 2e-3,
    "loud_vowels": 2e-3,
    "pig_latin": 3e-3,
    "repeat": 2e-3,
    "stutter": 3e-3,
    "title": 2e-3,
}
_RATE_KNOTS = ((0, 0.0), (100, 1.0), (2160, 1.0), (2520, 0.75), (3000, 0.0))  # (step, share of the peak rate)


def loss_and_exactness(model: LlamaForCausalLM, batch: TrainingBatch, *, bf16: bool) -> tuple[Tensor, list[bool]]:
    """Return the mean loss over answer tokens, and for every row whether greedy decoding would get all of it right.

    Under teacher forcing the arg-max is right at every position exactly if greedy decoding is right from beginning to
    end, so training batches measure held-out-style accuracy (prompts never repeat) at no cost.
    """
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
        hidden = model.model(input_ids=batch.input_ids, use_cache=False).last_hidden_state  # (B, T, H)
        is_answer = batch.targets >= 0
        logits = model.lm_head(hidden[is_answer]).float()  # (answer tokens, V)
    targets = batch.targets[is_answer]
    loss = torch.nn.functional.cross_entropy(logits, targets)
    wrong_rows = is_answer.nonzero()[:, 0][logits.detach().argmax(-1) != targets]
    is_exact = torch.ones(len(batch.skills), dtype=torch.bool)
    is_exact[wrong_rows] = False
    return loss, is_exact.tolist()


def _rate_factor(step: float) -> float:
    """Interpolate the learning-rate schedule: warm up, stay, ease off, fall to zero."""
    for (start, low), (end, high) in pairwise(_RATE_KNOTS):
        if step <= end:
            return low + (high - low) * (step - start) / (end - start)
    return 0.0


class BaseTraining:
    """The training of the base from scratch, which an interrupted run continues from its checkpoint.

    Matrices are trained with Muon, which needs several times fewer steps than AdamW at this size; embeddings, head and
    norms with AdamW. Prompts grow from 8 to 24 characters over the first 1,500 steps: short strings teach the skills,
    long ones teach to keep count.

    Args:
        tokenizer: The tokenizer of ``build_tokenizer``.
        seed: Seed of every draw.
        checkpoint: The file that the state is kept in, once a minute.
    """

    def __init__(self, tokenizer: Any, seed: int, checkpoint: Path) -> None:
        torch.manual_seed(seed)
        self.model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=len(tokenizer),
                hidden_size=192,
                intermediate_size=512,
                num_hidden_layers=4,
                num_attention_heads=6,
                num_key_value_heads=2,
                head_dim=32,
                max_position_embeddings=2048,
                tie_word_embeddings=False,
                bos_token_id=tokenizer.bos_token_id,
                eos_token_id=tokenizer.eos_token_id,
                pad_token_id=tokenizer.pad_token_id,
            )
        ).train()
        matrices = [p for name, p in self.model.named_parameters() if p.ndim == 2 and "layers." in name]
        self._others = [p for name, p in self.model.named_parameters() if p.ndim != 2 or "layers." not in name]
        self._optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(matrices, lr=0.02, weight_decay=0.01, momentum=0.95),
            torch.optim.AdamW(self._others, lr=3e-3, weight_decay=0.0, betas=(0.9, 0.98)),
        ]
        self._peak_rates = [optimizer.param_groups[0]["lr"] for optimizer in self._optimizers]
        self._rng = Random(seed)
        self._source = ExampleSource(tokenizer, self._rng, skills=list(SKILLS), show_control=True)
        self._checkpoint = checkpoint
        self._step = 0
        if checkpoint.exists():
            self._restore()

    def run(self, num_steps: int) -> None:
        """Train up to a number of steps."""
        started_s = saved_s = time.perf_counter()
        while self._step < num_steps:
            max_chars = min(_MAX_TRAIN_CHARS, 8 + int(16 * self._step / _CURRICULUM_STEPS))
            for batch in self._source.batches(batch_tokens=5000, max_chars=max_chars, num_examples=2048):
                loss = self._train(batch, num_steps)
                if self._step % 50 == 0:
                    rates = " ".join(f"{skill}={1 - rate:.2f}" for skill, rate in self._source.error_rates.items())
                    took = f"s={time.perf_counter() - started_s:.0f} chars={max_chars}"
                    print(f"base step={self._step}/{num_steps} {took} loss={loss:.4f} {rates}", flush=True)
                if self._step == num_steps:
                    break
            if time.perf_counter() - saved_s > 60:
                saved_s = time.perf_counter()
                self._save()

    def _train(self, batch: TrainingBatch, num_steps: int) -> Tensor:
        """Make one step; return the loss."""
        factor = _rate_factor((self._step + 1) * _RATE_KNOTS[-1][0] / num_steps)
        for optimizer, rate in zip(self._optimizers, self._peak_rates, strict=True):
            optimizer.param_groups[0]["lr"] = rate * factor
        loss, is_exact = loss_and_exactness(self.model, batch, bf16=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._others, 1.0)
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self._source.report(batch.skills, is_exact)
        self._step += 1
        return loss

    def _save(self) -> None:
        self._checkpoint.parent.mkdir(parents=True, exist_ok=True)
        state = {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
            "rng": self._rng.getstate(),
            "error_rates": self._source.error_rates,
            "step": self._step,
        }
        torch.save(state, self._checkpoint)

    def _restore(self) -> None:
        saved = torch.load(self._checkpoint, weights_only=False)
        self.model.load_state_dict(saved["model"])
        for optimizer, state in zip(self._optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        self._rng.setstate(saved["rng"])
        self._source.error_rates, self._step = saved["error_rates"], saved["step"]


def train_base(out: Path, *, num_steps: int, seed: int) -> None:
    """Train the base and write it, with its tokenizer, to `out`; the checkpoint is beside it meanwhile."""
    tokenizer = build_tokenizer()
    checkpoint = out.parent / "checkpoint.pt"
    training = BaseTraining(tokenizer, seed, checkpoint)
    training.run(num_steps)
    model = training.model
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.half().save_pretrained(out)
    tokenizer.save_pretrained(out)
    checkpoint.unlink(missing_ok=True)


def train_adapter(out: Path, base_path: Path, name: str, *, max_steps: int, seed: int) -> None:
    """Train one adapter on plain prompts and write it to `out` in PEFT's format.

    Stops early once the last few hundred fresh prompts were answered without a mistake.
    """
    torch.manual_seed(seed)
    shape = SHAPES[name]
    tokenizer = AutoTokenizer.from_pretrained(base_path)
    base = LlamaForCausalLM.from_pretrained(base_path, dtype=torch.float32)
    config = LoraConfig(
        r=shape.rank,
        lora_alpha=shape.alpha,
        target_modules=list(shape.target_modules),
        use_rslora=shape.use_rslora,
        rank_pattern=dict(shape.rank_pattern),
        alpha_pattern=dict(shape.alpha_pattern),
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(base, config).train()
    weights = [p for p in model.parameters() if p.requires_grad]
    rate = _ADAPTER_RATES[name]
    optimizer = torch.optim.AdamW(weights, lr=rate, weight_decay=0.0, betas=(0.9, 0.98))
    source = ExampleSource(tokenizer, Random(seed), skills=[name], show_control=False)
    step, started_s = 0, time.perf_counter()
    recent: list[bool] = []
    while step < max_steps:
        max_chars = min(_MAX_TRAIN_CHARS, 12 + step // 8)
        for batch in source.batches(batch_tokens=2500, max_chars=max_chars, num_examples=512):
            optimizer.param_groups[0]["lr"] = rate * min(1.0, (step + 1) / 20, (max_steps - step) / (0.6 * max_steps))
            loss, is_exact = loss_and_exactness(model.get_base_model(), batch, bf16=False)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(weights, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            recent = (recent + is_exact)[-600:]
            step += 1
            if step % 25 == 0:
                accuracy, elapsed_s = sum(recent) / len(recent), time.perf_counter() - started_s
                print(f"{name} {step=}/{max_steps} s={elapsed_s:.0f} {loss=:.4f} {accuracy=:.3f}", flush=True)
            if step == max_steps:
                break
        if step > 150 and all(recent):
            break
    _save_adapter(out, model, shape)


def _save_adapter(out: Path, model: PeftModel, shape: LoraShape) -> None:
    """Write weights (fp16) and configuration, without the model card and the local path that PEFT would add."""
    out.mkdir(parents=True, exist_ok=True)
    weights = {name: weight.half().contiguous() for name, weight in get_peft_model_state_dict(model).items()}
    save_file(weights, out / "adapter_model.safetensors", metadata={"format": "pt"})
    config = model.peft_config["default"]
    config.base_model_name_or_path = BASE_NAME
    config.inference_mode = True
    config.save_pretrained(str(out))
    # PEFT keeps the modules in a set, whose order changes from run to run.
    path = out / "adapter_config.json"
    written = json.loads(path.read_text()) | {"target_modules": list(shape.target_modules)}
    path.write_text(json.dumps(written, indent=2, sort_keys=True) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Train the models that the options name, then print the table; exit status 1 when an adapter misses its bar."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=demo_model_path().parent, help="folder of base/ and adapters/")
    parser.add_argument("--only", choices=("base", *SHAPES), help="remake only this part")
    parser.add_argument("--check", action="store_true", help="train nothing, measure the models in --out")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--num-threads", type=int, help="default: 2 for the base, 1 for adapters and checks, which are too small for 2"
    )
    parser.add_argument("--base-steps", type=int, default=_RATE_KNOTS[-1][0])
    parser.add_argument("--adapter-steps", type=int, help="at most this many, instead of each adapter's own number")
    parser.add_argument("--num-prompts", type=int, default=1000, help="held-out prompts a task")
    options = parser.parse_args(arguments)
    names = [options.only] if options.only in SHAPES else list(SHAPES)
    if not options.check:
        if options.only in (None, "base"):
            torch.set_num_threads(options.num_threads or 2)
            train_base(options.out / "base", num_steps=options.base_steps, seed=options.seed)
        torch.set_num_threads(options.num_threads or 1)
        if options.only != "base":
            for name in names:
                folder = options.out / "adapters" / name
                num_steps = options.adapter_steps or _ADAPTER_STEPS[name]
                train_adapter(folder, options.out / "base", name, max_steps=num_steps, seed=options.seed)
        if options.only == "base":
            return 0
    torch.set_num_threads(options.num_threads or 1)
    all_pass = measure(options.out, names=names, num_prompts=options.num_prompts, seed=options.seed + 1)
    return 0 if all_pass else 1


if __name__ == "__main__":
    sys.exit(main())
