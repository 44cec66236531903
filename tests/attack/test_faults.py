"""Faults of the machine around the server: stopped processes, no file descriptors."""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from attack_target import PATIENCE_S, START_S, Target, half_sent, running
from safetensors.numpy import load_file, save_file

from manylora.demo import demo_model_path

NUM_FILES = 256


def wait_for_engine(target: Target, *known: psutil.Process) -> psutil.Process:
    """Return the engine's process, once there is one that is not known."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        engines = [one for one in target.engines() if one not in known]
        if engines:
            return engines[0]
        assert time.monotonic() < deadline, "no engine was started"
        time.sleep(0.02)


def wait_for_report(target: Target, holds: Callable[[dict[str, Any]], bool]) -> None:
    """Return when something holds by ``/status``."""
    deadline = time.monotonic() + PATIENCE_S
    while not holds(json.loads(target.ask("GET", "/status").body)):
        assert time.monotonic() < deadline, target.log.read_text()[-4000:]
        time.sleep(0.05)


def test_a_server_without_descriptors_outlives_its_engine_and_one_that_is_stopped(tmp_path: Path) -> None:
    """Half-sent requests take every connection, then the engine dies: its successor has files to start with.

    The successor is stopped while it starts: it is replaced as well.
    """
    with running(tmp_path, "--start-timeout", "8", num_files=NUM_FILES) as target:
        first = wait_for_engine(target)
        with contextlib.ExitStack() as stack:
            for one in half_sent(target, 2 * NUM_FILES):
                stack.enter_context(one)
            first.kill()
            second = wait_for_engine(target, first)
            second.suspend()
        wait_for_engine(target, first, second)
        target.wait_until(200)
        assert not second.is_running()


def test_an_engine_that_is_stopped_while_it_starts_ends_the_start(tmp_path: Path) -> None:
    with running(tmp_path, "--start-timeout", "2", waits=False) as target:
        wait_for_engine(target).suspend()
        assert target.process.wait(PATIENCE_S) != 0
        assert "did not start within 2 s" in target.log.read_text()


def test_reports_are_read_while_answers_of_an_unloaded_adapter_move_to_another_engine(tmp_path: Path) -> None:
    """An adapter is unloaded under its streams and an engine dies: each read is answered, and the other one goes on."""
    settings = {"peft_type": "LORA", "r": 16, "lora_alpha": 16, "target_modules": ["q_proj"]}
    (tmp_path / "gone").mkdir()
    (tmp_path / "gone" / "adapter_config.json").write_text(json.dumps(settings))
    shared_out = ("--replicas", "2", "--router", "least-loaded")
    with running(tmp_path, *shared_out, "--lora-modules", f"gone={tmp_path / 'gone'}") as target:
        body = {"model": "gone", "prompt": "the birds", "max_tokens": 200, "ignore_eos": True, "stream": True}
        wait_for_report(target, lambda report: all(row["state"] == "serving" for row in report["replicas"]))
        with contextlib.ExitStack() as stack:
            streams = [target.begin("/v1/completions", body) for _ in range(12)]
            answers = [stack.enter_context(contextlib.closing(one)).getresponse() for one in streams]
            assert all(answer.status == 200 and answer.readline() for answer in answers)
            assert target.post("/v1/unload_lora_adapter", {"lora_name": "gone"}).status == 200
            killed, other = target.engines()
            killed.kill()
            wait_for_report(target, lambda report: report["resumes"]["num_resumed"] > 0)
            for path in ("/metrics", "/status", "/status?adapters=1", "/v1/models", "/adapters", "/health"):
                assert target.ask("GET", path).status == 200
            ends = [answer.read().rstrip().splitlines()[-3:] for answer in answers]
        assert [end[-1] for end in ends] == [b"data: [DONE]"] * 12
        assert not any(b"error" in event for end in ends for event in end)
        assert other.is_running()


def test_a_base_without_a_tensor_is_never_served(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(demo_model_path(), tmp_path / "base"))
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with running(tmp_path, model=(str(folder),), waits=False) as target:
        assert target.process.wait(START_S) == 2
        log = target.log.read_text()
    assert "model.safetensors lacks tensor 'model.layers.1.mlp.up_proj.weight'" in log.splitlines()[-1]
    assert "Traceback" not in log
