"""What precision costs in quality: perplexity, top-1 agreement and the demo's adapters, beside llama.cpp at its own.

    python bench/bases_accuracy.py --folder DIR [--llama-cpp BUILD] [--minutes 20]

A Llama of 80 million parameters is trained here for ``--minutes`` on the modules of Python's standard library, and kept
in bfloat16 in the folder; every twentieth module is held out. Each precision reads the same 40 windows of 256 held-out
tokens: *perplexity* is over all of their tokens but the first of each, *top-1* is the share of positions whose
likeliest token is that of transformers on the same checkpoint in float32, and *difference* the mean difference of the
true token's log-probability from it. llama.cpp reads GGUF files that its own `llama-quantize` makes.

Then the twelve adapters of the demo answer prompts they were not trained on: the share that is right, of all adapters
and of the worst.

llama.cpp needs `gguf`, and the binding `llama-cpp-python` on the path, as `docs/benchmarking.md` says.
"""

from __future__ import annotations

import math
import os
import subprocess
import sysconfig
import time
from collections.abc import Iterable
from pathlib import Path
from random import Random
from typing import Any, TypeAlias

import numpy as np
import torch
from demo_tasks import held_out_prompts
from numpy.typing import NDArray
from peers import PeerRequest, quiet
from publishing import Steps, arguments, publish, table
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from transformers import LlamaConfig, LlamaForCausalLM

from manylora.core.types import SamplingParams
from manylora.demo import TASKS, check
from manylora.serving.offline import Engine

PRECISIONS = (
    ("float32", "float32"),
    ("bfloat16", "float32"),
    ("int8", "float32"),
    ("int8", "int8"),
    ("int4", "float32"),
    ("int4", "int8"),
)
"""Of the base, and of activations."""

GGUF = ("F16", "Q8_0", "Q4_0", "Q4_K_M")
VOCAB, WINDOW, WINDOWS, HELD_OUT = 7296, 256, 40, 20
BATCH, RATE, WARM_S = 8, 1e-3, 30.0

Tokens: TypeAlias = NDArray[np.int64]
Scores: TypeAlias = tuple[NDArray[np.float64], Tokens]
"""Log-probability of each true token, and the likeliest token, ``[windows, WINDOW - 1]``."""


def main() -> None:
    parser = arguments(__doc__, quick="one minute of training, few prompts")
    parser.add_argument("--folder", type=Path, default=Path(".bases"))
    parser.add_argument("--llama-cpp", type=Path)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--train-only", action="store_true", help="stop when the model is there")
    options = parser.parse_args()
    folder = options.folder / ("80m-quick" if options.quick else "80m")
    windows = prepare(folder, 60.0 * (1.0 if options.quick else options.minutes))
    if options.train_only:
        return
    reference = score_transformers(folder, windows)
    rows = [row("transformers, float32", reference, reference)]
    steps = Steps(len(PRECISIONS) + (len(GGUF) if options.llama_cpp else 0))
    for base, activations in PRECISIONS:
        name = base if activations == "float32" else f"{base}, activations {activations}"
        adapters = score_adapters(base, activations, 5 if options.quick else 50)
        rows.append([*row(name, score_ours(folder, base, activations, windows), reference), *adapters])
        steps.done(name)
    for kind in GGUF if options.llama_cpp else ():
        rows.append(row(f"llama.cpp, {kind}", score_llama(folder, kind, options.llama_cpp, windows), reference))
        steps.done(kind)
    heads = ["", "perplexity", "top-1", "difference", "adapters", "worst adapter"]
    lines = [
        "# Quality by precision",
        "",
        "`python bench/bases_accuracy.py`: "
        f"a Llama of 80M trained here, {windows[:, 1:].size:,} held-out positions; twelve adapters of the demo.",
        "",
        *table(heads, [[*one, *[""] * (len(heads) - len(one))] for one in rows]),
    ]
    publish("bases_accuracy", {"rows": rows, "heads": heads}, "\n".join(lines), is_kept=not options.quick)


def row(name: str, found: Scores, reference: Scores) -> list[str]:
    """Return the cells of what was found, beside the reference."""
    (scores, likeliest), (true, expected) = found, reference
    return [
        name,
        f"{math.exp(-scores.mean()):.3f}",
        f"{(likeliest == expected).mean():.2%}",
        f"{np.abs(scores - true).mean():.4f}",
    ]


