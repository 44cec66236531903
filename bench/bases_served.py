"""A base of 8 billion weights on one machine: a server of 100 adapters in 4 bits, and 16 isolated functions in 8.

    python bench/bases_served.py --folder DIR [--shape 8b] [--adapters 100] [--functions 16] [--only server]

The base and the adapters (ranks 4, 8 and 16 on all linears, bfloat16) have random weights, and are those of
`bases.py` in the same folder. The server, `manylora serve`, is started twice: the first start rounds the checkpoint and
writes the packed cache, the second maps it. Then 1, 8 and 32 streams ask for 128 tokens in and 64 out, each of another
adapter, in an order that visits all of them: the first token of most is one of a cold adapter.

Then `manylora functions serve` with one function for each of the first 16 adapters answers one request of each function
from nothing, one of each while all are awake, and all at once.

Memory is the proportional set size of all processes at the most, read twice a second: pages that processes share, and
mapped files, count once. Writes `results/bases_served.json` and `.md`; with ``--only``, its name is added to theirs.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
from bases import SHAPES, apart, make_adapters, make_checkpoint
from functions_rig import Asked, ask, pss_bytes, serving
from publishing import Others, arguments, publish, reason_if_busy, table

from manylora.demo import demo_model_path

RANKS = (4, 8, 16)
STREAMS = (1, 8, 32)
PROMPT, ANSWER = 128, 64
START_S = 1800.0
MIB, GIB = 2**20, 2**30


def main() -> None:
    parser = arguments(__doc__, quick="the small shape, few adapters and functions")
    parser.add_argument("--folder", type=Path, default=Path(".bases"), help="checkpoints are made and kept there")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="8b")
    parser.add_argument("--adapters", type=int, default=100)
    parser.add_argument("--functions", type=int, default=16)
    parser.add_argument("--only", choices=("server", "functions"))
    options = parser.parse_args()
    if options.quick:
        options.shape, options.adapters, options.functions = "1b", 8, 2
    others = Others()
    model = apart(make_checkpoint, options.shape, options.folder / options.shape)
    for file in demo_model_path().glob("*token*"):  # its token ids are among the base's
        shutil.copy(file, model)
    adapters = apart(make_adapters, model, options.adapters, RANKS)
    figures: dict[str, Any] = {"shape": options.shape, "adapters": options.adapters, "functions": options.functions}
    if options.only != "functions":
        figures["server"] = asyncio.run(measure_server(model, adapters, options.folder / "cache"))
    if options.only != "server":
        figures["isolated"] = asyncio.run(measure_functions(model, adapters[: options.functions]))
    figures["busy"] = others.share()
    refused = reason_if_busy(figures["busy"])
    name = "bases_served" if options.only is None else f"bases_served_{options.only}"
    publish(name, figures, "\n".join(report(figures)), is_kept=not options.quick, refused=refused)


async def measure_server(model: Path, adapters: Sequence[Path], cache: Path) -> dict[str, Any]:
    """Start the server twice, and ask the second one."""
    for packed in cache.glob("*"):
        packed.unlink()
    starts, loads = [], []
    for is_second in (False, True):
        began = time.monotonic()
        async with server(model, adapters, cache) as (process, url):
            starts.append(time.monotonic() - began)
            print(f"ready in {starts[-1]:.1f} s", flush=True)
            if not is_second:
                continue
            async with httpx.AsyncClient(timeout=START_S, limits=httpx.Limits(max_connections=64)) as client:
                with watched(process.pid) as peak:
                    for turn, streams in enumerate(STREAMS):
                        names = [adapters[(turn * 37 + index) % len(adapters)].name for index in range(streams)]
                        loads.append(await load(client, url, names))
                        print(f"{streams} streams: {loads[-1]}", flush=True)
                status = (await client.get(url + "/status")).json()
    return {"starts_s": starts, "loads": loads, "peak_bytes": max(peak), "weights": status["engine"]["base_weights"]}


@contextlib.asynccontextmanager
async def server(model: Path, adapters: Sequence[Path], cache: Path) -> Any:
    """Run `manylora serve` on a free port; yield its process and its address once it is ready."""
    command = [sys.executable, "-m", "manylora", "serve", str(model), "--base-dtype", "int4", "--port", "0"]
    command += ["--cache-dir", str(cache), "--memory", "4GiB", "--host-memory", "4GiB", "--log-level", "warning"]
    command += ["--lora-modules", *(f"{folder.name}={folder}" for folder in adapters)]
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        async with asyncio.timeout(START_S):
            while " at " not in (line := (await process.stdout.readline()).decode()):
                if not line:
                    raise SystemExit("the server did not start")
        yield process, line.split()[-1]
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


async def load(client: httpx.AsyncClient, url: str, names: Sequence[str]) -> dict[str, float]:
    """Ask for one answer of each model at once."""
    random = iter(range(10**9))

    async def one(name: str) -> Asked:
        prompt = [3 + (7919 * next(random) + 31 * place) % 8000 for place in range(PROMPT)]
        return await checked(ask(client, url, name, prompt=prompt, max_tokens=ANSWER))

    began = time.monotonic()
    answers = await asyncio.gather(*map(one, names))
    took_s = time.monotonic() - began
    assert all(len(answer.tokens) == ANSWER for answer in answers), answers
    firsts = sorted(answer.ttft_s or 0.0 for answer in answers)
    return {
        "streams": len(names),
        "tokens_per_s": len(names) * ANSWER / took_s,
        "ttft_median_s": statistics.median(firsts),
        "ttft_longest_s": firsts[-1],
    }


@contextlib.contextmanager
def watched(pid: int) -> Iterator[list[int]]:
    """Yield a list that gets the bytes of a process and its children twice a second."""
    found, ended = [0], threading.Event()

    def read() -> None:
        while not ended.wait(0.5):
            found.append(pss_bytes(pid))

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        yield found
    finally:
        ended.set()
        reader.join()


async def measure_functions(model: Path, adapters: Sequence[Path]) -> dict[str, Any]:
    """Wake one function for each adapter, and ask all of them at once."""
    folder = Path(tempfile.mkdtemp(prefix="manylora-served-")).resolve()
    tables = [f'[node]\n[backbones.base]\nmodel = "{model.resolve()}"\nbase-dtype = "int8"\n']
    for path in adapters:
        tables.append(
            f'[functions.{path.name}]\nbackbone = "base"\nadapter = "{path.resolve()}"\nkv-bytes = {160 * MIB}\n'
            f"adapter-bytes = {160 * MIB}\nthreads = {os.cpu_count()}\nkeep-alive-s = 3600.0\nslo-s = 60.0\n"
        )
        for one in (path, *path.iterdir()):
            one.chmod(0o755 if one.is_dir() else 0o644)
    (folder / "functions.toml").write_text("".join(tables))
    folder.chmod(0o755)
    for one in (*model.iterdir(), *model.resolve().parents, model):
        one.chmod(one.stat().st_mode | (0o555 if one.is_dir() else 0o444))
    names = [path.name for path in adapters]
    try:
        async with serving(folder) as service, httpx.AsyncClient(timeout=START_S) as client:
            with watched(service.process.pid) as peak:
                first = await checked(ask(client, service.url, names[0]))
                print(f"the first answer after {first.took_s:.1f} s", flush=True)
                woken = [await checked(ask(client, service.url, name)) for name in names[1:]]
                warm = [await checked(ask(client, service.url, name)) for name in names]
                began = time.monotonic()
                both = await asyncio.gather(*(checked(ask(client, service.url, name)) for name in names))
                took_s = time.monotonic() - began
            await service.stop()
    except SystemExit:
        for file in (folder / "log", *folder.glob("state/**/*.log")):
            print(file.read_text()[-2000:], file=sys.stderr)
        raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return {
        "first_s": first.ttft_s,
        "woken_s": statistics.median(one.ttft_s or 0.0 for one in woken),
        "warm_s": statistics.median(one.ttft_s or 0.0 for one in warm),
        "tokens_per_s": sum(len(one.tokens) for one in both) / took_s,
        "peak_bytes": max(peak),
    }


async def checked(asked: Any) -> Asked:
    """Return an answer.

    Raises:
        SystemExit: There was none.
    """
    found: Asked = await asked
    if found.error or found.broken:
        raise SystemExit(f"{found.name}: {found.error or found.broken}")
    return found


def report(figures: dict[str, Any]) -> list[str]:
    """Return the tables of a result."""
    lines = [f"# A base of {figures['shape']} on {os.cpu_count()} cores", "", "`python bench/bases_served.py`:", ""]
    if (found := figures.get("server")) is not None:
        first, second = found["starts_s"]
        lines += [
            f"`manylora serve --base-dtype int4` with {figures['adapters']} adapters: ready in {first:.1f} s at the "
            f"first start, which rounds the checkpoint, and in {second:.1f} s at the second; at most "
            f"{found['peak_bytes'] / GIB:.1f} GiB of memory. Base: {'; '.join(found['weights'])}.",
            "",
        ]
        rows = [
            [f"{one['streams']} x {PROMPT}+{ANSWER}"]
            + [f"{one[name]:.2f}" for name in ("tokens_per_s", "ttft_median_s", "ttft_longest_s")]
            for one in found["loads"]
        ]
        lines += [*table(["streams", "tokens/s", "first token, median s", "longest s"], rows), ""]
    if (found := figures.get("isolated")) is not None:
        lines += [
            f"{figures['functions']} isolated functions over one base in int8, 32 tokens in and 16 out: the first "
            f"answer began after {found['first_s']:.1f} s (the base is read and rounded), others that slept after "
            f"{found['woken_s']:.2f} s and warm ones after {found['warm_s']:.2f} s (medians); all at once "
            f"{found['tokens_per_s']:.1f} tokens/s; at most {found['peak_bytes'] / GIB:.1f} GiB of memory.",
            "",
        ]
    return lines


if __name__ == "__main__":
    main()
