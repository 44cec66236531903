"""A thousand updates of one adapter's name under rollouts: is anything lost, mixed or late, and does memory stay flat?

    python bench/updates.py [--quick] [--updates 1000] [--streams 64] [--replicas 3] [--mib 20] [--every 0.5]

As reinforcement learning does it: a trainer writes each version of an adapter to shared memory and publishes it
(`PUT /adapters/policy`), while streams sample from `policy` without pause. A small Llama on engines in processes of
their own behind one API; the trainer and the streams are this process. Every version has other weights. The base is
random and in float32: of a trained one, float32 alone leaves log-probabilities uncertain by more than the goal.

* *lost*: an answer without all its tokens, or with an error; a publication that was refused.
* *mixed*: an answer whose chunks state different versions. The log-probabilities of a sample of the answers, over all
  versions, are computed again by transformers and PEFT with the version that the answer states: one token of another
  version would differ by far more than 2e-5.
* *late*: from the sending of the publication to the first token of a request that follows its answer. Beside it the
  time to first token of the streams' requests, on versions that are there already.
* memory: resident bytes of the API and of the engines, and the files of versions, over the run. It is flat if the
  median of the last quarter is at most 2 % above that of the second.

The page says for each goal whether it was met, and the exit code is 1 if one was not. Writes `results/NAME.json` and
`.md`, by default `updates`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import torch
from numpy.typing import NDArray
from publishing import Others, arguments, publish, reason_if_busy, table

from manylora.demo import demo_model_path
from manylora.lab.bench.rounds import machine

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "attack"))
from attack_target import Target, running

NAME = "policy"
MIB = 2**20
MOST_DIFFERENCE = 2e-5
MOST_LATENCY_S = 0.1
MOST_GROWTH = 0.02
NUM_IN = 24
VOCABULARY = 100  # tokens that prompts are drawn from: the demo's tokenizer has a few more


class Trainer:
    """Makes the versions of an adapter on all linears: version *n* is the first one times a factor of its own.

    Args:
        mib: Size of a version's file, about.
        folder: Where the base is written, with the demo's tokenizer.
    """

    def __init__(self, mib: float, folder: Path) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        shape = json.loads((demo_model_path() / "config.json").read_text()) | {"dtype": "float32"}
        shutil.copytree(demo_model_path(), folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
        torch.manual_seed(0)
        self.base = LlamaForCausalLM(LlamaConfig(**shape | {"initializer_range": 0.05})).float().eval()
        self.base.save_pretrained(folder)
        linears = [
            (name, module)
            for name, module in self.base.named_modules()
            if isinstance(module, torch.nn.Linear) and name != "lm_head"
        ]
        per_rank = 4 * sum(module.in_features + module.out_features for _, module in linears)
        self.rank = max(1, round(mib * MIB / per_rank))
        self.targets = sorted({name.rpartition(".")[2] for name, _ in linears})
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "r": self.rank,
            "lora_alpha": self.rank,
            "bias": "none",
        }
        header: dict[str, Any] = {
            "__metadata__": {"adapter_config": json.dumps({**config, "target_modules": self.targets})}
        }
        self.shapes: dict[str, tuple[int, ...]] = {}
        end = 0
        for name, module in linears:
            for half, shape in (("A", (self.rank, module.in_features)), ("B", (module.out_features, self.rank))):
                key, size = f"base_model.model.{name}.lora_{half}.weight", 4 * shape[0] * shape[1]
                header[key] = {"dtype": "F32", "shape": shape, "data_offsets": (end, end + size)}
                self.shapes[key] = shape
                end += size
        text = json.dumps(header).encode()
        self._header = len(text).to_bytes(8, "little") + text
        self._weights = np.random.default_rng(0).standard_normal(end // 4, dtype=np.float32) * np.float32(0.02)
        self.num_bytes = len(self._header) + end

    def weights(self, number: int) -> NDArray[np.float32]:
        """Return all weights of a version, one behind the other."""
        return self._weights * np.float32(random.Random(number).uniform(0.5, 1.5))

    def write(self, number: int, path: Path) -> None:
        """Write a version's file."""
        with open(path, "wb") as file:
            file.write(self._header)
            file.write(self.weights(number).data)

    def differences(self, answers: Sequence[Rollout]) -> dict[int, float]:
        """Return the largest difference of a log-probability from PEFT's for each version among some answers."""
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(
            self.base, LoraConfig(r=self.rank, lora_alpha=self.rank, target_modules=self.targets, task_type="CAUSAL_LM")
        ).eval()
        parameters = {name.replace(".default", ""): one for name, one in model.named_parameters() if "lora_" in name}
        assert parameters.keys() == self.shapes.keys()
        found: dict[int, float] = {}
        for number in sorted({one.number for one in answers}):
            weights, end = self.weights(number), 0
            with torch.no_grad():
                for key, shape in self.shapes.items():
                    size = shape[0] * shape[1]
                    parameters[key].copy_(torch.from_numpy(weights[end : end + size].reshape(shape)))
                    end += size
                for one in (one for one in answers if one.number == number):
                    logits = model(torch.tensor([[*one.prompt, *one.tokens]])).logits[0, len(one.prompt) - 1 : -1]
                    expected = logits.log_softmax(-1)[range(len(one.tokens)), one.tokens]
                    difference = (expected - torch.tensor(one.logprobs)).abs().max().item()
                    found[number] = max(found.get(number, 0.0), difference)
        return found


