"""How long four walks through the code are: the files of `src/manylora` that they enter, and their Python calls.

* *chat*: a chat request of three tokens, streamed, from the socket to the socket, on a simulated engine in the server's
  process (so that both sides of the link are seen);
* *adapter*: an adapter's way from its folder to the device of the torch engine, on the demo model;
* *simulated*: a simulation of one request;
* *routed*: a chat request of three chunks through `manylora route`, from the client's socket to a server's and back.

Each walk is made twice and the second is counted: the first imports and fills caches. Calls are counted by a profile
hook in every thread. Calls of generated code (dataclass methods) have no file and are left out.

Run it: `python bench/walks.py`; it prints a table, and writes nothing but what `--json FILE` asks for.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import FrameType
from typing import Any

import httpx

import manylora
from manylora.core.clock import WallClock
from manylora.core.config import EngineConfig, MemoryConfig, ModelConfig, ServerConfig
from manylora.core.engine.core import EngineCore
from manylora.core.types import Tier
from manylora.demo import demo_adapters, demo_model_path
from manylora.execution.build import build_parts
from manylora.lab.catalog.models import base_shape
from manylora.lab.costs.model import FixedCost
from manylora.lab.sim.run.simulation import SimulationConfig, simulate
from manylora.lab.workloads import AdapterSpec, RequestSpec, Workload
from manylora.route.config import ProxyConfig
from manylora.route.serve import Proxy
from manylora.serving.http.listening import new_event_loop
from manylora.serving.server import BackgroundServer

ROOT = str(Path(manylora.__file__).parent) + "/"
NUM_TOKENS = 3
SIMULATED = "a40:llama-7b"


class Walk:
    """Counts calls by file, in all threads that began after it was made, while it is ``counted``."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self._is_counting = False
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def _note(self, frame: FrameType, event: str, argument: Any) -> None:
        if self._is_counting and event == "call" and frame.f_code.co_filename.startswith(ROOT):
            self.calls[frame.f_code.co_filename.removeprefix(ROOT)] += 1

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count while inside."""
        self._is_counting = True
        try:
            yield
        finally:
            self._is_counting = False

    def end(self) -> Counter[str]:
        """Return the calls by file; count no more."""
        sys.setprofile(None)
        threading.setprofile(None)
        return self.calls


def chat() -> Counter[str]:
    """Walk a chat request from socket to socket."""
    walk = Walk()
    engine = EngineConfig(model=ModelConfig(model="demo"), simulate=SIMULATED)
    body = {
        "model": "demo",
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": NUM_TOKENS,
        "ignore_eos": True,
        "stream": True,
    }
    with BackgroundServer(engine, ServerConfig(port=0, in_process=True)) as server, httpx.Client(timeout=60) as client:
        url = server.url + "/v1/chat/completions"
        for is_counted in (False, True):
            with walk.counted() if is_counted else _nothing():
                answer = client.post(url, json=body)
                time.sleep(0.2)  # what follows the last byte is part of the walk
            answer.raise_for_status()
            assert answer.text.endswith("data: [DONE]\n\n")
    return walk.end()


def adapter() -> Counter[str]:
    """Walk an adapter from its folder to the device."""
    walk = Walk()
    clock = WallClock()
    config = EngineConfig(
        model=ModelConfig(model=str(demo_model_path()), device="cpu"), memory=MemoryConfig(memory_bytes=64 << 20)
    )
    parts = build_parts(config, clock)
    core = EngineCore(parts, config, served_name="demo")
    try:
        for is_counted, (name, path) in zip((False, True), demo_adapters().items(), strict=False):
            with walk.counted() if is_counted else _nothing():
                version = parts.reader.read(name, str(path))
                core.adapters.register(name, version, clock.now())
                core.adapters.warm(name, clock.now())
                while core.adapters.status(name, clock.now()).tier is not Tier.DEVICE:
                    time.sleep(0.05)  # so long that the look after it finds the copy done: looks are not counted twice
                    core.collect(clock.now())
                    core.launch(clock.now())
    finally:
        parts.close()
    return walk.end()


def simulated() -> Counter[str]:
    """Walk a simulation of one request."""
    walk = Walk()
    workload = Workload(
        name="one",
        adapters=(AdapterSpec(name="a", rank=8),),
        requests=(RequestSpec(arrival_s=0.0, adapter="a", num_prompt_tokens=10, num_output_tokens=NUM_TOKENS),),
    )
    config = SimulationConfig(base=base_shape("demo"), cost=FixedCost(), num_pages=100)
    simulate(workload, config)
    with walk.counted():
        simulate(workload, config)
    return walk.end()


class _Server(BaseHTTPRequestHandler):
    """A server behind the router, of the standard library alone."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        kind = "application/json" if self.path == "/v1/models" else "text/plain"
        self._answer(kind, b'{"data": [{"id": "base", "owned_by": "vllm"}]}' if self.path == "/v1/models" else b"")

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self._answer("text/event-stream", b"data: {}\n\n" * NUM_TOKENS + b"data: [DONE]\n\n")

    def _answer(self, kind: str, body: bytes) -> None:
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


def routed() -> Counter[str]:
    """Walk a chat request through the router, which polls its server before and after."""
    walk = Walk()
    body = {"model": "base", "messages": [{"role": "user", "content": "hello"}], "stream": True}
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Server)
    proxy = Proxy(ProxyConfig(backends=(f"http://127.0.0.1:{server.server_port}",), port=0, poll_s=60.0))
    ready = threading.Event()

    def serve() -> None:
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            runner.run(proxy.serve(ready.set))

    threads = [threading.Thread(target=server.serve_forever, daemon=True), threading.Thread(target=serve, daemon=True)]
    for thread in threads:
        thread.start()
    assert ready.wait(30)
    try:
        with httpx.Client(timeout=60) as client:
            for is_counted in (False, True):
                with walk.counted() if is_counted else _nothing():
                    answer = client.post(proxy.url + "/v1/chat/completions", json=body)
                    time.sleep(0.2)  # what follows the last byte is part of the walk
                answer.raise_for_status()
                assert answer.text.endswith("data: [DONE]\n\n")
    finally:
        proxy.drain()
        threads[1].join(30)
        server.shutdown()
        server.server_close()
    return walk.end()


@contextmanager
def _nothing() -> Iterator[None]:
    yield


WALKS: dict[str, Callable[[], Counter[str]]] = {
    "chat": chat,
    "adapter": adapter,
    "simulated": simulated,
    "routed": routed,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write calls by file, for each walk")
    parser.add_argument("--files", action="store_true", help="list the files with their calls as well")
    options = parser.parse_args()
    walked = {name: walk() for name, walk in WALKS.items()}
    print("| walk | files | calls |\n|---|---:|---:|")
    for name, calls in walked.items():
        print(f"| {name} | {len(calls)} | {calls.total()} |")
    if options.files:
        for name, calls in walked.items():
            print(f"\n{name}:", *(f"  {count:6} {file}" for file, count in sorted(calls.items())), sep="\n")
    if options.json is not None:
        report = {name: dict(sorted(calls.items())) for name, calls in walked.items()}
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
