"""vLLM with the plug-in under churn: adapters come, go and are replaced, clients leave, and servers are killed.

    make vllm ARGS="-k plugin"                             # makes the environment
    .venv-vllm/bin/python bench/vllm_churn.py              # half an hour; --minutes 2 to try it

Requests for 24 adapters (popularity: Zipf 0.92) go through 8 slots. Meanwhile folders are replaced under loaded names,
names come and go, clients close their connection in the middle of an answer, and every few minutes all processes of the
server are killed and started again. Each answer is compared with the first one that the same weights gave. In the end
of each life the server must be idle, have an adapter in each slot, and serve all slots at once.

Ends with an error if an answer was wrong, a request had no end, or a slot was lost.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))

from vllm_real import LIMITS, RealServer, serving, write_adapter

RESULTS = Path(__file__).parent / "results"
NUM_ADAPTERS, NUM_CLIENTS, NUM_COMING = 24, 6, 3
SEEDS = range(2000, 2012)
"""Weights of the adapters that are replaced."""


class Churn:
    """Clients of one server after the other, and the count of what they saw."""

    def __init__(self, folder: Path) -> None:
        self.counts: Counter[str] = Counter()
        self._folder = folder
        self._expected: dict[tuple[int, int], str] = {}  # by weights and length
        self._lock = threading.Lock()
        self._is_over = self._is_killed = False

    def folders(self) -> dict[str, Path]:
        """Return the adapters that are there from the start, as they were made."""
        return {f"a{number}": write_adapter(self._folder / f"a{number}", number) for number in range(NUM_ADAPTERS)}

    def live(self, server: RealServer, until: float, *, is_killed: bool) -> None:
        """Let clients ask until a time; then kill the server, or look whether it is as it was."""
        self._is_over = self._is_killed = False
        with ThreadPoolExecutor(NUM_CLIENTS + 2) as pool:
            work = [pool.submit(self._ask_on, server, number) for number in range(NUM_CLIENTS)]
            work += [pool.submit(self._replace_on, server), pool.submit(self._leave_on, server)]
            time.sleep(max(0.0, until - time.monotonic()))
            if is_killed:
                self._is_killed = True
                os.killpg(server.process.pid, signal.SIGKILL)
                self.counts["killed servers"] += 1
            self._is_over = True
            for one in work:
                one.result(timeout=120)  # raises if a client was left without an end
        if not is_killed:
            self._check(server)

    def _complete(self, server: RealServer, model: str, seed: int, length: int) -> None:
        """Ask once; the answer must be that of the weights with this seed."""
        self.counts["requests"] += 1
        try:
            body = {"model": model, "prompt": "what is the sum", "max_tokens": length, "temperature": 0}
            status, text = server.call("/v1/completions", body)
        except OSError:
            if not self._is_killed:
                raise
            self.counts["ended by a kill"] += 1
            return
        assert status == 200, text
        answer = json.loads(text)["choices"][0]["text"]
        with self._lock:
            known = self._expected.setdefault((seed, length), answer)
        assert answer == known, f"{model}: {answer!r}, expected {known!r}"
        self.counts["right answers"] += 1

    def _ask_on(self, server: RealServer, client: int) -> None:
        rng, weights = random.Random(time.monotonic_ns()), [place**-0.92 for place in range(1, NUM_ADAPTERS + 1)]
        while not self._is_over:
            number = rng.choices(range(NUM_ADAPTERS), weights)[0]
            self._complete(server, f"a{number}", number, rng.choice((4, 16)))

    def _replace_on(self, server: RealServer) -> None:
        rng = random.Random(time.monotonic_ns())
        while not self._is_over:
            name, first, second = f"come{rng.randrange(NUM_COMING)}", rng.choice(SEEDS), rng.choice(SEEDS)
            path = write_adapter(self._folder / name, first)
            for route, body, seed in (
                ("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(path)}, first),
                ("", {}, second),
                ("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(path), "load_inplace": True}, first),
                ("/v1/unload_lora_adapter", {"lora_name": name}, None),
            ):
                try:
                    if seed is not None:
                        write_adapter(path, seed)
                    status, text = server.call(route, body) if route else (200, "")
                except OSError:
                    if not self._is_killed:
                        raise
                    return
                assert status == 200, text
                self.counts[route.rpartition("/")[2] or "replace_files"] += 1
                if seed is not None:
                    self._complete(server, name, seed, 4)

    def _leave_on(self, server: RealServer) -> None:
        rng, host = random.Random(time.monotonic_ns()), urlsplit(server.url)
        while not self._is_over:
            model = f"a{rng.randrange(NUM_ADAPTERS)}"
            body = json.dumps({"model": model, "prompt": "x", "max_tokens": 200, "stream": True, "ignore_eos": True})
            head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            try:
                with socket.create_connection((str(host.hostname), host.port or 80), 10) as connection:
                    connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
                    time.sleep(rng.uniform(0.0, 0.3))
            except OSError:
                if not self._is_killed:
                    raise
            self.counts["clients that left"] += 1

    def _check(self, server: RealServer) -> None:
        """Assert that nothing runs, that every slot has an adapter, and that all can be used at once."""
        num_slots = LIMITS["max_loras"]
        with ThreadPoolExecutor(num_slots) as pool:
            list(pool.map(lambda number: self._complete(server, f"a{number}", number, 16), range(2 * num_slots)))
        until = time.monotonic() + 30
        while not (is_idle := _is_idle(server)) and time.monotonic() < until:
            time.sleep(0.5)
        assert is_idle, "requests are left"
        self._complete(server, "a0", 0, 4)
        metrics = server.metrics()
        on_device = sum(name.endswith(" device") for name in metrics)
        assert on_device == num_slots, f"{on_device} of {num_slots} slots have an adapter"
        assert metrics["adapter_blocking_loads"] == 0
        for name in ("adapter_copies", "adapter_reads", "adapter_evictions", "adapter_load_failures"):
            self.counts[name.replace("_", " ")] += int(metrics[name])
        self.counts["checks of all slots"] += 1


def _is_idle(server: RealServer) -> bool:
    lines = server.call("/metrics")[1].splitlines()
    gauges = [line for line in lines if line.startswith(("vllm:num_requests_running{", "vllm:num_requests_waiting{"))]
    return bool(gauges) and all(float(line.rpartition(" ")[2]) == 0 for line in gauges)


def main() -> None:
    """Churn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--life", type=float, default=150.0, help="seconds of a server; every other one is killed")
    parser.add_argument("--output", type=Path, default=RESULTS / "vllm_churn.md")
    given = parser.parse_args()
    began = time.monotonic()
    until, number = began + 60 * given.minutes, 0
    with tempfile.TemporaryDirectory() as folder:
        churn = Churn(Path(folder))
        while time.monotonic() < until or number < 2:
            is_killed = number % 2 == 0
            with serving(churn.folders(), {}, Path(folder) / "serve.log") as server:
                churn.live(server, time.monotonic() + given.life, is_killed=is_killed)
            number += 1
            print(f"{time.monotonic() - began:.0f} s", dict(churn.counts), flush=True)
    rows = [f"| {name} | {count} |" for name, count in churn.counts.items()]
    head = ["# vLLM with the plug-in under churn", "", f"`python bench/vllm_churn.py --minutes {given.minutes:g}`", ""]
    given.output.write_text("\n".join([*head, "| | count |", "|---|---|", *rows]) + "\n")


if __name__ == "__main__":
    main()
