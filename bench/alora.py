"""Five adapters in a chain over one context: what do aLoRA's adapters wait and hold, beside plain LoRA?

    python bench/alora.py [--quick] [--rounds 5]

A model of random weights on this machine's CPU, and a context of 4,100 tokens, so that it does not end with a block.
Five adapters of rank 16 on all linears answer one after another with 16 tokens; each prompt is the context and three
tokens of the adapter's own. *aLoRA*: these tokens activate the adapter, and the context's KV is the base's. *LoRA*: the
same weights, always active, so that the context is computed for each. Every turn has another context.

The goals: from the second adapter on, the time to first token is at most a tenth of plain LoRA's, and all five together
fill at most 1.2 times the KV of one request. The page says whether they were met, and the exit code is 1 if not. Writes
`results/alora.json` and `.md`.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from live import LiveEngine
from publishing import Others, arguments, publish, reason_to_refuse, table
from ratios import Ratio, ratio_by_round
from transformers import LlamaConfig, LlamaForCausalLM

from manylora.core.config import EngineConfig, MemoryConfig, ModelConfig
from manylora.core.memory import num_blocks
from manylora.core.types import Request, SamplingParams
from manylora.execution.device import describe_machine
from manylora.lab.bench.rounds import in_turns
from manylora.lab.bench.sweep import write_synthetic_adapter
from manylora.lab.measure import RequestRecord

NUM_ADAPTERS, RANK = 5, 16
NUM_CONTEXT, NUM_ANSWER, BLOCK_SIZE = 4100, 16, 16
VOCABULARY, SPECIAL = 1000, 900  # tokens from ``SPECIAL`` on are in no context
ALORA, LORA = "aLoRA", "LoRA"
LEAST_SPEEDUP, MOST_KV = 10.0, 1.2


def make_model(path: Path, *, is_quick: bool) -> Path:
    """Save a random model; return its folder."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128 if is_quick else 384,
        intermediate_size=256 if is_quick else 1024,
        num_hidden_layers=2 if is_quick else 6,
        num_attention_heads=6 if not is_quick else 4,
        num_key_value_heads=2,
        max_position_embeddings=8192,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        LlamaForCausalLM(config).save_pretrained(path)
    return path


def invocation(index: int) -> tuple[int, ...]:
    """Return the tokens that activate an adapter."""
    return SPECIAL + index, SPECIAL + 50, SPECIAL + 51


def register_adapters(engine: LiveEngine, path: Path) -> None:
    """Register each adapter twice, with the same weights: activated, and always active."""
    for index in range(NUM_ADAPTERS):
        for kind in (ALORA, LORA):
            folder = path / f"{kind}-{index}"
            write_synthetic_adapter(folder, engine.parts.base, RANK, np.random.default_rng(index))
            file = folder / "adapter_config.json"
            settings = json.loads(file.read_text())
            if kind == ALORA:
                settings["alora_invocation_tokens"] = list(invocation(index))
            file.write_text(json.dumps(settings))
            version = engine.parts.reader.read(folder.name, str(folder))
            engine.core.adapters.register(folder.name, version, engine.clock.now())


def run_chain(engine: LiveEngine, kind: str, context: tuple[int, ...]) -> list[RequestRecord]:
    """Serve the chain, each request after the answer before it; return the records in that order."""
    records = []
    for index in range(NUM_ADAPTERS):
        request = Request(
            request_id=f"{kind}-{index}",
            prompt=(*context, *invocation(index)),
            sampling=SamplingParams(temperature=0.0, max_tokens=NUM_ANSWER, ignore_eos=True),
            model=f"{kind}-{index}",
        )
        [record] = engine.serve([(0.0, request)]).records
        assert record.error is None, record.error
        records.append(record)
    return records


def filled_pages(record: RequestRecord) -> int:
    """Return the pages of KV that a request filled, beside those that it found; the last token needs no KV."""
    num_tokens = record.num_prompt_tokens + record.num_output_tokens - 1
    return num_blocks(num_tokens, BLOCK_SIZE) - record.num_cached_tokens // BLOCK_SIZE


