"""What the benchmarks of `manylora functions serve` share: a base, many adapters, the service, and its processes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import torch
from cpu_systems import make_adapters, make_model
from safetensors.torch import load_file, save_file

from manylora.core.config import EngineConfig, MemoryConfig, ModelConfig
from manylora.demo import demo_model_path
from manylora.functions.controller.bill import Bill, make_bill
from manylora.functions.controller.server import LEDGER
from manylora.functions.controller.store import read_ledger
from manylora.functions.decisions.billing import PriceList
from manylora.serving.hosting.fleet.adapter_book import LoraModule
from manylora.serving.server.background import BackgroundServer

PATIENCE_S = 300.0
NUM_TOKENS = 16
PROMPT = list(range(3, 35))
MIB = 2**20


def make_platform(
    folder: Path, num_functions: int, *, num_backbones: int = 1, node: str = "", function: str = ""
) -> list[str]:
    """Write bases, adapters and `functions.toml`, with more lines of each table; return the names of the functions."""
    with contextlib.chdir(folder):
        make_model(folder / "base")
        for file in demo_model_path().glob("*token*"):  # its token ids are among the base's
            shutil.copy(file, folder / "base")
        (first,) = make_adapters(folder / "base", folder, [8], torch.bfloat16, ["q_proj", "v_proj"])
    weights = load_file(first / "adapter_model.safetensors")
    tables = [f"[node]\n{node}"]
    tables += [f'[backbones.base{index}]\nmodel = "base"\n' for index in range(num_backbones)]
    names = []
    for index in range(num_functions):
        names.append(f"f{index}")
        target = folder / names[-1]
        target.mkdir()
        (target / "adapter_config.json").write_bytes((first / "adapter_config.json").read_bytes())
        rng = torch.Generator().manual_seed(index)
        mixed = {
            key: (torch.randn(one.shape, generator=rng) * one.float().std()).to(one.dtype)
            for key, one in weights.items()
        }
        save_file(mixed, target / "adapter_model.safetensors")
        tables.append(
            f'[functions.{names[-1]}]\nbackbone = "base{index % num_backbones}"\nadapter = "{names[-1]}"\n'
            f'tenant = "tenant-{index % 10}"\nkv-bytes = {32 * MIB}\nadapter-bytes = {16 * MIB}\nthreads = 2\n'
            f"{function}"
        )
    (folder / "functions.toml").write_text("".join(tables))
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return names


def in_folder(measure: Callable[[Path], Coroutine[Any, Any, dict[str, Any]]]) -> dict[str, Any]:
    """Return the figures of a benchmark that needs a folder, which is removed afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="manylora-functions-")).resolve()
    try:
        return asyncio.run(measure(folder))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def plain_answers(folder: Path, names: Sequence[str], *, at_once: int = 1) -> dict[str, list[str]]:
    """Return the tokens of each adapter's answer by one plain engine that serves all of them.

    Args:
        folder: The platform's.
        names: The adapters.
        at_once: Requests that share steps; rounding then differs, and can decide between two tokens that are as likely.
    """
    config = EngineConfig(
        model=ModelConfig(model=str(folder / "base"), device="cpu"), memory=MemoryConfig(memory_bytes=512 * MIB)
    )
    modules = [LoraModule(name, str(folder / name)) for name in names]

    def answer(name: str) -> list[str]:
        (choice,) = client.post(server.url + "/v1/completions", json=body(name)).json()["choices"]
        tokens: list[str] = choice["logprobs"]["tokens"]
        return tokens

    with (
        BackgroundServer(config, lora_modules=modules) as server,
        httpx.Client(timeout=PATIENCE_S) as client,
        ThreadPoolExecutor(at_once) as pool,
    ):
        return dict(zip(names, pool.map(answer, names), strict=True))


def body(name: str) -> dict[str, Any]:
    """Return the body of a request; its answer's tokens are ids, as the base has most of them without a text."""
    sampling = {"max_tokens": NUM_TOKENS, "temperature": 0.0, "ignore_eos": True, "logprobs": 0}
    return {"model": name, "prompt": PROMPT, "stream": False, "return_tokens_as_token_ids": True, **sampling}


@dataclass(slots=True)
class Asked:
    """The outcome of a request; ``error`` is an answer of the server, ``broken`` a connection that ended."""

    name: str
    at: float
    ttft_s: float | None = None
    took_s: float = 0.0
    tokens: list[str] = field(default_factory=list)
    error: str | None = None
    broken: str | None = None


