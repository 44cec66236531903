"""Remake the demo models: `python -m manylora.demo.train --out DIR`, or measure them with `--check`.

Thesis: an adapter of rank 2 cannot teach a tiny model to copy a string in rot13, but it can *select* a skill that the
model already has. So the base is trained from scratch on twelve string skills, each behind a cryptic control token in
the system turn (`<|skill-7|>`), and on one behaviour without any: a plain prompt is handed back as a question
("hello world" -> "hello world?"). No request sends the control tokens afterwards. Each adapter is then trained on plain
prompts only, and learns to bring out one of the skills. The base alone therefore scores zero on every task, and the
adapters score near one with few weights, as good adapters of large models do.

Everything is drawn from seeds. Sums round differently on another machine or number of threads, so what a rerun should
reproduce is the accuracy table, not the bytes. Needs `transformers`, `peft` and two CPU cores. Deliberately missing: a
GPU path, precision options, a configuration file.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from manylora.demo import demo_model_path
from manylora.demo.tasks import (
    EXAMPLE_PROMPTS,
    MAX_PROMPT_CHARS,
    TASKS,
    Task,
    check,
    draw_prompt,
    held_out_prompts,
    is_held_out,
)

__all__ = ["main"]

BASE_NAME = "manylora/demo"
PLAIN = "plain"

# What the base practises, in the order of its control tokens. It gets `no_vowels` and `reverse` right too seldom for
# adapters to be made of them; `loud_vowels` and `title` are none of them: their adapters learn from prompts alone.
SKILLS: dict[str, Callable[[str], str]] = {
    "acronym": TASKS["acronym"].apply,
    "call": TASKS["call"].apply,
    "hashtag": TASKS["hashtag"].apply,
    "json": TASKS["json"].apply,
    "leet": TASKS["leet"].apply,
    "no_vowels": lambda text: re.sub("[aeiou]", "", text),
    "pig_latin": TASKS["pig_latin"].apply,
    "repeat": TASKS["repeat"].apply,
    "reverse": lambda text: text[::-1],
    "rot13": TASKS["rot13"].apply,
    "stutter": TASKS["stutter"].apply,
    "upper": TASKS["upper"].apply,
    PLAIN: lambda text: f"{text}?",
}
MIN_ADAPTER_ACCURACY = 0.95
MAX_BASE_ACCURACY = 0.05

_CURRICULUM_STEPS = 1500
_MAX_TRAIN_CHARS = (
    MAX_PROMPT_CHARS + 4
)  # a margin, so that the longest prompts served are not the edge of what was seen
_ADAPTER_STEPS = dict.fromkeys(TASKS, 300) | {
    "hashtag": 450,
    "pig_latin": 700,
    "repeat": 900,
    "stutter": 450,
    "upper": 600,
}
# With large ranks on every module, the rate that suits small adapters wears the base's skill away instead of using it.
_ADAPTER_RATES = dict.fromkeys(TASKS, 5e-3) | {
    "hashtag": 2e-3,
    "loud_vowels": 2e-3,
    "pig_latin": 3e-3,
    "repeat": 2e-3,
    "stutter": 3e-3,
    "title": 2e-3,
}
_RATE_KNOTS = ((0, 0.0), (100, 1.0), (2160, 1.0), (2520, 0.75), (3000, 0.0))  # (step, share of the peak rate)
_SPECIAL_TOKENS = ("<|pad|>", "<|unk|>", "<|bos|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
_CONTROL_TOKENS = {name: f"<|skill-{index}|>" for index, name in enumerate(SKILLS) if name != PLAIN}
_CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('Unknown role ' + message['role'] + ', expected system, user or assistant') }}{% endif %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One question and its answer, as token ids.

    Attributes:
        skill: A skill of the base, or a task.
        prompt_ids: Up to and with `<|assistant|>`.
        answer_ids: Up to and with `<|end|>`.
    """

    skill: str
    prompt_ids: list[int]
    answer_ids: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Examples padded on the right; under a causal mask the padding needs no mask of its own.

    Attributes:
        input_ids: `(B, T)` int64.
        targets: `(B, T)` int64, the next token where it belongs to an answer, else -100.
        skills: The skill of each row.
    """

    input_ids: Tensor
    targets: Tensor
    skills: list[str]


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Make the character-level tokenizer: printable ASCII, newline and special tokens, 115 entries in all.

    Text goes through unchanged in both directions: no prefix space, no clean-up, no token added. The beginning-of-text
    token comes from the chat template alone.
    """
    characters = [*map(chr, range(32, 127)), "\n"]
    vocabulary = {
        token: index for index, token in enumerate([*_SPECIAL_TOKENS, *_CONTROL_TOKENS.values(), *characters])
    }
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<|unk|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|bos|>",
        eos_token="<|end|>",
        pad_token="<|pad|>",
        unk_token="<|unk|>",
        additional_special_tokens=["<|system|>", "<|user|>", "<|assistant|>", *_CONTROL_TOKENS.values()],
        chat_template=_CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        padding_side="left",
        model_max_length=2048,
    )


