"""Isolated functions on one sealed base: their memory, their steps, their starts, and attacks from inside one.

    python bench/functions_live.py [--quick] [--functions 16] [--rounds 20] [--only memory,steps,starts,attacks]

A random Llama of about 300 MB in float32 and adapters of rank 8, on the CPU. A backbone process holds the base, a
zygote forks the functions; *plain* is an engine process that loads the base itself. Every engine has one adapter.

* *memory*: proportional set sizes of all processes, after each engine has answered a request;
* *steps*: seconds per token of four requests at once, a function and a plain engine in turns;
* *starts*: from nothing to the first token: a *cold* engine process; a *mapping* one, spawned, that maps the base; a
  function from the *zygote*; and an engine that is *up* and lacks the adapter. The stages are the function's own;
* *attacks*: the attempts of `tests/support/isolation_attacks.py` inside a function while another one serves: of a
  server that is root, with a user of its own and without (one that is root and stays root can become root, and nothing
  else), and of a server of an ordinary user. The other function answers afterwards, over the same base.

Writes `results/functions_live.json` and `.md`. As root, which alone can give each function a user of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from cpu_systems import make_adapters, make_model
from functions_rig import in_folder
from publishing import RESULTS, Others, arguments, publish, reason_to_refuse, table
from ratios import ratio_by_round

from manylora.core.config import AdapterConfig, EngineConfig, MemoryConfig, ModelConfig
from manylora.core.errors import ConfigError
from manylora.core.types import Output, Request, SamplingParams
from manylora.functions.processes.backbone import fetch_backbone
from manylora.functions.processes.link import FunctionLink
from manylora.functions.processes.messages import Backbone, FunctionPlace
from manylora.functions.processes.zygote import Zygote
from manylora.lab.bench.rounds import in_turns, machine
from manylora.serving.hosting.engine.startup import TORCH_BUILDER
from manylora.serving.hosting.fleet.adapter_book import LoraModule
from manylora.serving.hosting.fleet.fleet import Fleet
from manylora.serving.hosting.links.base_share import BaseShare
from manylora.serving.hosting.links.link import EngineLink
from manylora.serving.hosting.links.process import ProcessLink
from manylora.serving.hosting.protocol import EngineSpec

PARTS = ("memory", "steps", "starts", "attacks")
ATTACKS = Path(__file__).resolve().parents[1] / "tests" / "support"
FIRST_UID = 1_000_000
NOBODY = 65534
NUM_FUNCTIONS = 16
MIB = 2**20
POOL_BYTES = 32 * MIB
NUM_PROMPT = 32
GOAL_MIB = 60


class Rig:
    """A model, its backbone, and ways to host engines over it."""

    def __init__(self, backbone: Backbone, zygote: Zygote, adapters: Sequence[Path]) -> None:
        self.backbone = backbone
        self.zygote = zygote
        self.modules = [LoraModule(f"function-{index}", str(path)) for index, path in enumerate(adapters)]
        config = EngineConfig(
            model=backbone.model,
            memory=MemoryConfig(memory_bytes=POOL_BYTES),
            adapters=AdapterConfig(host_bytes=POOL_BYTES, keep_host_copies=False),  # as of functions of a node
        )
        self.spec = EngineSpec(config=config, served_name="base", builder=TORCH_BUILDER, num_threads=os.cpu_count())
        self.links: list[FunctionLink] = []

    def function(self, index: int) -> EngineLink:
        """Return the link to a function, with a user of its own where this process is root."""
        uid = FIRST_UID + index if os.geteuid() == 0 else None
        place = FunctionPlace(readable=[self.modules[index].path], uid=uid)
        self.links.append(FunctionLink(self.spec, self.zygote, place))
        return self.links[-1]

    def cold(self, index: int) -> EngineLink:
        """Return the link to an engine process that loads the base."""
        return ProcessLink(self.spec, BaseShare())

    def mapping(self, index: int) -> EngineLink:
        """Return the link to an engine process that maps the base."""
        share = BaseShare()
        share.give(self.backbone.base, os.getpid())
        return ProcessLink(self.spec, share)


@contextlib.asynccontextmanager
async def running(make: Callable[[int], EngineLink], index: int, *modules: LoraModule) -> AsyncIterator[Fleet]:
    """Run an engine with adapters."""
    fleet = Fleet([lambda: make(index)], served_name="base", observe=lambda observed: None)
    try:
        await fleet.start(modules)
        yield fleet
    finally:
        await fleet.stop()


async def ask(fleet: Fleet, model: str, num_tokens: int, num_requests: int = 1) -> tuple[float, float]:
    """Answer requests; return monotonic times of the first and the last output."""
    sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    requests = [
        Request(request_id=str(number), prompt=tuple(range(3, 3 + NUM_PROMPT)), model=model, sampling=sampling)
        for number in range(num_requests)
    ]
    stream = await fleet.requests.submit(requests)
    at: list[float] = []
    left = num_requests

    def consume(outputs: list[Output]) -> None:
        nonlocal left
        at.append(time.monotonic())
        left -= sum(output.finish is not None for output in outputs)
        if not left:
            stream.close()

    await stream.deliver(consume)
    return at[0], at[-1]


def pss_mib(pid: int | None) -> float:
    """Return the proportional set size of a process and its children."""
    assert pid is not None
    total = 0
    for one in (pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))):
        fields = Path(f"/proc/{one}/smaps_rollup").read_text().splitlines()[1:]
        total += next(int(line.split()[1]) for line in fields if line.startswith("Pss:"))
    return total / 1024


async def memory(rig: Rig, backbone_pid: int, num_tokens: int) -> dict[str, Any]:
    """Return the proportional set sizes of functions, all awake, and of as many plain engines."""
    found: dict[str, Any] = {"base_mib": rig.backbone.base.num_bytes / MIB}
    for name, make in (("functions", rig.function), ("plain", rig.cold)):
        async with contextlib.AsyncExitStack() as stack:
            fleets = []
            for index, module in enumerate(rig.modules):
                fleets.append(await stack.enter_async_context(running(make, index, module)))
                await fleets[-1].adapters.warm(module.name)  # as a node does
                await ask(fleets[-1], module.name, num_tokens)
            if name == "functions":
                pids = [fleet.engines.replicas()[0].pid for fleet in fleets]
                # Forks are the zygote's children, and counted once.
                zygote = pss_mib(rig.zygote.pid) - (own := sum(map(pss_mib, pids)))
                found |= {"functions_mib": own, "zygote_mib": zygote, "backbone_mib": pss_mib(backbone_pid)}
            else:
                found["plain_mib"] = sum(pss_mib(fleet.engines.replicas()[0].pid) for fleet in fleets)
    return found


async def steps(rig: Rig, num_rounds: int, num_tokens: int) -> dict[str, Any]:
    """Return seconds per token of a function and of a plain engine, by round."""
    took: dict[str, list[float]] = {"function": [], "plain": []}
    async with running(rig.function, 0, rig.modules[0]) as function, running(rig.cold, 0, rig.modules[0]) as plain:
        for number, name in in_turns(list(took), num_rounds):
            first, last = await ask(
                {"function": function, "plain": plain}[name], rig.modules[0].name, num_tokens, num_requests=4
            )
            if number >= 0:
                took[name].append((last - first) / (num_tokens - 1))
    ratio = ratio_by_round(took["function"], took["plain"])
    return {"step_s": took, "ratio": asdict(ratio), "ratio_in_words": str(ratio)}


async def starts(rig: Rig, num_rounds: int) -> dict[str, Any]:
    """Return seconds from nothing to the first token, by way to start and round, and the stages of functions."""
    took: dict[str, list[float]] = {"cold": [], "mapping": [], "zygote": [], "up": []}
    stages: list[dict[str, float]] = []
    module = rig.modules[0]
    few = max(1, num_rounds // 5)
    for number, name in in_turns(list(took), num_rounds):
        if name in ("cold", "mapping") and number >= few:
            continue
        make = {"cold": rig.cold, "mapping": rig.mapping}.get(name, rig.function)
        began_at = time.monotonic()
        async with running(make, 0) as fleet:
            up_at = time.monotonic()
            await fleet.adapters.load(module.name, module.path)
            loaded_at = time.monotonic()
            first, _ = await ask(fleet, module.name, 2)
        if number < 0:
            continue
        took[name].append(first - (up_at if name == "up" else began_at))
        if name == "zygote" and (report := rig.links[-1].report) is not None:
            stages.append(report.took_s | {"adapter": loaded_at - up_at, "first token": first - loaded_at})
    return {"took_s": took, "stages_s": stages}


async def attacks(rig: Rig) -> dict[str, Any]:
    """Return the result of each attempt from inside a function, by user."""
    secret = f"{rig.modules[1].path}/adapter_model.safetensors"
    Path(rig.modules[0].path, "link").symlink_to(secret)
    before = base_digest(rig.backbone)
    with socket.create_server(("127.0.0.1", 0)) as server:
        async with running(rig.function, 1, rig.modules[1]) as sibling:
            told = {
                "parent": os.getpid(),
                "own": rig.modules[0].path,
                "secret": secret,
                "sibling": sibling.engines.replicas()[0].pid,
                "backbone": str(Path(rig.modules[0].path).parent / "socket"),
                "server": server.getsockname()[1],
            }
            found = await attacks_by_user(rig, told)
            await ask(sibling, rig.modules[1].name, 2)
    assert base_digest(rig.backbone) == before, "the base has changed"
    return found


def base_digest(backbone: Backbone) -> str:
    """Return a digest of the base's memory."""
    digest, file = hashlib.blake2b(), backbone.base.file
    for at in range(0, backbone.base.num_bytes, 16 * MIB):
        digest.update(os.pread(file, 16 * MIB, at))
    return digest.hexdigest()


