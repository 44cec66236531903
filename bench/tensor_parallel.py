"""Several workers share a model: right, divided, at the stated price, and lost without a wrong token?

    python bench/tensor_parallel.py [--quick]

* *Right*: the oracle of `tests/parity` (random models of eleven families; twelve adapters; sixteen requests, mixed, in
  chunks, pre-empted, over cached prefixes) over two and four workers, each a thread with its part: logits and greedy
  tokens against transformers and PEFT.
* *Divided*: bytes of the base, of an adapter on all linears and of a page on each worker, against one worker alone.
* *Price*: calls and bytes of collectives in a step of the same model, counted, the base's and those of adapters.
* *Lost*: the demo model as worker processes behind HTTP. Workers in turn are killed, and stopped, while 50 streams run.
  Every stream must end with the text of an undisturbed run, and no process may be left.

Writes `results/tensor_parallel.json` and `.md`.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from publishing import Steps, arguments, publish, table
from transformers import LlamaConfig, LlamaForCausalLM

from manylora.core.clock import WallClock
from manylora.core.config import EngineConfig, MemoryConfig, ModelConfig, ServerConfig
from manylora.core.plan import PlannedSequence, StepPlan
from manylora.core.ports import EngineParts
from manylora.core.types import SamplingParams, Tier
from manylora.demo import demo_adapters
from manylora.execution.build import build_parts
from manylora.lab.bench.rounds import machine
from manylora.lab.bench.sweep import write_synthetic_adapter
from manylora.serving.server import BackgroundServer, LoraModule

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))

from disturbed import answers, leave_alone, replicas_of
from live_executor import finish, load
from parity_cases import ARCHITECTURES, FURTHER_ARCHITECTURES, run_oracle
from shared_model import build_shared, build_workers, join

FAMILIES = [*ARCHITECTURES, *(name for name in FURTHER_ARCHITECTURES if name != "gptj")]
SIZES = (2, 4)
LOST = {2: (0, 1)}
"""Workers that are killed and stopped, by their number in all: the demo model's six heads are no multiple of four."""

NUM_STREAMS = 50
NUM_TOKENS, ROWS, RANK = 60, 64, 16
SHAPE = LlamaConfig(
    vocab_size=4096,
    hidden_size=512,
    intermediate_size=1408,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    max_position_embeddings=512,
)


def measure_right(sizes: Sequence[int], families: Sequence[str], steps: Steps) -> list[dict[str, Any]]:
    rows = []
    for size in sizes:
        for family in families:
            with tempfile.TemporaryDirectory() as folder:
                result = run_oracle(family, Path(folder), build=partial(build_shared, size=size))
            assert result.num_preemptions and result.num_chunked_prompts and result.num_mixed_steps
            rows.append(
                {
                    "family": family,
                    "workers": size,
                    "rows": result.num_rows,
                    "error": result.max_error,
                    "spread": result.logit_std,
                    "wrong_tokens": result.num_wrong_tokens,
                    "preemptions": result.num_preemptions,
                    "chunked": result.num_chunked_prompts,
                }
            )
            steps.done(f"{family} over {size}")
    return rows


# -- memory and collectives -------------------------------------------------------------------------------------------


