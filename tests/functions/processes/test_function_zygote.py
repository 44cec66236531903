"""A zygote at its limits, and the ends of functions whose zygote is lost."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from manylora.core.config import EngineConfig, ModelConfig
from manylora.core.errors import EngineDead
from manylora.core.isolation.cgroups import remove_groups_of_the_dead
from manylora.core.ports import SharedBase
from manylora.functions.processes import zygote as zygote_module
from manylora.functions.processes.frames import in_memory
from manylora.functions.processes.link import FunctionLink
from manylora.functions.processes.messages import Backbone, Exited, Fork, FromZygote, FunctionPlace, Kill, Warm
from manylora.functions.processes.zygote import ForkedFunction, Zygote
from manylora.functions.processes.zygote_process import ZygoteProcess, clean_mappings
from manylora.serving.hosting.protocol import EngineSpec

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="functions run on Linux")

ENGINE = EngineSpec(config=EngineConfig(model=ModelConfig(model="m")), served_name="base", builder="")


def sleeper() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])


def fork_packet(number: int) -> bytes:
    return msgspec.msgpack.encode(Fork(number=number, engine=ENGINE, place=FunctionPlace(readable=[]), asked_at=0.0))


def test_a_zygote_that_can_fork_no_more_says_so_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    process = sleeper()
    forks: list[object] = [BlockingIOError(11, "Resource temporarily unavailable"), process.pid]

    def fork() -> object:
        result = forks.pop(0)
        if isinstance(result, OSError):
            raise result
        return result

    pidfd_open = os.pidfd_open

    def guarded(pid: int) -> int:
        if pid == process.pid:
            raise OSError(24, "Too many open files")
        return pidfd_open(pid)

    monkeypatch.setattr(os, "fork", fork)
    monkeypatch.setattr(os, "pidfd_open", guarded)
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with here, socket.socket() as connection:
        here.send(fork_packet(1))  # its socket was lost
        socket.send_fds(here, [fork_packet(2)], [connection.fileno()])  # its log was lost
        for number in (3, 4):
            socket.send_fds(here, [fork_packet(number)], [connection.fileno(), sys.__stderr__.fileno()])
        here.shutdown(socket.SHUT_WR)
        zygote = ZygoteProcess(cast(Any, SimpleNamespace(socket=there.detach(), builder=None)))
        with zygote._socket, zygote._selector:
            zygote.run()
        told = [msgspec.msgpack.decode(here.recv(1 << 16), type=FromZygote) for _ in range(5)]
    assert told == [Warm(), *(Exited(number, 1) for number in (1, 2, 3, 4))]
    assert not forks
    with pytest.raises(ChildProcessError):  # killed and reaped
        os.waitpid(process.pid, 0)
    process.wait()


def test_a_function_that_outlives_its_zygote_is_killed_and_its_end_waited_for() -> None:
    async def scenario() -> None:
        process = sleeper()
        function = ForkedFunction(1, pid=process.pid, process=os.pidfd_open(process.pid))
        unborn = ForkedFunction(2)
        zygote = Zygote(cast(Any, None))
        zygote._functions = {1: function, 2: unborn}
        zygote._lose("it was killed")
        assert unborn.exited.done()
        assert not function.exited.done()
        assert await asyncio.wait_for(function.exited, 60.0) is None
        assert process.wait() == -signal.SIGKILL
        assert function.process is None

    asyncio.run(scenario())


def test_a_function_is_killed_while_its_zygote_is_stopped() -> None:
    async def scenario() -> None:
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with here, there:  # nothing reads what it is told
            zygote = Zygote(cast(Any, None))
            zygote._socket = here
            with sleeper() as process:
                function = ForkedFunction(1, pid=process.pid, process=os.pidfd_open(process.pid))
                zygote.kill(function)
                try:
                    assert process.wait(60.0) == -signal.SIGKILL
                finally:
                    process.kill()
            zygote.kill(function)  # it has ended, and the zygote has not said so
            function.end(None)
            zygote.kill(ForkedFunction(2))  # it is not forked yet
            assert msgspec.msgpack.decode(there.recv(1 << 16), type=Kill) == Kill(2)

    asyncio.run(scenario())


def test_a_burst_of_functions_waits_for_a_zygote_that_is_behind() -> None:
    async def scenario() -> None:
        zygote = Zygote(cast(Any, None))
        zygote._warm = asyncio.get_running_loop().create_future()
        zygote._warm.set_result(None)
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        zygote._socket = here
        here.setblocking(False)
        with here, there, socket.socket() as connection, open(os.devnull, "wb") as log:
            place = FunctionPlace(readable=[])
            forks = [asyncio.create_task(zygote.fork(ENGINE, connection, log.fileno(), place)) for _ in range(300)]
            await asyncio.sleep(0.01)
            assert not all(one.done() for one in forks)  # the socket is full
            for _ in forks:
                _, descriptors, *_ = await asyncio.to_thread(socket.recv_fds, there, 1 << 16, 2)
                for one in descriptors:
                    os.close(one)
            assert len({one.number for one in await asyncio.gather(*forks)}) == 300

    asyncio.run(scenario())


def test_a_start_that_is_cancelled_as_the_zygote_becomes_warm_does_not_go_on() -> None:
    async def scenario() -> None:
        zygote = Zygote(cast(Any, None))
        zygote._warm = asyncio.get_running_loop().create_future()
        starting = asyncio.create_task(zygote.start())
        await asyncio.sleep(0)
        zygote._warm.set_result(None)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting

    asyncio.run(scenario())


def test_a_process_gives_its_user_back_once_it_has_ended() -> None:
    class Forks:
        def __init__(self) -> None:
            self.function: ForkedFunction | None = ForkedFunction(1)

        async def fork(self, *_: object, **__: object) -> ForkedFunction:
            if self.function is None:
                raise EngineDead("no zygote")
            return self.function

        def kill(self, function: ForkedFunction) -> None:
            """Stand for a process that takes long to end."""

    async def scenario() -> None:
        forks = Forks()
        given: list[int] = []

        def link(number: int) -> FunctionLink:
            return FunctionLink(
                ENGINE, cast(Zygote, forks), FunctionPlace(readable=[]), on_gone=lambda: given.append(number)
            )

        slow = link(1)
        await slow.start(lambda messages: None)
        stopping = asyncio.create_task(slow.stop())
        for _ in range(20):
            await asyncio.sleep(0)
        assert not given
        assert forks.function is not None
        forks.function.end(-9)
        await stopping
        assert given == [1]
        forks.function = None
        with pytest.raises(EngineDead):
            await link(2).start(lambda messages: None)
        assert given == [1, 2]
        await asyncio.sleep(0)

    asyncio.run(scenario())


def test_a_zygote_that_hangs_is_killed_and_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = Zygote._launch

    def launch_stopped(zygote: Zygote) -> None:
        launch(zygote)
        assert zygote.pid is not None
        os.kill(zygote.pid, signal.SIGSTOP)

    monkeypatch.setattr(Zygote, "_launch", launch_stopped)
    monkeypatch.setattr(zygote_module, "WARM_TIMEOUT_S", 0.0)
    file = os.memfd_create("base")
    base = SharedBase(file=file, num_bytes=0, manifest=b"")

    async def scenario() -> None:
        zygote = Zygote(Backbone(model=ModelConfig(model="m"), base=base))
        with pytest.raises(EngineDead, match="not warm"):
            await zygote.start()
        assert zygote.pid is None
        # One that is warm and hangs at a fork.
        process = zygote._process = sleeper()
        zygote._check_forked(ForkedFunction(1, pid=5), process)
        assert process.poll() is None
        zygote._functions[2] = function = ForkedFunction(2)
        zygote._check_forked(function, process)
        assert process.returncode == -signal.SIGKILL
        assert function.exited.result() is None
        assert zygote.pid is None

    try:
        asyncio.run(scenario())
    finally:
        os.close(file)


def test_a_loader_ends_with_the_agent_that_started_it(tmp_path: Path) -> None:
    """The agent is killed; the loader reads from a pipe that this process holds open, and would wait for ever."""
    os.mkfifo(tmp_path / "pipe")
    agent = subprocess.Popen(
        [
            *(sys.executable, "-c"),
            "import subprocess, sys, signal\n"
            "from manylora.functions.processes.backbone import load_command\n"
            "command = load_command([])\n"
            "place = command.index('-m')\n"
            "code = 'import runpy, sys; runpy.run_module = lambda *a, **k: open(sys.argv[-1]).read();'\n"
            "code += 'from manylora.functions.processes import backbone; sys.exit(backbone.main())'\n"
            "command[place:place + 2] = ['-c', code]\n"
            f"print(subprocess.Popen([*command, {str(tmp_path / 'pipe')!r}]).pid, flush=True)\n"
            "signal.pause()\n",
        ],
        stdout=subprocess.PIPE,
    )
    assert agent.stdout is not None
    with agent.stdout, open(tmp_path / "pipe", "wb"):  # open for writing returns once the loader reads
        loader = os.pidfd_open(int(agent.stdout.readline()))
        agent.kill()
        agent.wait()
        ends = select.poll()
        ends.register(loader, select.POLLIN)
        assert ends.poll(60_000)
        os.close(loader)


def test_a_zygote_that_is_stopped_ends_with_its_agent() -> None:
    """It holds the base, and the functions that it forked."""
    zygote = (
        "import signal, sys\n"
        "from manylora.functions.processes import zygote_process\n"
        "zygote_process._warm = lambda setup: print('warm', file=sys.stderr, flush=True)\n"
        "zygote_process.remove_groups_of_the_dead = lambda name: None\n"
        "zygote_process.ZygoteProcess = lambda setup: signal.pause()\n"
        "zygote_process.main()\n"
    )
    agent = (
        "import signal, subprocess, sys, os, msgspec\n"
        "from manylora.functions.processes.messages import Backbone, ZygoteSetup\n"
        "from manylora.core.config import ModelConfig\n"
        "from manylora.core.ports import SharedBase\n"
        "base = SharedBase(file=0, num_bytes=0, manifest=b'')\n"
        "base = Backbone(model=ModelConfig(model='m'), base=base)\n"
        "setup = msgspec.msgpack.encode(ZygoteSetup(socket=0, backbone=base, builder=None, log_level=30))\n"
        f"command = [sys.executable, '-c', {zygote!r}]\n"
        "zygote = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE)\n"
        "zygote.stdin.write(setup); zygote.stdin.close()\n"
        "while b'warm' not in zygote.stderr.readline(): pass\n"
        "print(zygote.pid, flush=True)\n"
        "signal.pause()\n"
    )
    with subprocess.Popen([sys.executable, "-c", agent], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        stopped = os.pidfd_open(pid)
        try:
            os.kill(pid, signal.SIGSTOP)
            process.kill()
            ends = select.poll()
            ends.register(stopped, select.POLLIN)
            assert ends.poll(60_000)
        finally:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(stopped, signal.SIGKILL)
            os.close(stopped)


def test_a_long_set_up_is_written_without_a_reader() -> None:
    """The table of a large model exceeds a pipe: its writer would wait for the imports of the child."""
    body = os.urandom(1 << 20)
    with in_memory(body) as stdin:
        child = subprocess.Popen(["cat"], stdin=stdin, stdout=subprocess.PIPE)
    assert child.communicate()[0] == body


def test_control_groups_of_a_zygote_that_was_killed_are_removed(tmp_path: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    mine, lost = (tmp_path / f"manylora-function-{pid}-1" for pid in (os.getpid(), ended.pid))
    old, other = tmp_path / "memory" / lost.name, tmp_path / f"manylora-engine-{ended.pid}-1"
    for folder in (mine, lost, old, other):
        folder.mkdir(parents=True)
    remove_groups_of_the_dead("function", tmp_path)
    assert [folder.exists() for folder in (mine, lost, old, other)] == [True, False, False, True]


def test_pages_of_libraries_leave_a_process_that_goes_on() -> None:
    script = (
        "import numpy\n"
        "from manylora.functions.processes.zygote_process import let_file_pages_go\n"
        "def kib():\n"
        "    lines = [line.split() for line in open('/proc/self/smaps_rollup')][1:]\n"
        "    sizes = {line[0]: int(line[1]) for line in lines if line[-1] == 'kB'}\n"
        "    return sizes['Shared_Clean:'] + sizes['Private_Clean:'], sizes['Anonymous:']\n"
        "files, own = kib()\n"
        "let_file_pages_go()\n"
        "files_after, own_after = kib()\n"
        "assert files_after < files / 2, (files, files_after)\n"
        "assert own_after >= own\n"
        "print(numpy.ones((64, 64)).dot(numpy.ones(64)).sum())\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.stdout == "4096.0\n", done.stderr


def test_only_mappings_of_files_without_written_pages_are_clean() -> None:
    smaps = [
        "10000-20000 r-xp 00000000 08:01 42    /usr/lib/a.so",
        "Rss:                  64 kB",
        "Anonymous:             0 kB",
        "20000-30000 r--p 00000000 08:01 42    /usr/lib/a.so",
        "Anonymous:             4 kB",
        "30000-40000 rw-p 00000000 00:00 0     [heap]",
        "Anonymous:             0 kB",
        "40000-50000 r--s 00000000 00:01 7     /memfd:manylora-weights (deleted)",
        "Anonymous:             0 kB",
        "a0000-b0000 r--p 00000000 08:01 43    /usr/lib/b.so",
        "Anonymous:             0 kB",
    ]
    assert list(clean_mappings(smaps)) == [(0x10000, 0x20000), (0xA0000, 0xB0000)]
