"""The engine process dies, in every way, and the server lives: two real processes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest
from disturbed import answers
from ended import is_gone
from reciter import engine_config, write_reciter
from serving import PATIENCE_S, Gate, wait_for

from manylora.core.config import ServerConfig
from manylora.core.errors import AdapterNotFound, ConfigError, EngineDead
from manylora.serving.server import BackgroundServer, LoraModule, RestartPolicy


@contextmanager
def two_processes(
    tokenizer: Path,
    lora_dir: Path,
    *,
    builder: str = "reciter:reciter_parts",
    restarts: RestartPolicy | None = None,
    **config: float,
) -> Iterator[BackgroundServer]:
    server = BackgroundServer(
        engine_config(tokenizer),
        ServerConfig(port=0, lora_dirs=(str(lora_dir),), **config),  # type: ignore[arg-type]
        [LoraModule("m", str(lora_dir / "m"))],
        builder=builder,
        restarts=restarts,
    )
    with server:
        yield server


def kill_engine(server: BackgroundServer, by: signal.Signals = signal.SIGKILL) -> None:
    assert server.engine_pid is not None
    os.kill(server.engine_pid, by)


def test_killed_under_fifty_streams(tokenizer: Path, lora_dir: Path) -> None:
    """Every stream goes on where it was, on the next engine, which knows every adapter and pin."""
    bodies = [{"model": "mp"[index % 2], "prompt": "say", "max_tokens": 25} for index in range(50)]

    async def kill(begun: Sequence[asyncio.Event]) -> None:
        await asyncio.gather(*(one.wait() for one in begun))
        kill_engine(server)
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            while True:
                short = {"model": "m", "prompt": "x", "max_tokens": 1}
                meanwhile = await client.post("/v1/completions", json=short)
                if meanwhile.status_code == 200 and server.engine_pid != first:
                    break
                if meanwhile.status_code == 503:
                    assert int(meanwhile.headers["retry-after"]) >= 1

    with (
        two_processes(tokenizer, lora_dir, builder="reciter:slow_reciter_parts") as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
    ):
        first = server.engine_pid
        load = {"lora_name": "p", "lora_path": str(lora_dir / "p")}
        assert http.post("/v1/load_lora_adapter", json=load).status_code == 200
        assert http.post("/adapters/p/pin").status_code == 200
        whole = ["mnopqrstuvwxyzabcdefghijk", "pqrstuvwxyzabcdefghijklmn"] * 25
        assert asyncio.run(answers(server.url, bodies, kill)) == whole
        status = {adapter["name"]: adapter for adapter in http.get("/adapters").json()["data"]}
        assert set(status) == {"m", "p"}
        assert (status["p"]["pinned"], status["m"]["pinned"]) == (True, False)
        assert "manylora_engine_restarts_total 1.0" in http.get("/metrics").text


def test_an_adapter_that_is_gone_costs_only_itself(tokenizer: Path, lora_dir: Path) -> None:
    own = write_reciter(lora_dir / "passing", "x")
    with two_processes(tokenizer, lora_dir) as server, httpx.Client(base_url=server.url, timeout=60) as http:
        http.post("/v1/load_lora_adapter", json={"lora_name": "x", "lora_path": str(own)})
        (own / "adapter_config.json").unlink()
        kill_engine(server)
        wait_for(lambda: "manylora_engine_restarts_total 1.0" in http.get("/metrics").text)
        wait_for(lambda: http.get("/health").status_code == 200)
        assert [model["id"] for model in http.get("/v1/models").json()["data"]] == ["base", "m"]


@pytest.mark.parametrize(("ending", "how"), [("?", "its loop made no turn"), ("*", "no step ended")])
def test_an_engine_that_hangs_is_restarted(tokenizer: Path, lora_dir: Path, ending: str, how: str) -> None:
    """Its loop stuck, or its device: a request that hangs engines twice ends, and the next engine serves."""
    with (
        two_processes(tokenizer, lora_dir, builder="reciter:hanging_parts", hang_timeout_s=2.0) as server,
        httpx.Client(base_url=server.url, timeout=30) as http,
    ):
        first = server.engine_pid
        fine = {"model": "m", "prompt": "say", "max_tokens": 3}
        assert http.post("/v1/completions", json=fine).status_code == 200
        answer = http.post("/v1/completions", json={**fine, "prompt": "say" + ending})
        assert answer.status_code == 500
        assert "2 engines died" in answer.json()["error"]["message"]
        assert how in answer.json()["error"]["message"]
        wait_for(lambda: http.get("/health").status_code == 200)
        assert server.engine_pid != first
        assert first is not None
        wait_for(lambda: is_gone(first))
        assert http.post("/v1/completions", json=fine).status_code == 200


def test_a_crash_loop_is_given_up(tokenizer: Path, lora_dir: Path) -> None:
    policy = RestartPolicy(max_deaths=3, first_pause_s=0.1)
    with two_processes(tokenizer, lora_dir, restarts=policy) as server:
        for _ in range(3):
            pid = server.engine_pid
            kill_engine(server, signal.SIGABRT)  # as in a crash
            wait_for(lambda pid=pid: server.has_ended or server.engine_pid not in (None, pid))  # type: ignore[misc]
            if not server.has_ended:
                with httpx.Client(base_url=server.url, timeout=60) as http:
                    wait_for(lambda: http.get("/health").status_code == 200)
        with pytest.raises(EngineDead, match="died 3 times in a row"):
            server.wait(PATIENCE_S)


def test_pauses_grow_and_are_bounded() -> None:
    policy = RestartPolicy(first_pause_s=0.5, max_pause_s=3.0)
    assert [policy.pause_s(deaths) for deaths in range(1, 7)] == [0.0, 0.5, 1.0, 2.0, 3.0, 3.0]


def test_an_adapter_asked_for_by_name_that_is_not_there_starts_no_engine(tokenizer: Path, tmp_path: Path) -> None:
    server = BackgroundServer(
        engine_config(tokenizer),
        ServerConfig(port=0),
        [LoraModule("sql", str(tmp_path / "sql"))],
        builder="reciter:breaking_parts",
    )
    with pytest.raises(AdapterNotFound, match=r"adapter 'sql': there is no directory '.*sql'"), server:
        pytest.fail("it started")


def test_files_where_the_server_was_started_are_not_imported(
    tokenizer: Path, lora_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "queue.py").write_text("raise ImportError('the wrong queue')")
    monkeypatch.chdir(tmp_path)
    with two_processes(tokenizer, lora_dir) as server:
        assert httpx.get(f"{server.url}/health").status_code == 200


def test_an_engine_that_cannot_be_built_is_an_error_at_start(tokenizer: Path, lora_dir: Path) -> None:
    with (
        pytest.raises(ConfigError, match="this engine refuses"),
        two_processes(tokenizer, lora_dir, builder="reciter:refusing_parts"),
    ):
        pytest.fail("it started")
    with (
        pytest.raises(EngineDead, match="exit code 1 before it was ready"),
        two_processes(tokenizer, lora_dir, builder="reciter:breaking_parts"),
    ):
        pytest.fail("it started")


SERVE = """
import sys
from pathlib import Path
from reciter import engine_config
from manylora.core.config import ServerConfig
from manylora.core.server_config import FleetConfig
from manylora.serving.server.serve import run
config = ServerConfig(port=0, drain_timeout_s=60, fleet=FleetConfig(replicas=int(sys.argv[2])))
sys.exit(run(engine_config(Path(sys.argv[1])), config, builder="reciter:held_parts"))
"""


@contextmanager
def command(tokenizer: Path, num_replicas: int = 1) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server run as the command line runs it, and its URL."""
    arguments = [sys.executable, "-c", SERVE, str(tokenizer), str(num_replicas)]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line.startswith("manylora serves base with 0 adapters at http://127.0.0.1:")
        yield process, line.split()[-1]
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def engines_of(process: subprocess.Popen[str]) -> list[int]:
    return [int(child.pid) for child in psutil.Process(process.pid).children()]


