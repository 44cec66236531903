"""`docker compose up` of `deploy/compose.yaml`, walked through by the same processes: no container engine is needed.

The commands, variables, health checks, dependencies and grace periods are those of the file. What an engine would add
is replaced: a container's address by a port of this machine, the name of many containers by their addresses, a mounted
path by a folder. The servers' devices are simulated, which spares the suite two starts of torch; with `COMPOSE_REAL=1`
the commands are those of the file to the letter.
"""

from __future__ import annotations

import hashlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from ports import free_ports
from serving import PATIENCE_S, wait_for
from sim_profiles import make_profile

from manylora.serving.metrics.usage import read_usage

DEPLOY = Path(__file__).parents[2] / "deploy"
VARIABLE = re.compile(r"\$\{(\w+)(?::\?[^}]*)?\}")
NUM_TOKENS = 60


@dataclass
class Composed:
    """The services of the file for one profile, as processes of this machine."""

    folder: Path
    variables: dict[str, str]
    services: dict[str, dict[str, Any]] = field(init=False)
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        lines = (DEPLOY / ".env").read_text().splitlines()
        given = dict(line.split("=", 1) for line in lines if not line.startswith("#"))
        text = VARIABLE.sub(lambda match: {**given, **self.variables}[match[1]], (DEPLOY / "compose.yaml").read_text())
        found = yaml.safe_load(text)["services"]
        profile = given["COMPOSE_PROFILES"]
        self.services = {name: one for name, one in found.items() if profile in one.get("profiles", [profile])}
        self.ports = dict(zip(self.services, free_ports(len(self.services)), strict=True))

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self.ports[name]}"

    def command(self, name: str) -> list[str]:
        """Return a service's command on this machine."""
        found: list[str] = []
        for word in self.services[name]["command"]:
            flag, _, value = word.partition("=")
            if value.startswith("dns:"):
                alias = value.split(":")[1]
                found += [f"{flag}={self.url(one)}" for one in self._named(alias)]
            elif flag == "--host":
                found.append("--host=127.0.0.1")
            elif flag == "--port":
                found.append(f"--port={self.ports[name]}")
            elif value.startswith("/"):
                found.append(f"{flag}={self._mounted(name, value)}")
            else:
                found.append(word)
        if found[0] == "serve" and not os.environ.get("COMPOSE_REAL"):
            found.append(f"--simulate={self.folder / 'profile.json'}")
        return [sys.executable, "-m", "manylora", *found]

    def up(self) -> None:
        """Start every service once those that it depends on are healthy."""
        waiting = dict(self.services)
        while waiting:
            ready = [name for name, one in waiting.items() if not waiting.keys() & one.get("depends_on", {}).keys()]
            for name in ready:
                self.start(name)
                del waiting[name]
            for name in ready:
                wait_for(lambda name=name: self.is_healthy(name))  # type: ignore[misc]

    def start(self, name: str) -> None:
        environment = {**os.environ, **self.services[name]["environment"]}
        self.processes[name] = subprocess.Popen(self.command(name), env=environment, stdout=subprocess.DEVNULL)

    def is_healthy(self, name: str) -> bool:
        """Make the file's health check."""
        assert self.processes[name].poll() is None
        kind, program, option, check = self.services[name]["healthcheck"]["test"]
        assert (kind, program, option) == ("CMD", "python", "-c")
        try:
            exec(check.replace("127.0.0.1:8000", f"127.0.0.1:{self.ports[name]}"))
        except OSError:
            return False
        return True

    def stop(self, name: str) -> int:
        """Send SIGTERM, and return the exit code; it must end within the grace period."""
        process = self.processes[name]
        process.send_signal(signal.SIGTERM)
        return process.wait(float(self.services[name]["stop_grace_period"].removesuffix("s")))

    def down(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()

    def _named(self, alias: str) -> list[str]:
        networks = {name: one.get("networks", {}).get("default", {}) for name, one in self.services.items()}
        return [name for name, network in networks.items() if alias in network.get("aliases", ())]

    def _mounted(self, name: str, path: str) -> Path:
        for volume in self.services[name]["volumes"]:
            source, target = volume.split(":")[:2]
            if path == target or path.startswith(target + "/"):
                folder = self.folder / source
                folder.mkdir(parents=True, exist_ok=True)
                return folder / Path(path).relative_to(target)
        raise AssertionError(f"{name} has no volume for {path}")


@pytest.fixture
def composed(tmp_path: Path) -> Iterator[Composed]:
    keys = {"ADMIN_KEY": "admin", "BACKEND_KEY": "backend"}
    made = Composed(tmp_path, {**keys, "CONFIG": "config", "ADAPTERS": "adapters", "MODELS": "models"})
    make_profile(terms={"step": 0.005}, turn_s=0.0).write(tmp_path / "profile.json")
    digest = hashlib.sha256(b"acme-key").hexdigest()
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "tenants.toml").write_text(f'[tenants.acme]\nkeys = [{{sha256 = "{digest}"}}]\n')
    try:
        yield made
    finally:
        made.down()


def whole_stream(client: httpx.Client, model: str, began: list[str]) -> bool:
    """Ask for an answer, note its first event, and return whether it came to its end."""
    body = {"model": model, "prompt": "hello", "max_tokens": NUM_TOKENS, "ignore_eos": True, "stream": True}
    with client.stream("POST", "/v1/completions", json={**body, "stream_options": {"include_usage": True}}) as answer:
        assert answer.status_code == 200, answer.read()
        lines = []
        for line in answer.iter_lines():
            if line:
                lines.append(line)
                if len(lines) == 1:
                    began.append(model)
    return f'"completion_tokens":{NUM_TOKENS}' in lines[-2].replace(" ", "") and lines[-1] == "data: [DONE]"


@pytest.mark.slow
def test_the_services_serve_and_stop_without_losing_an_answer(composed: Composed) -> None:
    for name, one in composed.services.items():
        drain = next(word for word in composed.command(name) if word.startswith("--drain-timeout="))
        assert float(one["stop_grace_period"].removesuffix("s")) > float(drain.partition("=")[2])
    composed.up()
    keyed = {"Authorization": "Bearer acme-key"}
    began: list[str] = []
    with (
        httpx.Client(base_url=composed.url("router"), headers=keyed, timeout=PATIENCE_S) as client,
        ThreadPoolExecutor(8) as pool,
    ):
        assert httpx.get(composed.url("router") + "/v1/models").status_code == 401
        models = [card["id"] for card in client.get("/v1/models").json()["data"]]
        assert len(models) == 13
        early = [pool.submit(whole_stream, client, model, began) for model in models[:6]]
        wait_for(lambda: len(began) == 6)
        stopping = pool.submit(composed.stop, "server-2")
        late = [pool.submit(whole_stream, client, model, began) for model in models[6:]]
        assert all(one.result() for one in (*early, *late))
        assert stopping.result() == 0
        last = [pool.submit(whole_stream, client, model, began) for model in models[:2]]
        wait_for(lambda: len(began) == 15)
        assert composed.stop("router") == 0
        assert all(one.result() for one in last)
    assert composed.stop("server-1") == 0
    entries = [read_usage(composed.folder / f"state-{number}" / "usage.db", ("tenant",)) for number in (1, 2)]
    counts = [(row[0], row[1], row[4]) for rows in entries for row in rows]
    assert {tenant for tenant, _, _ in counts} == {"acme"}
    assert sum(int(str(num)) for _, num, _ in counts) == 15
    assert all(int(str(num_tokens)) == NUM_TOKENS * int(str(num)) for _, num, num_tokens in counts)