@dataclass
class Rollout:
    """An answer: its version, tokens and their log-probabilities."""

    prompt: list[int]
    labels: set[str] = field(default_factory=set)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    sent_at: float = field(default_factory=time.perf_counter)
    first_at: float = 0.0

    @property
    def number(self) -> int:
        """The version's number; the answer states exactly one."""
        (label,) = self.labels
        return int(label.rpartition("@")[2])


@dataclass
class Run:
    """One run: its server, and what came of it.

    Args:
        sample: Answers that are computed again, drawn uniformly from all.
        samples: Resident bytes of the API and the engines, and bytes of versions' files, every second.
        reads_s, first_tokens_s: From the sending of a publication to its answer, and to the first token after it.
        others_s: From the sending of each streams' request to its first token.
    """

    target: Target
    options: argparse.Namespace
    rng: random.Random = field(default_factory=lambda: random.Random(1))
    outcomes: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    sample: list[Rollout] = field(default_factory=list)
    samples: list[tuple[int, int, int]] = field(default_factory=list)
    reads_s: list[float] = field(default_factory=list)
    first_tokens_s: list[float] = field(default_factory=list)
    others_s: list[float] = field(default_factory=list)
    is_over: bool = False

    @property
    def url(self) -> str:
        return f"http://{self.target.host}:{self.target.port}"

    def note(self, answer: Rollout, num_tokens: int) -> None:
        """Count an answer, and keep it with the probability that makes the sample uniform."""
        if len(answer.tokens) != num_tokens or len(answer.logprobs) != num_tokens:
            self.outcomes["lost"] += 1
        elif len(answer.labels) != 1:
            self.outcomes["mixed"] += 1
        else:
            self.outcomes["whole"] += 1
            if len(self.sample) < self.options.check:
                self.sample.append(answer)
            elif (place := self.rng.randrange(self.outcomes["whole"])) < self.options.check:
                self.sample[place] = answer

    def fault(self, text: str) -> None:
        self.outcomes["lost"] += 1
        if len(self.faults) < 20:
            self.faults.append(text)


async def ask(run: Run, session: aiohttp.ClientSession, model: str, num_tokens: int) -> Rollout | None:
    """Sample one answer; ``None`` after a fault."""
    answer = Rollout([run.rng.randrange(3, VOCABULARY) for _ in range(NUM_IN)])
    body = {"model": model, "prompt": answer.prompt, "max_tokens": num_tokens, "stream": True, "ignore_eos": True}
    try:
        async with session.post(
            f"{run.url}/v1/completions", json={**body, "logprobs": 0, "return_token_ids": True}
        ) as response:
            if response.status != 200:
                run.fault(f"{response.status}: {(await response.text())[:200]}")
                return None
            answer.labels.add(response.headers["x-adapter-version"])
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    run.fault(str(chunk["error"])[:200])
                    return None
                answer.first_at = answer.first_at or time.perf_counter()
                answer.labels.add(chunk["adapter_version"])
                choice = chunk["choices"][0]
                answer.tokens += choice["token_ids"]
                answer.logprobs += choice["logprobs"]["token_logprobs"]
    except (aiohttp.ClientError, TimeoutError) as error:
        run.fault(repr(error)[:200])
        return None
    run.note(answer, num_tokens)
    return answer


