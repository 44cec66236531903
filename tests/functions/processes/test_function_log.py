"""The lines of a function reach the log under its name, at its share and no more."""

from __future__ import annotations

import asyncio
import logging
import os

import pytest

from manylora.functions.processes import link as link_module
from manylora.functions.processes.link import FunctionLog


async def read_all(log: FunctionLog, num_lines: int) -> list[str]:
    lines: list[str] = []
    async with asyncio.timeout(30.0):
        while len(lines) < num_lines:
            lines += log.take()
            await asyncio.sleep(0)
    return lines


def test_lines_have_the_functions_name_and_cannot_forge_another(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> list[str]:
        log = FunctionLog("ada")
        with open(log.open(), "wb", 0) as process:
            process.write(b"a traceb")
            await asyncio.sleep(0.01)
            process.write(b"ack\n\x1b[2Jcleared\r\nno utf-8: \xff\n" + b"long" * 2000 + b"\nunfinished")
        return await read_all(log, 5)

    with caplog.at_level(logging.WARNING, link_module.__name__):
        lines = asyncio.run(scenario())
    assert lines[:3] == ["a traceback", "\\x1b[2Jcleared\\r", "no utf-8: \\xff"]
    assert lines[-1] == "unfinished"
    assert max(map(len, lines)) == link_module.MAX_LINE_CHARS
    assert [record.getMessage() for record in caplog.records] == [
        f"function_says name=ada line={line}" for line in lines
    ]


def test_a_flood_is_cut_and_its_end_never_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "LOG_BYTES_PER_S", 1)

    async def scenario() -> int:
        log = FunctionLog("ada")
        num_lines = num_lost = 0
        with open(log.open(), "wb", 0) as process:
            for _ in range(100):
                num_lost += process.write(b"flood\n" * 600) is None  # the pipe is full
                for _ in range(3):
                    await asyncio.sleep(0)
                num_lines += len(log.take())
        assert num_lost > 50
        return num_lines

    burst = link_module.LOG_BURST_BYTES // link_module.LOG_LINE_BYTES
    assert 0 < asyncio.run(scenario()) < burst + link_module.LOG_CHUNK_BYTES


def test_the_pipe_of_a_process_that_ended_is_closed() -> None:
    async def scenario() -> None:
        before = len(os.listdir("/dev/fd"))
        log = FunctionLog("ada")
        with open(log.open(), "wb", 0) as process:
            process.write(b"last words\n")
        assert await read_all(log, 1) == ["last words"]
        await asyncio.sleep(0.01)
        assert len(os.listdir("/dev/fd")) == before

    asyncio.run(scenario())
