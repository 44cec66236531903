"""Tokens per second of a whole engine against transformers `generate`, with and without adapters.

    python bench/throughput.py [--quick]

An 82M-parameter Llama with random weights in fp32 on the CPU, 32 requests of 128 tokens in and 64 out, greedy.
*base*: no adapter, against `generate`. *mixed*: 32 adapters of rank 8 to 128 on all linears, one per request,
against `generate` of PEFT with `adapter_names`. The systems take turns in one process; medians of the rounds.
Ours is the whole path: engine core, loop, scheduler, sampler, executor. Adapters are in host memory and loaded
to device pages inside the first round. Writes `bench/results/throughput.json` and `.md`.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import platform
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from manylora.clock import WallClock
from manylora.config import AdapterConfig, EngineConfig, MemoryConfig, ModelConfig, SchedulerConfig
from manylora.engine.core import EngineCore
from manylora.engine.loop import EngineLoop
from manylora.execution.build import build_parts
from manylora.types import Output, Request, SamplingParams

RESULTS = Path(__file__).resolve().parent / "results"
RANKS = (8, 16, 32, 64, 128)
VOCAB = 7296


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="8 requests, one round, nothing written")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only-ours", action="store_true", help="for profiling; nothing written")
    options = parser.parse_args()
    num_requests, rounds = (8, 1) if options.quick else (32, options.rounds)
    num_in, num_out = 128, 64
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(3, VOCAB, (num_requests, num_in), generator=generator)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        num_parameters = make_model(path / "base")
        adapters = make_adapters(path, num_requests)
        systems: dict[str, Callable[[], float]] = {}
        ours = Ours(path / "base", adapters, prompts, num_out)
        systems["base ours"] = lambda: ours.run(mixed=False)
        systems["mixed ours"] = lambda: ours.run(mixed=True)
        if not options.only_ours:
            theirs = Theirs(path / "base", adapters, prompts, num_out)
            systems["base transformers"] = theirs.run_base
            systems["mixed PEFT"] = theirs.run_mixed
        seconds: dict[str, list[float]] = {name: [] for name in systems}
        for round_number in range(-1, rounds):  # one round to warm up
            for name, run in systems.items():
                took = run()
                print(f"round {round_number:2} {name:18} {num_requests * num_out / took:7.1f} tok/s", flush=True)
                if round_number >= 0:
                    seconds[name].append(took)
        ours.close()
    if options.quick or options.only_ours:
        return
    rates = {name: num_requests * num_out / statistics.median(times) for name, times in seconds.items()}
    report = {
        "machine": {
            "cpu": cpu_name(),
            "cores": torch.get_num_threads(),
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "command": "python bench/throughput.py",
        "parameters": num_parameters,
        "requests": num_requests,
        "tokens_in": num_in,
        "tokens_out": num_out,
        "ranks": RANKS,
        "tokens_per_s": rates,
        "seconds": seconds,
        "load_average": os.getloadavg()[1],
        "base_over_transformers": rates["base ours"] / rates["base transformers"],
        "mixed_over_peft": rates["mixed ours"] / rates["mixed PEFT"],
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "throughput.json").write_text(json.dumps(report, indent=2) + "\n")
    (RESULTS / "throughput.md").write_text(table(report, rates))
    print(table(report, rates))


def make_model(path: Path) -> int:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=10,
        num_attention_heads=12,
        num_key_value_heads=12,
        max_position_embeddings=2048,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    with quiet():
        model = LlamaForCausalLM(config)
        model.save_pretrained(path)
    return sum(parameter.numel() for parameter in model.parameters())


def make_adapters(path: Path, count: int) -> list[Path]:
    folders = []
    for index in range(count):
        torch.manual_seed(1 + index)
        rank = RANKS[index % len(RANKS)]
        config = LoraConfig(r=rank, lora_alpha=rank, target_modules="all-linear", init_lora_weights=False)
        with quiet():
            model = get_peft_model(LlamaForCausalLM.from_pretrained(path / "base"), config)
            model.save_pretrained(path / f"adapter-{index}")
        folders.append(path / f"adapter-{index}")
    return folders


class Ours:
    """The engine; every run is a fresh core over the same executor, so that no prefix is remembered."""

    def __init__(self, model: Path, adapters: list[Path], prompts: torch.Tensor, num_out: int) -> None:
        self.clock = WallClock()
        self.config = EngineConfig(
            model=ModelConfig(model=str(model), device="cpu"),
            memory=MemoryConfig(memory_bytes=3 * 1024**3, prefix_caching=False),
            scheduler=SchedulerConfig(max_num_seqs=64),
            adapters=AdapterConfig(),
        )
        self.parts = build_parts(self.config, self.clock)
        self.versions = [self.parts.reader.read(folder.name, str(folder)) for folder in adapters]
        self.prompts = [tuple(prompt) for prompt in prompts.tolist()]
        self.num_out = num_out
        self.core = EngineCore(
            base=self.parts.base,
            num_pages=self.parts.num_pages,
            executor=self.parts.executor,
            scheduler=self.config.scheduler,
            memory=self.config.memory,
            adapters=self.config.adapters,
            served_name="base",
        )
        for index, version in enumerate(self.versions):
            self.core.adapters.register(f"adapter-{index}", version, self.clock.now())

    def run(self, *, mixed: bool) -> float:
        greedy = SamplingParams(temperature=0.0, max_tokens=self.num_out, ignore_eos=True)
        start = self.clock.now()
        arrivals = [
            (
                start,
                Request(
                    request_id=f"{start}-{index}",
                    prompt=prompt,
                    sampling=greedy,
                    model=f"adapter-{index}" if mixed else "base",
                ),
            )
            for index, prompt in enumerate(self.prompts)
        ]
        num_tokens = 0

        def take(outputs: list[Output], now: float) -> None:
            nonlocal num_tokens
            num_tokens += sum(len(output.tokens) for output in outputs)

        EngineLoop(self.core, self.clock, on_outputs=take, arrivals=arrivals).run()
        assert num_tokens == len(self.prompts) * self.num_out
        return self.clock.now() - start

    def close(self) -> None:
        self.parts.close()


class Theirs:
    """transformers, and PEFT with one adapter name per row."""

    def __init__(self, model: Path, adapters: list[Path], prompts: torch.Tensor, num_out: int) -> None:
        self.prompts = prompts
        self.options = {
            "max_new_tokens": num_out,
            "min_new_tokens": num_out,
            "do_sample": False,
            "attention_mask": torch.ones_like(prompts),
        }
        with quiet():
            self.base = AutoModelForCausalLM.from_pretrained(model).eval()
            base = AutoModelForCausalLM.from_pretrained(model)
            self.peft = PeftModel.from_pretrained(base, adapters[0], adapter_name=adapters[0].name)
            for folder in adapters[1:]:
                self.peft.load_adapter(folder, adapter_name=folder.name)
            self.peft.eval()
        self.names = [folder.name for folder in adapters]

    def run_base(self) -> float:
        start = time.perf_counter()
        with torch.inference_mode():
            self.base.generate(self.prompts, **self.options)
        return time.perf_counter() - start

    def run_mixed(self) -> float:
        start = time.perf_counter()
        with torch.inference_mode():
            self.peft.generate(input_ids=self.prompts, adapter_names=self.names, **self.options)
        return time.perf_counter() - start


def table(report: dict[str, object], rates: dict[str, float]) -> str:
    machine = report["machine"]
    assert isinstance(machine, dict)
    return "\n".join(
        [
            "# Throughput on the CPU",
            "",
            f"`{report['command']}` on {machine['cpu']}, {machine['cores']} cores, torch {machine['torch']}: an",
            f"{report['parameters'] / 1e6:.0f}M-parameter Llama in fp32, {report['requests']} requests, "  # type: ignore[operator]
            f"{report['tokens_in']} tokens in, {report['tokens_out']} out, greedy;",
            f"*mixed*: {report['requests']} adapters of rank {RANKS[0]}-{RANKS[-1]} on all linears, one per request.",
            "Generated tokens per second, prompts included in the time, medians. At the end the load average",
            f"of the machine was {report['load_average']:.1f}: where that is above its cores, it had other work too.",
            "",
            "| | no adapter | mixed adapters |",
            "|---|---|---|",
            "| transformers `generate` (+ PEFT `adapter_names`) | "
            f"{rates['base transformers']:.0f} | {rates['mixed PEFT']:.0f} |",
            f"| manylora | {rates['base ours']:.0f} | {rates['mixed ours']:.0f} |",
            f"| ratio | {report['base_over_transformers']:.2f} | {report['mixed_over_peft']:.2f} |",
            "",
        ]
    )


def cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


if __name__ == "__main__":
    main()
