"""The light package: the router and the laboratory run without the libraries that it leaves out, torch above all.

The libraries are hidden from a process as if they were not installed. What the package leaves out is read from its
``pyproject.toml`` and that of the whole package.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
import tomllib
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from sim_profiles import make_profile, sweep

from manylora.core.costs.step_log import write_step_log

ROOT = Path(__file__).parents[2]
MODULES = {"pyzmq": "zmq"}
"""Modules of libraries that have another name."""

HIDING = """
import sys
from importlib.machinery import PathFinder

hidden = set(sys.argv.pop(1).split(","))

class Hiding:
    @staticmethod
    def find_spec(name, path=None, target=None):
        return None if name.partition(".")[0] in hidden else PathFinder.find_spec(name, path, target)

sys.meta_path = [Hiding if one is PathFinder else one for one in sys.meta_path]
from manylora.cli import main
main()
"""


def requirements(project: dict[str, Any], *extras: str) -> dict[str, str]:
    """Return the requirements of a project and some of its extras, by the names of their libraries."""
    lines = [*project["dependencies"], *(one for extra in extras for one in project["optional-dependencies"][extra])]
    return {re.split(r"[<>=!;\[ ]", line)[0]: line for line in lines}


WHOLE: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LIGHT: dict[str, Any] = tomllib.loads((ROOT / "packages" / "light" / "pyproject.toml").read_text())["project"]
ALL = requirements(WHOLE, *WHOLE["optional-dependencies"])


def left_out(*extras: str) -> str:
    """Return the modules that the light package with some extras does not bring."""
    names = ALL.keys() - requirements(LIGHT, *extras).keys()
    return ",".join(sorted(MODULES.get(name, name.replace("-", "_")) for name in names))


def command(hidden: str, *words: str) -> list[str]:
    return [sys.executable, "-c", HIDING, hidden, *words]


def run(hidden: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(hidden, *words), capture_output=True, text=True, check=False, timeout=300)


def test_the_light_package_asks_for_the_same_versions_and_leaves_torch_out() -> None:
    for extra in (*LIGHT["optional-dependencies"], None):
        asked = requirements(LIGHT, *([] if extra is None else [extra]))
        assert {name: ALL.get(name) for name in asked} == asked
        assert {"torch", "transformers", "numba"} <= set(left_out(*([] if extra is None else [extra])).split(","))
    assert "scipy" in left_out("route").split(",")
    assert LIGHT["requires-python"] == WHOLE["requires-python"]


@contextmanager
def backend() -> Iterator[str]:
    """Serve one model under OpenAI's routes, with the standard library alone."""

    class Server(BaseHTTPRequestHandler):
        def answer(self, body: dict[str, Any]) -> None:
            data = json.dumps(body).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self) -> None:
            self.answer({"data": [{"id": "base", "owned_by": "vllm"}]} if self.path == "/v1/models" else {})

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
            self.answer({"model": asked["model"]})

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_the_router_routes_without_what_the_light_package_leaves_out() -> None:
    assert run(left_out("route"), "route", "--help").returncode == 0
    with backend() as url:
        words = ("route", "--backend", url, "--port", "0", "--drain-timeout", "5")
        with subprocess.Popen(command(left_out("route"), *words), stdout=subprocess.PIPE, text=True) as router:
            try:
                assert router.stdout is not None
                line = router.stdout.readline()
                assert line.startswith("manylora routes to 1 of 1 backends at "), line
                body = json.dumps({"model": "base", "prompt": "hello"}).encode()
                headers = {"content-type": "application/json"}
                asked = urllib.request.Request(line.split()[-1] + "/v1/completions", body, headers)
                with urllib.request.urlopen(asked, timeout=60) as answer:
                    assert json.load(answer) == {"model": "base"}
            finally:
                router.send_signal(signal.SIGTERM)
        assert router.returncode == 0


QUICK = ("--requests", "40", "--set", "warm_up_s=0")


@pytest.mark.parametrize(
    "words",
    [
        ("simulate", *QUICK),
        ("compare", "--policy", "fifo", "--policy", "chameleon", *QUICK),
        ("plan", "--requests", "40", "--seeds", "1", "--tolerance", "0.3"),
        ("experiment", "list"),
        ("--help",),
        ("version",),
    ],
    ids=lambda words: words[0],
)
def test_the_laboratory_runs_without_what_the_light_package_leaves_out(words: tuple[str, ...]) -> None:
    done = run(left_out("lab"), *words)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_profiles_are_fitted_without_what_the_light_package_leaves_out(tmp_path: Path) -> None:
    write_step_log(tmp_path / "steps.jsonl", sweep(make_profile(), seconds=1.0))
    words = ("calibrate", str(tmp_path / "steps.jsonl"), "-o", str(tmp_path / "profile.json"))
    done = run(left_out("lab"), *words)
    assert done.returncode == 0, done.stderr


def test_what_is_left_out_is_named_where_it_is_needed() -> None:
    done = run(left_out("route", "lab"), "serve", "demo")
    assert done.returncode == 1
    assert "`manylora serve` needs " in done.stderr
    assert "Traceback" not in done.stderr
