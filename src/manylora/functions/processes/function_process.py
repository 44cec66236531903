"""A function process, from its fork on: it is confined before it reads a byte of its tenant's.

::

    zygote --fork--> reseed, confine --> map the base, build the engine --> Ready --> commands --> its adapter, requests

It has one socket, and ends with it.
"""

from __future__ import annotations

import gc
import logging
import os
import random
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import msgspec

from manylora.core.clock import Clock, WallClock
from manylora.core.config import EngineConfig, ModelConfig
from manylora.core.errors import ConfigError
from manylora.core.isolation.cgroups import enter_own_share
from manylora.core.isolation.confine import READABLE_OF_SYSTEM, Confinement, Measure, confine
from manylora.core.ports import EngineParts, SharedBase
from manylora.functions.processes.frames import frame, frames_of
from manylora.functions.processes.messages import Backbone, Fork, FunctionPlace
from manylora.serving.hosting.engine.service import BuildParts, EngineService
from manylora.serving.hosting.protocol import Fault, Message, Ready, StartRefused, StartReport, decode_command, encode

__all__ = ["MAX_TASKS", "PACKAGE", "StartStages", "live_builder", "run_function", "shared_folders"]

PACKAGE = Path(__file__).resolve().parents[2]

MAX_TASKS = 256  # most threads of a function, beside those that compute

logger = logging.getLogger(__name__)


class StartStages:
    """Times the stages of a start; each ends with ``note``."""

    def __init__(self, began_at: float) -> None:
        self.took_s: dict[str, float] = {}
        self.is_over = False
        self._at = began_at

    def note(self, stage: str) -> None:
        """Record the end of a stage; it began when the stage before it ended."""
        now = time.monotonic()
        self.took_s[stage] = now - self._at
        self._at = now


def run_function(
    fork: Fork,
    connection: socket.socket,
    backbone: Backbone,
    make_builder: Callable[[StartStages], BuildParts],
    zygote: int,
    taken: tuple[Measure, ...],
) -> int:
    """Serve one function on ``connection`` until it closes; return the exit code. Called once, right after the fork.

    It ends with the process ``zygote``, a descriptor, and reports the measures that the zygote has ``taken``.
    """
    stages = StartStages(fork.asked_at)
    stages.note("fork")
    _reseed()
    place = _confinement(fork.place, backbone, (connection.fileno(), zygote), fork.engine.num_threads or 1)
    measures = (*taken, _memory_limit(fork, taken), _own_share(), *confine(place))
    if _has_ended(zygote):
        return 1
    os.close(zygote)
    stages.note("confine")
    service = EngineService(
        msgspec.structs.replace(fork.engine, builder=make_builder(stages)),
        clock=WallClock(),
        send=partial(_send, connection, stages, measures),
        base=backbone.base,
    )
    threading.Thread(target=_receive, args=(connection, service), name="commands", daemon=True).start()
    try:
        return 0 if service.run() else 3
    except Exception as error:
        logger.exception("function_broke")
        if isinstance(error, PermissionError) and not stages.is_over:
            refused = StartRefused(Fault.of(ConfigError(_closed_to(error, fork.place.uid))))
            _send(connection, stages, measures, refused)
        return 1


def live_builder(stages: StartStages, num_threads: int | None) -> BuildParts:
    """Return the builder of a live engine that maps the base and starts no process."""
    import torch

    from manylora.execution.build import build_parts
    from manylora.execution.model.base_weights import map_weights
    from manylora.execution.storage.adapter_files import InlineReader

    def build(config: EngineConfig, clock: Clock, *, shared: SharedBase) -> EngineParts:
        torch.set_num_threads(num_threads or 1)
        torch.seed()
        weights = map_weights(shared)
        stages.note("map")
        is_checked = True  # by the zygote
        return build_parts(config, clock, weights=weights, readers=[InlineReader()], is_checked=is_checked)

    return build


def _memory_limit(fork: Fork, taken: tuple[Measure, ...]) -> Measure:
    """Return whether anything bounds the function's memory: its address space, or a control group."""
    has_group = fork.place.cgroup_bytes is not None and Measure("cgroup", True) in taken
    if fork.place.memory_bytes is not None or has_group:
        return Measure("memory_limit", True)
    return Measure("memory_limit", False, "neither memory-bytes nor cgroup-bytes bounds it")


def _own_share() -> Measure:
    """Return whether threads of the function take no more than its share of the processors."""
    try:
        enter_own_share()
    except OSError as error:
        return Measure("share", False, str(error))
    return Measure("share", True)


def shared_folders(model: ModelConfig) -> list[str]:
    """Return the folders that every function on a base may read: Python with its libraries, the base, the tokenizer."""
    return sorted({sys.prefix, sys.base_prefix, model.model} | ({model.tokenizer} if model.tokenizer else set()))


def _has_ended(process: int) -> bool:
    """Whether a process has ended; its number says nothing in a namespace that it is not in."""
    ends = select.poll()
    ends.register(process, select.POLLIN)
    return bool(ends.poll(0))


def _confinement(place: FunctionPlace, backbone: Backbone, kept: Sequence[int], num_threads: int) -> Confinement:
    """Return the confinement of a place, with the folders and descriptors that every function needs."""
    return Confinement(
        readable=[*READABLE_OF_SYSTEM, str(PACKAGE), *shared_folders(backbone.model), *place.readable],
        uid=place.uid,
        keep_fds=(0, 1, 2, *kept, backbone.base.file),
        memory_bytes=place.memory_bytes,
        num_tasks=MAX_TASKS + num_threads,
        has_own_root=True,
        ends_with_parent=True,
    )


def _closed_to(error: PermissionError, uid: int | None) -> str:
    user = "its user" if uid is None else f"user {uid}"
    return f"Got {error.filename!r}, which {user} of the isolated function may not read: open it and its folders to all"


def _reseed() -> None:
    """Give this process random numbers of its own: forks start with the zygote's."""
    import numpy as np

    random.seed()
    np.random.seed()


def _send(connection: socket.socket, stages: StartStages, measures: tuple[Measure, ...], message: Message) -> None:
    """Send a message; an API process that is far behind holds this function up, and no other."""
    if isinstance(message, Ready):
        stages.note("build")
        stages.is_over = True
        message = Ready(message.info, start=StartReport(took_s=stages.took_s, measures=measures))
        gc.freeze()
    try:
        connection.sendall(frame(encode(message)))
    except OSError:
        os._exit(4)  # the API process has gone


def _receive(connection: socket.socket, service: EngineService) -> None:
    try:
        for body in frames_of(connection.recv):
            service.handle(decode_command(body))
    finally:
        os._exit(4)
