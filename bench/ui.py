"""The live page's cost: the server's processor time with many viewers against none.

    python bench/ui.py [--quick] [--viewers 20] [--rounds 5]

A server as in production (an API process and an engine process), on a simulated H100 with Llama-2-7B, two hundred
adapters, tenants and a ledger. A client asks for ten answers a second throughout, evenly in time, of adapters in turn.
In each round the server is watched by the viewers for some seconds, and by none for as long; the order rotates. The
viewers sign in and read the stream as a browser does, in this process. Processor time is that of both of the server's
processes, by the kernel's clock of each. Writes `results/ui.json` and `.md`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
from publishing import Others, arguments, middle_of_rounds, publish, reason_to_refuse, table

from manylora.functions.node.readings import cpu_ns
from manylora.lab.bench.rounds import in_turns, machine

ADAPTERS, RATE = 200, 10.0
KEY, TENANT = "administrator", "tenant"
SECONDS, QUICK_SECONDS = 15.0, 2.0
GOAL = 0.01


@contextlib.contextmanager
def server(folder: Path) -> Iterator[tuple[str, list[int]]]:
    """Serve, and yield the address and the processes."""
    (folder / "tenants.toml").write_text(
        f'[tenants.one]\nkeys = [{{ sha256 = "{hashlib.sha256(TENANT.encode()).hexdigest()}" }}]\n'
        "requests_per_minute = 100000\n"
    )
    for number in range(ADAPTERS):
        place = folder / "adapters" / f"adapter-{number:03d}"
        place.mkdir(parents=True)
        config = {"peft_type": "LORA", "r": 16, "target_modules": ["q_proj", "v_proj"], "number": number}
        (place / "adapter_config.json").write_text(json.dumps(config))
    command = ["manylora", "serve", "demo", "--simulate", "h100:llama-7b", "--port", "0", "--admin-key", KEY]
    command += ["--lora-dir", str(folder / "adapters"), "--tenants", str(folder / "tenants.toml")]
    command += ["--usage", str(folder / "usage.db"), "--num-pages", "1000", "--log-level", "error"]
    command[0] = str(Path(sys.executable).with_name("manylora"))
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise SystemExit("The server did not start.")
            children = psutil.Process(process.pid).children(recursive=True)
            yield line.split()[-1], [process.pid, *(one.pid for one in children)]
        finally:
            process.terminate()


@contextlib.contextmanager
def traffic(url: str) -> Iterator[None]:
    """Ask for answers at an even rate while inside."""
    is_over = threading.Event()

    def ask() -> None:
        with httpx.Client(base_url=url, headers={"Authorization": f"Bearer {TENANT}"}, timeout=60) as http:
            began_at, number = time.monotonic(), 0
            while not is_over.wait(max(0.0, began_at + number / RATE - time.monotonic())):
                body = {"model": f"adapter-{number % ADAPTERS:03d}", "prompt": "hello", "max_tokens": 4}
                http.post("/v1/completions", json=body).raise_for_status()
                number += 1

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


@contextlib.contextmanager
def viewers(url: str, num: int) -> Iterator[list[int]]:
    """Watch while inside; yield the snapshots and bytes that all viewers have read."""
    read = [0, 0]
    headers = {"Sec-Fetch-Site": "same-origin"}
    is_over = threading.Event()
    with httpx.Client(base_url=url, headers=headers, timeout=60) as http:
        http.post("/ui/session", json={"key": KEY}).raise_for_status()
        cookie = f"manylora_session={http.cookies['manylora_session']}"

    def watch() -> None:
        with (
            httpx.Client(base_url=url, headers={**headers, "Cookie": cookie}, timeout=60) as http,
            http.stream("GET", "/ui/events") as stream,
        ):
            stream.raise_for_status()
            for part in stream.iter_raw():
                read[0] += part.count(b"data: ")
                read[1] += len(part)
                if is_over.is_set():
                    return

    threads = [threading.Thread(target=watch) for _ in range(num)]
    for thread in threads:
        thread.start()
    try:
        while read[0] < num:  # until each watches
            time.sleep(0.05)
        yield read
    finally:
        is_over.set()
        for thread in threads:
            thread.join()


def busy_s(pids: list[int]) -> float:
    """Return the processor time of processes, in seconds."""
    return sum(cpu_ns(pid) or 0 for pid in pids) / 1e9


def measure(num_viewers: int, num_rounds: int, seconds: float) -> dict[str, list[float]]:
    """Return for each round the cores that the server takes, watched and not, and what a viewer reads a second."""
    found: dict[str, list[float]] = {"none": [], "watched": [], "bytes": [], "snapshots": []}
    with tempfile.TemporaryDirectory() as folder, server(Path(folder)) as (url, pids), traffic(url):
        time.sleep(min(seconds, 5.0))
        for number, side in in_turns(("none", "watched"), num_rounds):
            with viewers(url, num_viewers if side == "watched" else 0) as read:
                before, began_at, first = busy_s(pids), time.monotonic(), list(read)
                time.sleep(seconds)
                took_s = time.monotonic() - began_at
                cores = (busy_s(pids) - before) / took_s
                per_viewer = [
                    (last - begin) / took_s / max(1, num_viewers) for begin, last in zip(first, read, strict=True)
                ]
            if number >= 0:
                found[side].append(cores)
                if side == "watched":
                    found["snapshots"].append(per_viewer[0])
                    found["bytes"].append(per_viewer[1])
    return found


def main() -> None:
    """Measure, and write the result."""
    parser = arguments(__doc__, quick="one round of two seconds")
    parser.add_argument("--viewers", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    num_rounds, seconds = (1, QUICK_SECONDS) if options.quick else (options.rounds, SECONDS)
    others = Others()
    found = measure(options.viewers, num_rounds, seconds)
    busy_share = others.share()
    costs = [watched - none for watched, none in zip(found["watched"], found["none"], strict=True)]
    about = machine()
    heads = ("", "share of a core, % (95 % interval of the median)")
    rows = [
        ("not watched", middle_of_rounds([100 * one for one in found["none"]])),
        (f"{options.viewers} viewers", middle_of_rounds([100 * one for one in found["watched"]])),
        ("the difference in a round", middle_of_rounds([100 * one for one in costs])),
    ]
    text = "\n".join(
        [
            "# The live page",
            "",
            f"`python bench/ui.py` on {about['cpu']}, {os.cpu_count()} cores: {num_rounds} rounds of "
            f"{seconds:.0f} s a side. Other processes took {busy_share:.1%} of the machine's processor time.",
            "",
            f"Processor time of the server's API process and engine process, which give {RATE:.0f} answers a second of "
            f"{ADAPTERS} adapters in turn throughout. Each viewer reads {middle_of_rounds(found['snapshots'])} "
            f"snapshots and {middle_of_rounds([one / 1024 for one in found['bytes']])} KiB a second.",
            "",
            *table(heads, rows),
            "",
            f"The goal is {GOAL:.0%} of a core.",
        ]
    )
    publish("ui", found, text, is_kept=not options.quick, refused=reason_to_refuse(num_rounds, busy_share))


if __name__ == "__main__":
    main()
