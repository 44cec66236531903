"""The zygote, ``python -m manylora.functions.processes.zygote_process``: it has imported everything, and forks.

Importing torch and transformers takes seconds, a fork of a process that has them milliseconds. The zygote never reads a
tenant's byte and never runs an OpenMP region of two threads: a child would wait for threads that it does not have.

Forks begin with all modules imported, kernels compiled, and no page of a file in memory: most of a library is read
once, while it is imported. A function ends with its zygote.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import mmap
import os
import re
import resource
import selectors
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NoReturn

import msgspec

from manylora.core.clock import WallClock
from manylora.core.config import EngineConfig, MemoryConfig
from manylora.core.isolation.cgroups import Cgroup, cpu_group_of, remove_groups_of_the_dead
from manylora.core.isolation.confine import Measure
from manylora.core.isolation.namespaces import NEW_PROCESSES, enter_namespaces
from manylora.core.isolation.system import adopt_orphans, end_with_parent
from manylora.core.logs import configure_logging
from manylora.execution.imports import import_model_classes
from manylora.functions.processes.function_process import MAX_TASKS, StartStages, live_builder, run_function
from manylora.functions.processes.messages import (
    MAX_PACKET_BYTES,
    Exited,
    Fork,
    Forked,
    FromZygote,
    Kill,
    ToZygote,
    Warm,
    ZygoteSetup,
)
from manylora.serving.hosting.engine.service import BuildParts, load_builder
from manylora.serving.hosting.engine.startup import limit_openmp_spin

__all__ = ["clean_mappings", "let_file_pages_go", "main"]

MAX_PID_CHARS = 16

GROUPS = "function"  # begins the names of its functions' control groups, before its process id
NUM_PAGES = 16  # pages of the engine that is built to warm the zygote

CACHED_PRIMITIVES = 16
"""Compiled products that a function keeps. Each new length of a prompt adds some, and each has hundreds of KiB."""

_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) ...p [0-9a-f]+ \S+ [1-9]\d* +/")
"""The line of a private mapping of a file."""

logger = logging.getLogger(__name__)

_decoder: msgspec.msgpack.Decoder[ToZygote] = msgspec.msgpack.Decoder(ToZygote)


class ZygoteProcess:
    """Forks functions on request, and reports their ends."""

    def __init__(self, setup: ZygoteSetup) -> None:
        self._setup = setup
        self._socket = socket.socket(fileno=setup.socket)
        self._alive = os.pidfd_open(os.getpid())
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._socket, selectors.EVENT_READ)
        self._pids: dict[int, int] = {}
        self._groups: dict[int, Cgroup] = {}

    def run(self) -> None:
        """Serve until the API process ends."""
        self._send(Warm())
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._socket:
                    if not self._take():
                        return
                else:
                    self._reap(key.fd, *key.data)

    def _take(self) -> bool:
        packet, descriptors, _, _ = socket.recv_fds(self._socket, MAX_PACKET_BYTES, 2)
        if not packet:
            return False
        match _decoder.decode(packet):
            case Fork() as fork:
                if len(descriptors) < 2:  # this process can open no more
                    for one in descriptors:
                        os.close(one)
                    self._refuse(fork, "its socket or its log did not arrive")
                    return True
                with socket.socket(fileno=descriptors[0]) as connection, open(descriptors[1], "wb", 0) as log:
                    try:
                        self._fork(fork, connection, log.fileno())
                    except OSError as error:  # threads or descriptors are used up: the other functions go on
                        self._refuse(fork, str(error))
            case Kill(number):
                if number in self._pids:
                    os.kill(self._pids[number], signal.SIGKILL)  # not reaped yet, so the number is still its own
        return True

    def _fork(self, fork: Fork, connection: socket.socket, log: int) -> None:
        group, measures = _make_group(fork)
        if group is not None:
            self._groups[fork.number] = group
        here, there = socket.socketpair()
        with here:
            with there:
                pid = os.fork()
                if pid == 0:
                    here.close()
                    self._be_function(fork, connection, log, there, group, measures)
            if told := here.recv(MAX_PID_CHARS):  # it is a child of the process that entered the namespace
                os.waitpid(pid, 0)
                pid = int(told)  # since that one's end, it is a child of this process
        try:
            process = os.pidfd_open(pid)
        except OSError:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise
        self._pids[fork.number] = pid
        self._selector.register(process, selectors.EVENT_READ, (fork.number, pid))
        packet = msgspec.msgpack.encode(Forked(fork.number, pid))
        socket.send_fds(self._socket, [packet], [process])

    def _be_function(
        self,
        fork: Fork,
        connection: socket.socket,
        log: int,
        zygote: socket.socket,
        group: Cgroup | None,
        measures: tuple[Measure, ...],
    ) -> NoReturn:
        """Serve in this process, or in a child that sees no process but itself; then end."""
        code = 1
        try:
            os.dup2(log, 1)
            os.dup2(log, 2)
            if group is not None:
                group.add(os.getpid())
            measures += (_enter_own_processes(zygote),)
            code = run_function(fork, connection, self._setup.backbone, self._builder_of(fork), self._alive, measures)
        except BaseException:
            logger.exception("function_failed")
        finally:
            os._exit(code)

    def _refuse(self, fork: Fork, reason: str) -> None:
        logger.error("fork_failed number=%d reason=%s", fork.number, reason)
        if (group := self._groups.pop(fork.number, None)) is not None:
            group.close()
        self._send(Exited(fork.number, 1))

    def _builder_of(self, fork: Fork) -> Callable[[StartStages], BuildParts]:
        if self._setup.builder is not None:
            build = load_builder(self._setup.builder)
            return lambda stages: build
        return partial(live_builder, num_threads=fork.engine.num_threads)

    def _reap(self, descriptor: int, number: int, pid: int) -> None:
        self._selector.unregister(descriptor)
        os.close(descriptor)
        _, status = os.waitpid(pid, 0)
        del self._pids[number]
        if (group := self._groups.pop(number, None)) is not None:
            group.close()
        self._send(Exited(number, os.waitstatus_to_exitcode(status)))

    def _send(self, message: FromZygote) -> None:
        self._socket.send(msgspec.msgpack.encode(message))


def _enter_own_processes(zygote: socket.socket) -> Measure:
    """Go on in a child that is the first process of a namespace; return whether it is, once the zygote is its parent.

    Numbers of processes of a namespace are for those that are forked after it was entered. The child must not end with
    its first parent, so it waits until the zygote has taken it over.
    """
    with zygote:
        try:
            note = enter_namespaces(NEW_PROCESSES)
        except OSError as error:
            return Measure("processes", False, str(error))
        if pid := os.fork():
            zygote.sendall(str(pid).encode())
            os._exit(0)
        zygote.recv(1)  # the end of the stream
    return Measure("processes", True, note)


def _make_group(fork: Fork) -> tuple[Cgroup | None, tuple[Measure, ...]]:
    """Return the control group of a function, if it is to have one and can; and whether it has.

    Without limits it has one for its share alone, where no service manager has put this process into another group: one
    that is idle yields at once, and a session within some milliseconds.
    """
    place, name = fork.place, f"{GROUPS}-{os.getpid()}-{fork.number}"
    if place.cgroup_bytes is None and place.cgroup_cpus is None:
        if cpu_group_of("self") is None:
            with contextlib.suppress(OSError):
                return Cgroup(name, has_share=True), ()
        return None, ()
    num_tasks = MAX_TASKS + (fork.engine.num_threads or 1)
    try:
        group = Cgroup(name, memory_bytes=place.cgroup_bytes, cpus=place.cgroup_cpus, num_tasks=num_tasks)
    except OSError as error:
        return None, (Measure("cgroup", False, str(error)),)
    return group, (Measure("cgroup", True),)


def _warm(setup: ZygoteSetup) -> None:
    """Import and compile all that functions need, without an OpenMP region of more than one thread."""
    if setup.builder is not None:
        load_builder(setup.builder)
    else:
        _build_an_engine(setup)
    gc.collect()
    gc.freeze()  # a collection in a child would write to every object, and so copy it
    let_file_pages_go()


def _build_an_engine(setup: ZygoteSetup) -> None:
    """Build and check one engine, for all: its modules are imported and its kernels compiled."""
    limit_openmp_spin()
    sys.modules.setdefault("triton", None)  # type: ignore[arg-type]  # as if it were not installed
    import torch

    torch.set_num_threads(1)
    import_model_classes()
    from manylora.execution.build import build_parts
    from manylora.execution.kernels.linear import bound_caches
    from manylora.execution.model.base_weights import map_weights
    from manylora.execution.storage.adapter_files import InlineReader

    bound_caches(CACHED_PRIMITIVES)
    backbone = setup.backbone
    live_builder(StartStages(0.0), 1)
    shared = replace(backbone.base, file=os.dup(backbone.base.file))
    config = EngineConfig(model=replace(backbone.model, max_model_len=None), memory=MemoryConfig(num_pages=NUM_PAGES))
    build_parts(config, WallClock(), weights=map_weights(shared), readers=[InlineReader()]).close()
    if threading.active_count() != 1:
        raise RuntimeError("the zygote has threads, whose locks its forks would inherit")


def let_file_pages_go() -> None:
    """Take the clean pages of private file mappings out of this process.

    The kernel keeps them in its cache, as any file's, and gives those back that are touched again. A fork inherits none
    of them either way.
    """
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    with Path("/proc/self/smaps").open() as lines:  # line by line: what is freed after a start is copied by every fork
        found = list(clean_mappings(lines))
    for begin, end in found:
        advise(begin, end - begin, mmap.MADV_DONTNEED)  # a refusal costs memory alone


def clean_mappings(smaps: Iterable[str]) -> Iterator[tuple[int, int]]:
    """Yield the addresses of private mappings of files of which no page was written: the others would lose that."""
    place: tuple[int, int] | None = None
    for line in smaps:
        if line[0] in "0123456789abcdef":
            found = _MAPPING.match(line)
            place = (int(found[1], 16), int(found[2], 16)) if found else None
        elif line.startswith("Anonymous:") and place is not None:
            if line.split()[1] == "0":
                yield place
            place = None


def main() -> int:
    """Run a zygote; return the exit code. It ends with the thread that started it, also while it is stopped."""
    end_with_parent()
    setup = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=ZygoteSetup)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1):  # functions have a log, and no more
        os.dup2(nowhere, descriptor)
    os.close(nowhere)
    configure_logging(setup.log_level, "function")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # one for each function
    remove_groups_of_the_dead(GROUPS)
    adopt_orphans()
    _warm(setup)
    ZygoteProcess(setup).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