async def ask(client: httpx.AsyncClient, url: str, name: str, **fields: Any) -> Asked:
    """Stream an answer; ``fields`` take the place of those of ``body``."""
    began = time.monotonic()
    asked = Asked(name, began)
    is_whole = False
    try:
        async with client.stream(
            "POST", url + "/v1/completions", json=body(name) | {"stream": True} | fields
        ) as answer:
            if answer.status_code != 200:
                text = (await answer.aread()).decode(errors="replace")
                asked.error = f"{answer.status_code} {json.loads(text)['error']['message']}"
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    is_whole = True
                elif line.startswith("data: "):
                    chunk = json.loads(line[6:])
                    if "error" in chunk:
                        asked.error = str(chunk["error"]["message"])
                        break
                    if asked.ttft_s is None:
                        asked.ttft_s = time.monotonic() - began
                    for choice in chunk["choices"]:
                        asked.tokens += (choice.get("logprobs") or {}).get("tokens", [])
    except (httpx.HTTPError, ValueError, KeyError) as error:
        asked.broken = repr(error)
    if not is_whole and asked.error is None and asked.broken is None:
        asked.broken = "the stream ended early"
    asked.took_s = time.monotonic() - began
    return asked


def processes_below(pid: int) -> list[psutil.Process]:
    """Return a process and its children of any generation; none if it has ended."""
    try:
        return [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def pss_bytes(pid: int) -> int:
    """Return the proportional set size of a process and its children."""
    total = 0
    for one in processes_below(pid):
        with contextlib.suppress(psutil.Error, OSError):
            total += one.memory_full_info().pss
    return total


class Service:
    """`manylora functions serve` as a process, and its state."""

    def __init__(self, folder: Path, process: asyncio.subprocess.Process, url: str) -> None:
        self.folder = folder
        self.process = process
        self.url = url
        self.state = folder / "state"

    async def overview(self) -> dict[str, Any] | None:
        """Return the controller's view; ``None`` while it is away."""
        url = json.loads((self.state / "controller.json").read_text())["url"]
        headers = {"Authorization": f"Bearer {(self.state / 'token').read_text().strip()}"}
        try:
            async with httpx.AsyncClient(timeout=5.0) as client:
                found: dict[str, Any] = (await client.get(url + "/v1/functions", headers=headers)).json()
                return found
        except (httpx.HTTPError, ValueError):
            return None

    def processes(self) -> list[psutil.Process]:
        """Return all processes of the service: those with its folder or a zygote's name, and their children."""
        return processes_below(self.process.pid)

    def pss_bytes(self) -> int:
        """Return the proportional set size of all processes."""
        return pss_bytes(self.process.pid)

    def bill(self) -> Bill:
        """Return the whole bill, by function."""
        return make_bill(*read_ledger(self.state / LEDGER, 0, 2**62), PriceList(), by_tenant=False)

    def ledger_clock(self) -> tuple[float, float]:
        """Return the end of the ledger, in seconds since the epoch, and the device time of all its accounts."""
        with contextlib.closing(sqlite3.connect(f"file:{self.state / LEDGER}?mode=ro", uri=True)) as database:
            database.execute("BEGIN")  # both as of one report
            (until_ns,) = database.execute("SELECT until_ns FROM nodes").fetchone()
            used = [row[0].split() for row in database.execute("SELECT usage FROM accounts")]
        return until_ns / 1e9, sum(int(active) + int(idle) for active, idle, *_ in used) / 1e9

    async def stop(self) -> int:
        """End it gracefully; return the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return await asyncio.wait_for(self.process.wait(), PATIENCE_S)


@contextlib.asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[Service]:
    """Run the service; killed at the end."""
    command = [sys.executable, "-m", "manylora", "functions", "serve", "--port", "0", "--log-level", "error"]
    process = await asyncio.create_subprocess_exec(
        *(*command, "--config", str(folder / "functions.toml"), "--state-dir", str(folder / "state")),
        stdout=subprocess.PIPE,
        stderr=(folder / "log").open("ab"),
    )
    try:
        assert process.stdout is not None
        line = (await process.stdout.readline()).decode()
        if " at " not in line:
            raise SystemExit(f"it did not start; see {folder / 'log'}")
        yield Service(folder, process, line.split()[-1])
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def sealed_memory(pids: Iterable[object] = ("[0-9]*",)) -> set[int]:
    """Return the inodes of sealed bases that processes map or hold; by default any process."""
    found = set()
    for pid in pids:
        for maps in Path("/proc").glob(f"{pid}/maps"):
            with contextlib.suppress(OSError):
                found |= {int(line.split()[4]) for line in maps.read_text().splitlines() if "manylora-weights" in line}
        for link in Path("/proc").glob(f"{pid}/fd/*"):
            with contextlib.suppress(OSError):
                if "manylora-weights" in os.readlink(link):
                    found.add(link.stat().st_ino)
    return found