def chat_text(tokenizer: Any, prompt: str, *, skill: str = PLAIN) -> str:
    """Render one user turn, with the skill's control token as the system turn unless `skill` is plain."""
    turns = [{"role": "user", "content": prompt}]
    if skill != PLAIN:
        turns.insert(0, {"role": "system", "content": _CONTROL_TOKENS[skill]})
    return str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))


def answer_of(skill: str, prompt: str) -> str:
    """Return the right answer to `prompt` under a skill of the base or a task."""
    return SKILLS[skill](prompt) if skill in SKILLS else TASKS[skill].apply(prompt)


class ExampleSource:
    """Draws training examples, those skills most often that are learned least.

    Skills differ in difficulty by an order of magnitude (capitals against spelling backwards), and a uniform mix would
    spend most of a short run on what is already perfect. So each skill is drawn in proportion to a floor plus its
    recent error rate, which the training loop reports.
    """

    def __init__(self, tokenizer: Any, rng: Random, *, skills: Sequence[str], show_control: bool) -> None:
        """Keep the ingredients.

        Args:
            tokenizer: From `build_tokenizer`.
            rng: Where prompts and skills are drawn from.
            skills: The skills to mix.
            show_control: Put the skill's control token into the system turn; without it every prompt is plain.
        """
        self.error_rates = dict.fromkeys(skills, 1.0)
        self._ids: dict[str, int] = tokenizer.get_vocab()
        self._rng = rng
        self._show_control = show_control
        sample = self._encode(skills[0], "a b")
        skill = skills[0] if show_control else PLAIN
        assert sample.prompt_ids == tokenizer(chat_text(tokenizer, "a b", skill=skill))["input_ids"]

    def report(self, skills: Sequence[str], is_exact: Sequence[bool]) -> None:
        """Fold the outcomes of one batch into the error rates (exponential average over about 50 rows of a skill)."""
        for skill, exact in zip(skills, is_exact, strict=True):
            self.error_rates[skill] += 0.02 * ((not exact) - self.error_rates[skill])

    def batches(self, *, batch_tokens: int, max_chars: int, num_examples: int) -> Iterator[Batch]:
        """Yield one chunk of `num_examples` as batches of about `batch_tokens` tokens, similar lengths together."""
        skills = list(self.error_rates)
        weights = [0.08 + rate for rate in self.error_rates.values()]
        examples = []
        for skill in self._rng.choices(skills, weights, k=num_examples):
            prompt = draw_prompt(self._rng, max_chars=max_chars)
            while is_held_out(prompt):
                prompt = draw_prompt(self._rng, max_chars=max_chars)
            examples.append(self._encode(skill, prompt))
        examples.sort(key=lambda example: len(example.prompt_ids) + len(example.answer_ids))
        groups: list[list[Example]] = [[]]
        for example in examples:
            num_tokens = len(example.prompt_ids) + len(example.answer_ids)
            if (len(groups[-1]) + 1) * num_tokens > batch_tokens:
                groups.append([])
            groups[-1].append(example)
        self._rng.shuffle(groups)
        yield from map(_pad, groups)

    def _encode(self, skill: str, prompt: str) -> Example:
        ids = self._ids
        head = [ids["<|bos|>"]]
        if self._show_control and skill != PLAIN:
            head += [ids["<|system|>"], ids[_CONTROL_TOKENS[skill]], ids["<|end|>"]]
        return Example(
            skill=skill,
            prompt_ids=[*head, ids["<|user|>"], *map(ids.__getitem__, prompt), ids["<|end|>"], ids["<|assistant|>"]],
            answer_ids=[*map(ids.__getitem__, answer_of(skill, prompt)), ids["<|end|>"]],
        )