def prepare(folder: Path, train_s: float) -> Tokens:
    """Return held-out windows ``[WINDOWS, WINDOW]``; train the model first unless it is there."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    texts = [file.read_text(encoding="utf-8", errors="ignore") for file in files]
    held_out = texts[::HELD_OUT]
    kept = [text for place, text in enumerate(texts) if place % HELD_OUT]
    file = folder / "tokenizer.json"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        tokenizer = Tokenizer(BPE())
        tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
        special = ["<pad>", "<s>", "</s>"]
        trainer = BpeTrainer(vocab_size=VOCAB, special_tokens=special, initial_alphabet=ByteLevel.alphabet())
        tokenizer.train_from_iterator(kept, trainer)
        tokenizer.save(str(file))
    tokenizer = Tokenizer.from_file(str(file))
    if not (folder / "model.safetensors").exists():
        train(folder, np.concatenate([tokenizer.encode(text).ids for text in kept]), train_s)
    tokens = np.concatenate([tokenizer.encode(text).ids for text in held_out])
    starts = np.linspace(0, len(tokens) - WINDOW, WINDOWS).astype(int)
    return np.stack([tokens[start : start + WINDOW] for start in starts]).astype(np.int64)


def train(folder: Path, tokens: Tokens, train_s: float) -> None:
    """Train a Llama of 80M for so long, and save it in bfloat16."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=10,
        num_attention_heads=12,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    model: Any = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.1)
    random, began, said_at, number = np.random.default_rng(0), time.monotonic(), 0.0, 0
    while (spent_s := time.monotonic() - began) < train_s:
        share = spent_s / train_s
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1.0, spent_s / WARM_S) * (0.1 + 0.45 * (1 + math.cos(math.pi * share)))
        starts = random.integers(0, len(tokens) - WINDOW, BATCH)
        batch = torch.from_numpy(np.stack([tokens[start : start + WINDOW] for start in starts]))
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        number += 1
        if spent_s - said_at > 10:
            said_at = spent_s
            print(f"{spent_s:.0f} of {train_s:.0f} s: step {number}, loss {float(loss.detach()):.3f}", flush=True)
    model.bfloat16().save_pretrained(folder)


@torch.inference_mode()
def score_transformers(folder: Path, windows: Tokens) -> Scores:
    """Return scores by transformers in float32."""
    with quiet():
        model: Any = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return gather(windows, (model(torch.from_numpy(window[None])).logits[0].numpy() for window in windows))


def gather(windows: Tokens, logits: Iterable[NDArray[np.float32]]) -> Scores:
    """Return the scores of windows by their logits ``[WINDOW, vocab]``."""
    scores, likeliest = [], []
    for window, rows in zip(windows, logits, strict=True):
        rows = rows[:-1].astype(np.float64)
        top = rows.max(axis=1)
        total = top + np.log(np.exp(rows - top[:, None]).sum(axis=1))
        scores.append(rows[np.arange(len(rows)), window[1:]] - total)
        likeliest.append(rows.argmax(axis=1))
    return np.stack(scores), np.stack(likeliest)


def score_ours(folder: Path, base: str, activations: str, windows: Tokens) -> Scores:
    """Return scores by our engine, whose KV is in the type that it takes beside such a base."""
    sampling = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    with Engine(folder, base_dtype=base, activation_dtype=activations, prefix_caching=False) as engine:
        answers = engine.generate([window.tolist() for window in windows], sampling=sampling)
    scores, likeliest = [], []
    for answer in answers:
        assert answer.prompt_logprobs is not None, answer.error
        rows = [one for one in answer.prompt_logprobs if one is not None]
        scores.append([one.logprob for one in rows])
        likeliest.append([one.top[0].token_id for one in rows])
    return np.array(scores), np.array(likeliest)


def score_adapters(base: str, activations: str, num_prompts: int) -> list[str]:
    """Return the share of right answers of the demo's adapters, and that of the worst."""
    prompts, names = held_out_prompts(Random(7), num_prompts), sorted(TASKS)
    conversations = [[{"role": "user", "content": prompt}] for prompt in prompts]
    sampling = SamplingParams(temperature=0.0, max_tokens=128)
    with Engine("demo", base_dtype=base, activation_dtype=activations) as engine:
        answers = engine.chat(
            conversations * len(names), adapter=[name for name in names for _ in prompts], sampling=sampling
        )
    right = np.array(
        [check(one.adapter or "", prompts[place % len(prompts)], one.text) for place, one in enumerate(answers)]
    )
    shares = right.reshape(len(names), -1).mean(axis=1)
    return [f"{shares.mean():.1%}", f"{shares.min():.0%}"]


def score_llama(folder: Path, kind: str, build: Path, windows: Tokens) -> Scores:
    """Return scores by llama.cpp on a file that it quantised."""
    from llama_cpp_base import LlamaCpp, Settings, write_gguf

    whole, file = folder / "f16.gguf", folder / f"{kind}.gguf"
    if not whole.exists():
        write_gguf(folder, whole, is_half=True)
    if not file.exists():
        subprocess.run([build / "llama-quantize", whole, file, kind], check=True, capture_output=True)
    llama = LlamaCpp(build, None, file, num_threads=os.cpu_count() or 1)
    asked = [PeerRequest(tuple(window.tolist()), 1) for window in windows]
    try:
        llama.open(Settings(), asked[:1])
        return gather(windows, (llama.read_all(one) for one in asked))
    finally:
        llama.close()


if __name__ == "__main__":
    main()