async def attacks_by_user(rig: Rig, told: dict[str, Any]) -> dict[str, Any]:
    """Run the attempts as each user that this one can be."""
    found: dict[str, Any] = {}
    is_root = os.geteuid() == 0
    users = {"own user": FIRST_UID, "given no user, so root": None} if is_root else {"of a server without root": None}
    for name, uid in users.items():
        zygote = Zygote(rig.backbone, builder="isolation_attacks:attack")
        engine = EngineSpec(
            config=EngineConfig(model=ModelConfig(model=json.dumps(told))), served_name="base", builder=""
        )
        place = FunctionPlace(readable=[rig.modules[0].path], uid=uid, memory_bytes=1 << 30)
        try:
            async with running(lambda index, e=engine, z=zygote, p=place: FunctionLink(e, z, p), 0):  # type: ignore[misc]
                raise AssertionError("attacks end by a refusal")
        except ConfigError as error:
            found[name] = json.loads(str(error))
        finally:
            await zygote.stop()
    if is_root:
        found |= await asyncio.to_thread(attacks_without_root)
    return found


def attacks_without_root() -> dict[str, Any]:
    """Return the results of a server of an ordinary user, which is this script; nothing if it cannot run."""
    command = [sys.executable, __file__, "--only", "attacks", "--functions", "2", "--told"]
    with tempfile.TemporaryDirectory(prefix="manylora-user-") as home:
        os.chown(home, NOBODY, NOBODY)
        variables = {**os.environ, "HOME": home, "TMPDIR": home, "PYTHONDONTWRITEBYTECODE": "1"}
        who: dict[str, Any] = {"user": NOBODY, "group": NOBODY, "extra_groups": []}
        try:
            done = subprocess.run(command, env=variables, cwd=home, capture_output=True, check=True, text=True, **who)
        except (OSError, subprocess.CalledProcessError) as error:  # as where the interpreter is closed to others
            print(f"no results without root: {error}: {getattr(error, 'stderr', '')}", file=sys.stderr)
            return {}
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told