async def roll(run: Run, session: aiohttp.ClientSession) -> None:
    """Stream one answer after another."""
    while not run.is_over:
        answer = await ask(run, session, NAME, run.options.tokens)
        if answer is not None:
            run.others_s.append(answer.first_at - answer.sent_at)


async def update(run: Run, session: aiohttp.ClientSession, trainer: Trainer, number: int) -> None:
    """Publish a version, and measure the time to the first token of a request that follows."""
    path = Path("/dev/shm") / f"{shared_prefix()}{number}"
    await asyncio.to_thread(trainer.write, number, path)
    try:
        began = time.perf_counter()
        body = {"shm": path.name, "version": number, "preload": run.options.preload, "move": run.options.move}
        async with session.put(f"{run.url}/adapters/{NAME}", json=body) as response:
            if response.status != 200:
                run.fault(f"publication: {response.status}: {(await response.text())[:200]}")
                return
            answered = time.perf_counter()
    finally:
        path.unlink(missing_ok=True)
    answer = await ask(run, session, NAME, 2)
    if answer is not None and answer.labels != {f"{NAME}@{number}"}:
        run.fault(f"a request after version {number} was answered by {answer.labels}")
    elif answer is not None:
        run.reads_s.append(answered - began)
        run.first_tokens_s.append(answer.first_at - began)


async def watch(run: Run) -> None:
    """Note the memory every second."""
    while not run.is_over:
        memory = await asyncio.to_thread(run.target.memory)
        spool = next(Path("/dev/shm").glob("manylora-published-*"), None)
        files = sum(one.stat().st_size for one in spool.rglob("*.safetensors")) if spool is not None else 0
        run.samples.append((memory["api"], memory["engine"], files))
        await asyncio.sleep(1.0)


async def measure(run: Run, trainer: Trainer) -> None:
    """Publish all versions under the streams."""
    options = run.options
    timeout = aiohttp.ClientTimeout(total=None, sock_read=120.0)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        await update(run, session, trainer, 1)
        beside = [asyncio.create_task(roll(run, session)) for _ in range(options.streams)]
        watching = asyncio.create_task(watch(run))
        for number in range(2, options.updates + 1):
            next_at = time.perf_counter() + options.every
            await update(run, session, trainer, number)
            await asyncio.sleep(max(0.0, next_at - time.perf_counter()))
        run.is_over = True
        await asyncio.gather(*beside, watching)
        await asyncio.sleep(0.5)
        async with session.get(f"{run.url}/adapters/{NAME}/versions") as response:
            kept = [one["version"] for one in (await response.json())["data"]]
        if len(kept) > 2:
            run.faults.append(f"versions that are not freed: {kept}")


def shared_prefix() -> str:
    """Return the begin of the names of this process's files in shared memory."""
    return f"manylora-bench-{os.getpid()}-"


def percentile_ms(seconds: Sequence[float], share: float) -> float:
    return 1e3 * float(np.percentile(seconds, share)) if seconds else float("nan")


def growth(values: Sequence[int]) -> float:
    """Return by how much the last quarter of a run lies above its second, as a share."""
    quarter = len(values) // 4
    if quarter == 0:
        return 0.0
    before = statistics.median(values[quarter : 2 * quarter])
    return statistics.median(values[-quarter:]) / before - 1.0 if before else 0.0