def measure(num_rounds: int, *, is_quick: bool) -> dict[str, Any]:
    """Run everything; return the figures."""
    rng = np.random.default_rng(1)
    ttft: dict[str, list[list[float]]] = {ALORA: [], LORA: []}  # by round, then by place in the chain
    pages: dict[str, list[int]] = {ALORA: [], LORA: []}
    with tempfile.TemporaryDirectory() as path:
        base = make_model(Path(path) / "base", is_quick=is_quick)
        config = EngineConfig(
            model=ModelConfig(model=str(base), device="cpu"), memory=MemoryConfig(block_size=BLOCK_SIZE, num_pages=4000)
        )
        engine = LiveEngine(config, ())
        register_adapters(engine, Path(path))
        one_model = num_blocks(NUM_CONTEXT + 3 + NUM_ANSWER - 1, BLOCK_SIZE)
        others = Others()
        for number, kind in in_turns([ALORA, LORA], num_rounds):
            records = run_chain(engine, kind, tuple(rng.integers(3, SPECIAL, NUM_CONTEXT).tolist()))
            if number >= 0:
                ttft[kind].append([one.ttft_s or 0.0 for one in records])
                pages[kind].append(sum(map(filled_pages, records)))
        busy_share = others.share()
        page_bytes = engine.parts.base.page.num_bytes
        engine.parts.close()
    later = {kind: [statistics.median(chain[1:]) for chain in chains] for kind, chains in ttft.items()}
    return {
        "machine": describe_machine(torch.device("cpu")),
        "busy_share": busy_share,
        "command": "python bench/alora.py",
        "ttft_s": ttft,
        "speedup": asdict(ratio_by_round(later[LORA], later[ALORA])),
        "page_bytes": page_bytes,
        "one_model_pages": one_model,
        "pages": pages,
        "kv_over_one_model": {kind: max(counts) / one_model for kind, counts in pages.items()},
    }


def goals(figures: dict[str, Any]) -> dict[str, bool]:
    """Return whether each goal was met, by its words."""
    return {
        f"from the second adapter on, a first token at least {LEAST_SPEEDUP:.0f} times as soon": (
            figures["speedup"]["low"] >= LEAST_SPEEDUP
        ),
        f"at most {MOST_KV} times the KV of one request": figures["kv_over_one_model"][ALORA] <= MOST_KV,
    }


def page(figures: dict[str, Any]) -> str:
    """Return the figures as a page."""
    rows = [
        (
            kind,
            *(f"{1e3 * statistics.median(chain[place] for chain in chains):.1f}" for place in range(NUM_ADAPTERS)),
            f"{max(figures['pages'][kind]) * figures['page_bytes'] / 1e6:.0f}",
            f"{figures['kv_over_one_model'][kind]:.2f}",
        )
        for kind, chains in figures["ttft_s"].items()
    ]
    places = ("first", "second", "third", "fourth", "fifth")
    lines = [
        "# Five adapters in a chain over one context: aLoRA beside LoRA",
        "",
        f"`{figures['command']}` on {figures['machine']}, other processes took {figures['busy_share']:.0%} of it. A "
        f"random model, adapters of rank {RANK} on all linears; a context of {NUM_CONTEXT:,} tokens, {NUM_ANSWER} of "
        f"each answer. Times to first token are medians of {len(figures['ttft_s'][LORA])} rounds, in turns.",
        "",
        *table(("time to first token, ms", *places, "KV, MB", "KV over one request's"), rows),
        "",
        f"From the second adapter on, LoRA's first token takes {Ratio(**figures['speedup'])} times as long (median and "
        "95 % interval). A request for aLoRA runs two steps before its first token: the tokens of the context behind "
        "its last full block as the base, then its own.",
        "",
        *(f"* {goal}: {'met' if is_met else 'NOT MET'}" for goal, is_met in goals(figures).items()),
    ]
    return "\n".join(lines)


def main() -> None:
    parser = arguments(__doc__, quick="a small model, one round")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    num_rounds = 1 if options.quick else options.rounds
    figures = measure(num_rounds, is_quick=options.quick)
    refused = reason_to_refuse(num_rounds, figures["busy_share"])
    publish("alora", figures, page(figures), is_kept=not options.quick, refused=refused)
    raise SystemExit(not all(goals(figures).values()) and not options.quick)


if __name__ == "__main__":
    main()