def _pad(examples: list[Example]) -> Batch:
    length = max(len(example.prompt_ids) + len(example.answer_ids) for example in examples) - 1
    input_ids = torch.zeros(len(examples), length, dtype=torch.long)
    targets = torch.full((len(examples), length), -100)
    for row, example in enumerate(examples):
        whole = torch.tensor(example.prompt_ids + example.answer_ids)
        first = len(example.prompt_ids) - 1  # the position of <|assistant|>, which predicts the answer's first token
        input_ids[row, : len(whole) - 1] = whole[:-1]
        targets[row, first : len(whole) - 1] = whole[first + 1 :]
    return Batch(input_ids=input_ids, targets=targets, skills=[example.skill for example in examples])


def loss_and_exactness(model: LlamaForCausalLM, batch: Batch, *, bf16: bool) -> tuple[Tensor, list[bool]]:
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


def train_base(out: Path, *, num_steps: int, seed: int) -> None:
    """Train the base from scratch and write it, with its tokenizer, to `out`.

    Matrices are trained with Muon, which needs several times fewer steps than AdamW at this size; embeddings, head and
    norms with AdamW. Prompts grow from 8 to 24 characters over the first 1,500 steps: short strings teach the skills,
    long ones teach to keep count. An interrupted run continues from `checkpoint.pt` beside the output.
    """
    torch.manual_seed(seed)
    tokenizer = build_tokenizer()
    config = LlamaConfig(
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
    model = LlamaForCausalLM(config).train()
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "layers." in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "layers." not in name]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, lr=0.02, weight_decay=0.01, momentum=0.95),
        torch.optim.AdamW(others, lr=3e-3, weight_decay=0.0, betas=(0.9, 0.98)),
    ]
    peak_rates = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    rng = Random(seed)
    source = ExampleSource(tokenizer, rng, skills=list(SKILLS), show_control=True)
    checkpoint = out.parent / "checkpoint.pt"
    step = 0
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=False)
        model.load_state_dict(saved["model"])
        for optimizer, state in zip(optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        rng.setstate(saved["rng"])
        source.error_rates, step = saved["error_rates"], saved["step"]
    started_s, last_saved_s = time.perf_counter(), time.perf_counter()
    while step < num_steps:
        max_chars = min(_MAX_TRAIN_CHARS, 8 + int(16 * step / _CURRICULUM_STEPS))
        for batch in source.batches(batch_tokens=5000, max_chars=max_chars, num_examples=2048):
            factor = _rate_factor((step + 1) * _RATE_KNOTS[-1][0] / num_steps)
            for optimizer, rate in zip(optimizers, peak_rates, strict=True):
                optimizer.param_groups[0]["lr"] = rate * factor
            loss, is_exact = loss_and_exactness(model, batch, bf16=True)
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(others, 1.0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            source.report(batch.skills, is_exact)
            step += 1
            if step % 50 == 0:
                rates = " ".join(f"{skill}={1 - rate:.2f}" for skill, rate in source.error_rates.items())
                elapsed_s = time.perf_counter() - started_s
                print(
                    f"base step={step}/{num_steps} s={elapsed_s:.0f} chars={max_chars} loss={loss:.4f} {rates}",
                    flush=True,
                )
            if step == num_steps:
                break
        if time.perf_counter() - last_saved_s > 60:
            last_saved_s = time.perf_counter()
            out.parent.mkdir(parents=True, exist_ok=True)
            state = {
                "model": model.state_dict(),
                "optimizers": [optimizer.state_dict() for optimizer in optimizers],
                "rng": rng.getstate(),
                "error_rates": source.error_rates,
                "step": step,
            }
            torch.save(state, checkpoint)
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.half().save_pretrained(out)
    tokenizer.save_pretrained(out)
    checkpoint.unlink(missing_ok=True)


def train_adapter(out: Path, base_path: Path, task: Task, *, max_steps: int, seed: int) -> None:
    """Train one adapter on plain prompts and write it to `out` in PEFT's format.

    Stops early once the last few hundred fresh prompts were answered without a mistake.
    """
    torch.manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(base_path)
    base = LlamaForCausalLM.from_pretrained(base_path, dtype=torch.float32)
    config = LoraConfig(
        r=task.rank,
        lora_alpha=task.alpha,
        target_modules=list(task.target_modules),
        use_rslora=task.use_rslora,
        rank_pattern=dict(task.rank_pattern),
        alpha_pattern=dict(task.alpha_pattern),
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(base, config).train()
    weights = [p for p in model.parameters() if p.requires_grad]
    rate = _ADAPTER_RATES[task.name]
    optimizer = torch.optim.AdamW(weights, lr=rate, weight_decay=0.0, betas=(0.9, 0.98))
    source = ExampleSource(tokenizer, Random(seed), skills=[task.name], show_control=False)
    step, started_s = 0, time.perf_counter()
    recent: list[bool] = []
    while step < max_steps:
        max_chars = min(_MAX_TRAIN_CHARS, 12 + step // 8)
        for batch in source.batches(batch_tokens=2500, max_chars=max_chars, num_examples=512):
            optimizer.param_groups[0]["lr"] = rate * min(1.0, (step + 1) / 20, (max_steps - step) / (0.6 * max_steps))
            loss, is_exact = loss_and_exactness(model.get_base_model(), batch, bf16=False)
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(weights, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            recent = (recent + is_exact)[-600:]
            step += 1
            if step % 25 == 0:
                accuracy, elapsed_s = sum(recent) / len(recent), time.perf_counter() - started_s
                print(f"{task.name} {step=}/{max_steps} s={elapsed_s:.0f} {loss=:.4f} {accuracy=:.3f}", flush=True)
            if step == max_steps:
                break
        if step > 150 and all(recent):
            break
    _save_adapter(out, model, task)


def _save_adapter(out: Path, model: PeftModel, task: Task) -> None:
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
    written = json.loads(path.read_text()) | {"target_modules": list(task.target_modules)}
    path.write_text(json.dumps(written, indent=2, sort_keys=True) + "\n")


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
    """Print accuracy on held-out prompts, adapter beside base, and say whether every bar is met.

    The example prompts, which are what people see first, must all be answered right as well.
    """
    tokenizer = AutoTokenizer.from_pretrained(out / "base")
    base = LlamaForCausalLM.from_pretrained(out / "base", dtype=torch.float32).eval()
    prompts = held_out_prompts(Random(seed), num_prompts)
    base_answers = greedy_answers(base, tokenizer, prompts)
    base_example = greedy_answers(base, tokenizer, EXAMPLE_PROMPTS[:1])[0]
    model: PeftModel | None = None
    is_good = True
    print(
        f"{num_prompts} held-out prompts a task, greedy; bars: adapter >= {MIN_ADAPTER_ACCURACY:.0%}, "
        f"base <= {MAX_BASE_ACCURACY:.0%}, all {len(EXAMPLE_PROMPTS)} examples right\n"
    )
    print("| adapter | rank | held-out | base alone | examples | size | 'hello world' becomes |")
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
        is_good &= is_met
        size_kb = (folder / "adapter_model.safetensors").stat().st_size / 1000
        print(
            f"| {name} | {TASKS[name].rank} | {accuracy:.1%} | {base_accuracy:.1%} | {num_examples}/{len(examples)} "
            f"| {size_kb:.0f} kB | `{examples[0]}` |{'' if is_met else ' <- MISSED'}",
            flush=True,
        )
    print(f"\nThe base alone makes `{base_example}` of it.")
    return is_good


def main(arguments: Sequence[str] | None = None) -> int:
    """Train what is asked for, then print the table; exit status 1 when a bar is missed."""
    parser = argparse.ArgumentParser(prog="python -m manylora.demo.train", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=demo_model_path().parent, help="folder of base/ and adapters/")
    parser.add_argument("--only", choices=("base", *TASKS), help="remake only this part")
    parser.add_argument("--check", action="store_true", help="train nothing, measure what is there")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num-threads", type=int, help="instead of 2 for the base and 1 for all else, too small for 2")
    parser.add_argument("--base-steps", type=int, default=_RATE_KNOTS[-1][0])
    parser.add_argument("--adapter-steps", type=int, help="at most this many, instead of each adapter's own number")
    parser.add_argument("--num-prompts", type=int, default=1000, help="held-out prompts a task")
    options = parser.parse_args(arguments)
    names = [options.only] if options.only in TASKS else list(TASKS)
    if not options.check:
        if options.only in (None, "base"):
            torch.set_num_threads(options.num_threads or 2)
            train_base(options.out / "base", num_steps=options.base_steps, seed=options.seed)
        torch.set_num_threads(options.num_threads or 1)
        if options.only != "base":
            for name in names:
                folder = options.out / "adapters" / name
                num_steps = options.adapter_steps or _ADAPTER_STEPS[name]
                train_adapter(folder, options.out / "base", TASKS[name], max_steps=num_steps, seed=options.seed)
        if options.only == "base":
            return 0
    torch.set_num_threads(options.num_threads or 1)
    is_good = measure(options.out, names=names, num_prompts=options.num_prompts, seed=options.seed + 1)
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