def measure_divided(folder: Path) -> list[dict[str, Any]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        LlamaForCausalLM(SHAPE).save_pretrained(folder / "base")
    config = EngineConfig(
        model=ModelConfig(model=str(folder / "base"), device="cpu"),
        memory=MemoryConfig(block_size=16, num_pages=600),
    )
    clock = WallClock()
    alone = build_parts(config, clock)
    write_synthetic_adapter(folder / "adapter", alone.base, RANK, np.random.default_rng(1))
    rows = [{"workers": 1, **_sizes(alone, folder)}]
    alone.close()
    for size in SIZES:
        workers, groups = build_workers(config, clock, size)
        shared = join(workers, clock)
        sizes = _sizes(shared, folder)
        version = shared.reader.read("adapter", str(folder / "adapter"))
        pages = tuple(range(300, 300 + version.num_pages))
        assert load(shared, version, Tier.DEVICE, pages) is None
        counted = {}
        for name, key in (("base", None), ("adapters", version.key)):
            for group in groups:
                group.calls.clear()
                group.num_bytes.clear()
            finish(shared.executor.launch(StepPlan(step_id=1, sequences=_decode(key)), 0.0))
            counted[name] = [(dict(group.calls), dict(group.num_bytes)) for group in groups]
        shared.close()
        assert all(one == counted["adapters"][0] for one in counted["adapters"])
        calls, num_bytes = counted["adapters"][0]
        assert counted["base"][0] == ({"base": calls["base"]}, {"base": num_bytes["base"]})
        rows.append({"workers": size, **sizes, "calls": calls, "bytes": num_bytes})
    return rows


def _sizes(parts: EngineParts, folder: Path) -> dict[str, Any]:
    weights: Any = parts.executor.runner.model.base_weights  # type: ignore[attr-defined]
    whole = sum(entry.num_bytes for entry in weights.manifest.entries if any("norm" in name for name in entry.names))
    version = parts.reader.read("adapter", str(folder / "adapter"))
    return {
        "base_bytes": weights.manifest.num_bytes - whole,
        "undivided_bytes": whole,
        "adapter_bytes": version.weight_bytes,
        "page_bytes": parts.base.page.num_bytes,
    }


def _decode(key: Any) -> tuple[PlannedSequence, ...]:
    return tuple(
        PlannedSequence(
            seq_id=row,
            tokens=[3 + row],
            num_prompt_tokens=1,
            start=0,
            num_tokens=1,
            pages=[row],
            adapter=key,
            rank=RANK if key else 0,
            sampling=SamplingParams(temperature=0.0),
            is_sampled=True,
            seed=0,
        )
        for row in range(ROWS)
    )


# -- lost workers -----------------------------------------------------------------------------------------------------


def workers_of(pid: int) -> list[int]:
    return [one.pid for one in psutil.Process(pid).children() if "worker_process" in " ".join(one.cmdline())]


def measure_lost(
    size: int, steps: Steps, kinds: Sequence[signal.Signals], ranks: Sequence[int]
) -> list[dict[str, Any]]:
    model = ModelConfig(model="demo", tensor_parallel_size=size)
    engine = EngineConfig(model=model, memory=MemoryConfig(num_pages=2000, kv_cache_dtype="float32"))
    modules = [LoraModule(name, str(path)) for name, path in list(demo_adapters().items())[:4]]
    models = ["demo", *(module.name for module in modules)]
    bodies = [
        {
            "model": models[index % len(models)],
            "prompt": f"the {index} birds",
            "max_tokens": NUM_TOKENS,
            "ignore_eos": True,
            **({"temperature": 0.0} if index % 2 else {"temperature": 0.9, "seed": index}),
        }
        for index in range(NUM_STREAMS)
    ]
    rows = []
    with BackgroundServer(engine, ServerConfig(port=0, hang_timeout_s=60.0), modules) as server:
        calm = asyncio.run(answers(server.url, bodies, leave_alone))
        for rank in ranks:
            for kind in kinds:
                pid = replicas_of(server)[0]["pid"]
                group = [pid, *workers_of(pid)]
                struck_at = 0.0

                async def strike(begun: Sequence[asyncio.Event], victim: int = group[rank], kind: Any = kind) -> None:
                    nonlocal struck_at
                    await asyncio.gather(*(one.wait() for one in begun))
                    struck_at = time.monotonic()
                    os.kill(victim, kind)

                texts = asyncio.run(answers(server.url, bodies, strike))
                rows.append(
                    {
                        "workers": size,
                        "rank": rank,
                        "signal": kind.name,
                        "streams": len(texts),
                        "same": sum(one == other for one, other in zip(texts, calm, strict=True)),
                        "all_ended_after_s": time.monotonic() - struck_at,
                        "processes_left": sum(psutil.pid_exists(one) for one in group),
                    }
                )
                steps.done(f"{kind.name} of worker {rank} of {size}")
    return rows


# -- the page ---------------------------------------------------------------------------------------------------------


def page(figures: dict[str, Any]) -> str:
    sizes, about = figures["divided"], figures["machine"]
    whole = sizes[0]
    lines = [
        "# One model over several workers",
        "",
        f"`python bench/tensor_parallel.py` on {about['cores']} cores of {about['cpu']}; "
        "gloo over the loopback interface.",
        "",
        "## Right",
        "",
        "Largest error of a logit against transformers and PEFT, each sequence alone, and greedy tokens that differ; "
        "logits spread by about 1. Mixed adapters, prompts in chunks, pre-emption, cached prefixes.",
        "",
        *table(
            ["family", *(head for size in SIZES for head in (f"error, {size} workers", "wrong tokens"))],
            [
                [
                    family,
                    *(
                        cell
                        for size in SIZES
                        for one in figures["right"]
                        if (one["family"], one["workers"]) == (family, size)
                        for cell in (f"{one['error']:.1e}", f"{one['wrong_tokens']} of {one['rows']:,}")
                    ),
                ]
                for family in dict.fromkeys(one["family"] for one in figures["right"])
            ],
        ),
        "",
        "## Divided",
        "",
        f"A Llama of 4 layers, hidden size 512, 4 heads of keys, float32; an adapter of rank {RANK} on all linears. "
        "Bytes of one worker, and in brackets N times these over those of one worker alone. Norms are on every worker.",
        "",
        *table(
            ["workers", "base without norms", "norms", "adapter", "page"],
            [
                [
                    one["workers"],
                    *(
                        f"{one[key]:,} ({one[key] * one['workers'] / whole[key]:.3f})"
                        for key in ("base_bytes", "undivided_bytes", "adapter_bytes", "page_bytes")
                    ),
                ]
                for one in sizes
            ],
        ),
        "",
        "## Price",
        "",
        f"Collectives in a step of that model that decodes {ROWS} tokens, all with that adapter; bytes of the tensors "
        "of one worker. The base's are the embedding, two sums for each layer, and the logits; an adapter's are of "
        "`x A^T`.",
        "",
        *table(
            ["workers", "base: calls", "bytes", "adapters: calls", "bytes", "bytes over the base's"],
            [
                [
                    one["workers"],
                    one["calls"]["base"],
                    f"{one['bytes']['base']:,}",
                    one["calls"]["lora"],
                    f"{one['bytes']['lora']:,}",
                    f"{one['bytes']['lora'] / one['bytes']['base']:.3f}",
                ]
                for one in sizes[1:]
            ],
        ),
        "",
        "## Lost",
        "",
        f"{NUM_STREAMS} streams of {NUM_TOKENS} tokens of the demo model, greedy and seeded, over four adapters and "
        "the base; one engine, so they wait for its restart. Worker 0 is the engine's process.",
        "",
        *table(
            ["workers", "worker", "signal", "streams", "same text", "all ended after, s", "processes left"],
            [
                [
                    one["workers"],
                    one["rank"],
                    one["signal"],
                    one["streams"],
                    one["same"],
                    f"{one['all_ended_after_s']:.0f}",
                    one["processes_left"],
                ]
                for one in figures["lost"]
            ],
            left=0,
        ),
    ]
    return "\n".join(lines)


def main() -> None:
    args = arguments(__doc__, quick="two families, two workers, one fault").parse_args()
    families, sizes = (FAMILIES[:2], SIZES[:1]) if args.quick else (FAMILIES, SIZES)
    kinds = [signal.SIGKILL] if args.quick else [signal.SIGKILL, signal.SIGSTOP]
    steps = Steps(len(families) * len(sizes) + (1 if args.quick else 4))
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        divided = measure_divided(Path(folder))
    figures: dict[str, Any] = {"machine": machine(), "divided": divided}
    figures["lost"] = [
        row
        for size, ranks in ({2: (1,)} if args.quick else LOST).items()
        for row in measure_lost(size, steps, kinds, ranks)
    ]
    figures["right"] = measure_right(sizes, families, steps)
    assert all(row["error"] <= 1e-4 and row["wrong_tokens"] == 0 for row in figures["right"])
    assert all(row["same"] == row["streams"] and not row["processes_left"] for row in figures["lost"])
    publish("tensor_parallel", figures, page(figures), is_kept=not args.quick)


if __name__ == "__main__":
    main()
