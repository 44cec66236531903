"""A backbone whose holder has ended or is stopped, and one whose start failed."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from manylora.core.errors import ConfigError
from manylora.functions.deployment import BackboneSpec
from manylora.functions.node.backbone_host import BackboneHost
from manylora.functions.processes.frames import in_memory
from manylora.functions.processes.holder import hold_command, holder_of
from manylora.functions.processes.messages import Backbone


def test_a_holder_that_cannot_be_started_now_is_started_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[bool] = []

    def popen(*_: object, **__: object) -> SimpleNamespace:
        tries.append(True)
        if len(tries) == 1:
            raise OSError(errno.EAGAIN, "no more processes")
        return SimpleNamespace(poll=lambda: None, returncode=None)

    monkeypatch.setattr(subprocess, "Popen", popen)
    monkeypatch.setattr(msgspec.msgpack, "encode", lambda given: b"")

    async def scenario() -> None:
        spec = BackboneSpec(model=str(tmp_path))
        host = BackboneHost("base", spec, tmp_path, parent_pipe=None, on_change=lambda: None)
        host._backbone = cast(Backbone, SimpleNamespace(base=SimpleNamespace(num_bytes=1, file=0)))
        for _ in range(3):
            host.tend()

    asyncio.run(scenario())
    assert len(tries) == 2


def test_a_holder_that_is_ended_is_not_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would hold the base for good: the release has counted its memory as free."""
    held: list[bool] = []

    async def scenario() -> None:
        host = BackboneHost("base", BackboneSpec(model=str(tmp_path)), tmp_path, parent_pipe=None, on_change=list)
        host._backbone = cast(Backbone, SimpleNamespace(base=SimpleNamespace(num_bytes=1, file=-1)))
        monkeypatch.setattr(host, "_hold", lambda: held.append(True))

        def wait() -> None:
            asyncio.run_coroutine_threadsafe(look(), loop).result(60.0)

        async def look() -> None:
            host.tend()

        loop = asyncio.get_running_loop()
        host._holder = cast(Any, SimpleNamespace(kill=lambda: None, wait=wait))
        await host.release()
        assert host.num_bytes == 0

    asyncio.run(scenario())
    assert not held


def test_a_holder_that_is_stopped_holds_up_no_release(tmp_path: Path) -> None:
    async def scenario() -> None:
        host = BackboneHost("base", BackboneSpec(model=str(tmp_path)), tmp_path, parent_pipe=None, on_change=list)
        path, memory = tmp_path / "backbone-base", os.memfd_create("base")
        with in_memory(b"") as stdin:
            holder = subprocess.Popen(hold_command(path, memory), stdin=stdin, pass_fds=[memory])
        try:
            async with asyncio.timeout(60.0):
                while holder_of(path) is None:
                    await asyncio.sleep(0.02)
                os.kill(holder.pid, signal.SIGSTOP)
                host._holder = holder
                host._backbone = cast(Backbone, SimpleNamespace(base=SimpleNamespace(num_bytes=1, file=memory)))
                await host.release()
        finally:
            holder.kill()
            holder.wait()
        assert not path.exists()

    asyncio.run(scenario())


def test_a_start_that_failed_unseen_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The function that waited for it was removed meanwhile."""
    goes_on = asyncio.Event()
    starts: list[bool] = []

    async def start() -> str:
        starts.append(True)
        if len(starts) == 1:
            await goes_on.wait()
            raise ConfigError("no such file")
        return "a zygote"

    async def scenario() -> None:
        host = BackboneHost("base", BackboneSpec(model=str(tmp_path)), tmp_path, parent_pipe=None, on_change=list)
        monkeypatch.setattr(host, "_start", start)
        waiting = asyncio.create_task(host.ready())
        await asyncio.sleep(0.0)
        assert host.state == "loading"
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        goes_on.set()
        for _ in range(10):
            await asyncio.sleep(0.0)
        assert host.state == "failed"
        assert cast(str, await host.ready()) == "a zygote"

    asyncio.run(scenario())
