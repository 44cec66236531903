"""Faults of the machine around the server: stopped processes, no file descriptors."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import psutil
from attack_target import PATIENCE_S, Target, half_sent, running

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


def test_a_server_without_descriptors_outlives_its_engine_and_one_that_is_stopped(tmp_path: Path) -> None:
    """Half-sent requests take every connection, then the engine dies: its successor has files to start with.

    The successor is stopped while it starts: it is replaced as well.
    """
    with running(tmp_path, "--start-timeout", "15", num_files=NUM_FILES) as target:
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