def text(figures: dict[str, Any], num_functions: int) -> str:
    """Return the tables."""
    lines = ["# Isolated functions on one sealed base", ""]
    if memory_of := figures.get("memory"):
        total = memory_of["functions_mib"] + memory_of["zygote_mib"] + memory_of["backbone_mib"]
        goal = memory_of["base_mib"] + num_functions * GOAL_MIB
        each = (total - memory_of["base_mib"]) / num_functions
        rows = [
            (f"{num_functions} functions, awake", f"{memory_of['functions_mib']:.0f}"),
            ("zygote", f"{memory_of['zygote_mib']:.0f}"),
            ("backbone process", f"{memory_of['backbone_mib']:.0f}"),
            ("all", f"{total:.0f}"),
            (f"base + {num_functions} x {GOAL_MIB} MiB (goal)", f"{goal:.0f}"),
            (f"{num_functions} plain engines", f"{memory_of['plain_mib']:.0f}"),
        ]
        lines += table(("proportional set size, after an answer each", "MiB"), rows)
        lines += ["", f"The base is {memory_of['base_mib']:.0f} MiB: beyond it, {each:.0f} MiB for each function.", ""]
    if steps_of := figures.get("steps"):
        lines += [f"Time per token of a function against a plain engine: {steps_of['ratio_in_words']} times.", ""]
    if starts_of := figures.get("starts"):
        rows = [
            (name, len(taken), *(f"{1000 * float(np.percentile(taken, p)):.0f}" for p in (50, 99)))
            for name, taken in starts_of["took_s"].items()
        ]
        lines += [*table(("to the first token", "rounds", "P50, ms", "P99, ms"), rows), ""]
        names = list(starts_of["stages_s"][0])
        medians = [f"{1000 * statistics.median(one[name] for one in starts_of['stages_s']):.0f}" for name in names]
        lines += [*table(("stages of *zygote*", *names), [("P50, ms", *medians)]), ""]
    if attacks_of := figures.get("attacks"):
        users = list(attacks_of)
        rows = [(attempt, *(attacks_of[user][attempt] for user in users)) for attempt in attacks_of[users[0]]]
        lines += table(("attempt from inside a function", *users), rows, left=1 + len(users))
    return "\n".join(lines)