def engine_of(process: subprocess.Popen[str]) -> int:
    (engine,) = engines_of(process)
    return engine


def test_sigterm_drains_and_exits_zero(tokenizer: Path, gate: Gate) -> None:
    with command(tokenizer) as (process, url), httpx.Client(base_url=url, timeout=30) as http:
        engine = engine_of(process)
        body = {"model": "base", "prompt": "say", "max_tokens": 12, "stream": True}
        with http.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            wait_for(lambda: httpx.get(url + "/health", timeout=30).status_code == 503)
            refused = http.post("/v1/completions", json={"model": "base", "prompt": "x"})
            assert refused.status_code == 503
            assert int(refused.headers["retry-after"]) >= 1
            gate.open()
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2][6:])["choices"][0]["finish_reason"] == "length"
        assert process.wait(PATIENCE_S) == 0
        assert is_gone(engine)


def test_a_second_signal_exits_at_once(tokenizer: Path, gate: Gate) -> None:
    with command(tokenizer) as (process, url), httpx.Client(base_url=url, timeout=30) as http:
        engine = engine_of(process)
        body = {"model": "base", "prompt": "say", "max_tokens": 200, "stream": True}
        with http.stream("POST", "/v1/completions", json=body) as answer:
            next(answer.iter_lines())
            process.send_signal(signal.SIGTERM)
            wait_for(lambda: httpx.get(url + "/health", timeout=30).status_code == 503)
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE_S / 2) != 0, "it waited for the answer"
        wait_for(lambda: is_gone(engine))


def test_no_engine_outlives_its_server(tokenizer: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even one that is stopped; and no sockets are left, which a killed process could not remove."""
    with tempfile.TemporaryDirectory(prefix="m") as folder:
        monkeypatch.setenv("TMPDIR", folder)  # of a short path, since sockets have a longest one
        with command(tokenizer, num_replicas=3) as (process, _):
            engines = engines_of(process)
            assert len(engines) == 3
            wait_for(lambda: not list(Path(folder).iterdir()))
            os.kill(engines[0], signal.SIGSTOP)
            process.kill()
            process.wait()
            wait_for(lambda: all(map(is_gone, engines)))