def summary(run: Run, trainer: Trainer, differences: dict[int, float], busy_share: float) -> tuple[dict[str, Any], str]:
    """Return the figures and the page."""
    options = run.options
    columns = {name: [row[place] for row in run.samples] for place, name in enumerate(("API", "engines", "files"))}
    worst = max(differences.values(), default=float("inf"))
    p99_ms = percentile_ms(run.first_tokens_s, 99)
    goals = {
        "nothing lost": run.outcomes["lost"] == 0 and not run.faults,
        "no answer states two versions": run.outcomes["mixed"] == 0,
        f"log-probabilities within {MOST_DIFFERENCE:g} of PEFT's with the version stated": worst <= MOST_DIFFERENCE,
        f"publication to first token at P99 within {1e3 * MOST_LATENCY_S:g} ms": p99_ms <= 1e3 * MOST_LATENCY_S,
        "memory flat": all(growth(values) <= MOST_GROWTH for values in columns.values()),
    }
    times = [
        (name, *(f"{percentile_ms(seconds, share):.1f}" for share in (50, 90, 99, 100)))
        for name, seconds in (
            ("publication to its answer", run.reads_s),
            ("publication to the first token after it", run.first_tokens_s),
            ("request of a stream to its first token", run.others_s),
        )
    ]
    rows = [
        (name, f"{max(values) / MIB:,.0f}", f"{values[-1] / MIB:,.0f}", f"{growth(values):+.1%}")
        for name, values in columns.items()
        if values
    ]
    lines = [
        "# Updates of one adapter under rollouts",
        "",
        f"`{run.options.command}` on {machine()}: {options.updates} versions of {trainer.num_bytes / MIB:.1f} MiB "
        f"(rank {trainer.rank}, float32, all linears of a base of the demo's shape) from shared memory, "
        f"at most one every {options.every:g} s; {options.streams} streams of {options.tokens} tokens, "
        f"{options.replicas} engines; {run.outcomes['whole']} whole answers.",
        "",
        *table(("ms from the sending of a", "P50", "P90", "P99", "longest"), times),
        "",
        *table(("MiB", "most", "at the end", "last quarter over the second"), rows),
        "",
        f"{len(run.sample)} answers of {len(differences)} versions, computed again: largest difference of a "
        f"log-probability {worst:.2g}. Other processes took {busy_share:.0%} of the machine.",
        "",
        *table(("goal", "met"), [(goal, "yes" if met else "**no**") for goal, met in goals.items()]),
        "",
        *(f"* {fault}" for fault in run.faults),
    ]
    figures = {
        "command": options.command,
        "machine": machine(),
        "outcomes": run.outcomes,
        "reads_s": run.reads_s,
        "first_tokens_s": run.first_tokens_s,
        "others_s": run.others_s,
        "memory": columns,
        "largest_difference": worst,
        "busy_share": busy_share,
        "goals": goals,
        "faults": run.faults,
    }
    return figures, "\n".join(lines)


def wait_for_all(target: Target) -> None:
    """Wait until every engine serves: those that still start take the processor."""
    while {one["state"] for one in json.loads(target.ask("GET", "/status").body)["replicas"]} != {"serving"}:
        time.sleep(0.1)


def run_updates(options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """Run a server under updates; return the figures and the page."""
    with tempfile.TemporaryDirectory(prefix="manylora-") as name:
        base = Path(name) / "base"
        trainer = Trainer(options.mib, base)
        limits = ["--replicas", str(options.replicas), "--publish", "--publish-shm", shared_prefix()]
        limits += ["--memory", options.memory, "--max-model-len", "256"]
        with running(Path(name), *limits, model=(str(base),)) as target:
            wait_for_all(target)
            run, others = Run(target, options), Others()
            asyncio.run(measure(run, trainer))
            busy_share = others.share()
    return summary(run, trainer, trainer.differences(run.sample), busy_share)


def parse(arguments_given: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options."""
    parser = arguments(__doc__, quick="five updates under eight streams")
    parser.add_argument("--updates", type=int, default=1000)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--mib", type=float, default=20.0, help="size of a version")
    parser.add_argument("--every", type=float, default=0.5, help="least seconds between two updates")
    parser.add_argument("--tokens", type=int, default=48, help="of an answer")
    parser.add_argument("--check", type=int, default=200, help="answers that are computed again")
    parser.add_argument("--memory", default="1GiB", help="of an engine, for KV and adapters")
    parser.add_argument("--preload", action="store_true", help="copy a version to all devices before its name moves")
    parser.add_argument("--move", action="store_true", help="give each file to the server, which copies none")
    parser.add_argument("--name", default="updates", help="of the files of results")
    options = parser.parse_args(arguments_given)
    if options.quick:
        options.updates, options.streams, options.replicas, options.mib, options.check = 5, 8, 2, 1.0, 40
        options.every, options.memory = 0.2, "128MiB"
    given = sys.argv[1:] if arguments_given is None else arguments_given
    options.command = " ".join(["python bench/updates.py", *given])
    return options


def main() -> None:
    options = parse()
    figures, text = run_updates(options)
    publish(options.name, figures, text, is_kept=not options.quick, refused=reason_if_busy(figures["busy_share"]))
    sys.exit(0 if all(figures["goals"].values()) else 1)


if __name__ == "__main__":
    main()