async def measure(options: Any, folder: Path, wanted: Sequence[str]) -> dict[str, Any]:
    """Return all figures."""
    with contextlib.chdir(folder):
        make_model(folder / "base")
        adapters = make_adapters(folder / "base", folder, [8] * options.functions)
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    command = [sys.executable, "-m", "manylora", "backbone", str(folder / "base"), "--socket", str(folder / "socket")]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        while True:
            try:
                backbone = await asyncio.to_thread(fetch_backbone, folder / "socket")
                break
            except ConfigError:
                if process.poll() is not None:
                    raise
                await asyncio.sleep(0.5)
        os.environ["PYTHONPATH"] = os.pathsep.join([str(ATTACKS), *filter(None, sys.path)])
        rig = Rig(backbone, Zygote(backbone), adapters)
        figures: dict[str, Any] = {"machine": machine(), "is_root": os.geteuid() == 0}
        try:
            await rig.zygote.start()
            num_rounds, num_tokens = (2, 8) if options.quick else (options.rounds, 64)
            if "memory" in wanted:
                figures["memory"] = await memory(rig, process.pid, num_tokens)
            if "steps" in wanted:
                figures["steps"] = await steps(rig, num_rounds, num_tokens)
            if "starts" in wanted:
                figures["starts"] = await starts(rig, num_rounds)
            if "attacks" in wanted:
                figures["attacks"] = await attacks(rig)
        finally:
            await rig.zygote.stop()
        return figures
    finally:
        process.kill()
        process.wait()


def main() -> None:
    """Run the benchmark."""
    parser = arguments(__doc__, quick="two functions and two rounds")
    parser.add_argument("--functions", type=int, default=NUM_FUNCTIONS)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--only", default=",".join(PARTS), help="parts, separated by commas")
    parser.add_argument("--told", action="store_true", help="print the attempts' results as JSON, and nothing else")
    options = parser.parse_args()
    wanted = options.only.split(",")
    if options.quick:
        options.functions = 2
    others = Others()
    figures = in_folder(lambda folder: measure(options, folder, wanted))
    if options.told:
        print(json.dumps(figures["attacks"]))
        return
    refused = reason_to_refuse(options.rounds, others.share()) if {"steps", "starts"} & set(wanted) else None
    is_whole = set(wanted) == set(PARTS)
    before = RESULTS / "functions_live.json"
    if wanted == ["attacks"] and before.exists():  # they have no times, and stand beside those of before
        figures, is_whole = {**json.loads(before.read_text()), "attacks": figures["attacks"]}, True
        options.functions = NUM_FUNCTIONS
    kept = not options.quick and is_whole
    publish("functions_live", figures, text(figures, options.functions), is_kept=kept, refused=refused)


if __name__ == "__main__":
    main()
