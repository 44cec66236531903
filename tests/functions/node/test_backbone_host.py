"""A backbone whose holder has ended, and cannot be started again at once."""

from __future__ import annotations

import asyncio
import errno
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from manylora.functions.deployment import BackboneSpec
from manylora.functions.node.backbone_host import BackboneHost
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
        host._holder = cast(Any, SimpleNamespace(terminate=lambda: None, wait=wait))
        await host.release()
        assert host.num_bytes == 0

    asyncio.run(scenario())
    assert not held
