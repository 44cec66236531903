"""The messages that start functions, and their framing on sockets.

::

    backbone --> reader      one frame (``Backbone``), with the descriptor of the sealed memory
    API ----> zygote         ``Fork`` with the function's socket, ``Kill``; one packet each
    zygote -> API            ``Warm``, ``Forked``, ``Exited``; one packet each
    API <---> function       frames of ``hosting.protocol``, on a socket that both ends inherited

A frame is its length in four bytes, then msgpack. A longer one than ``MAX_FRAME_BYTES`` ends the connection.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from manylora.core.config import ModelConfig
from manylora.core.isolation import Confinement
from manylora.core.ports import SharedBase
from manylora.serving.hosting.protocol import EngineSpec

__all__ = [
    "MAX_PACKET_BYTES",
    "Backbone",
    "Exited",
    "Fork",
    "Forked",
    "FromZygote",
    "Kill",
    "ToZygote",
    "Warm",
    "ZygoteSetup",
]

MAX_PACKET_BYTES = 64 << 10


class Backbone(msgspec.Struct, frozen=True, kw_only=True):
    """A base that is sealed in memory; ``base.file`` is valid in the process that holds this.

    Args:
        model: The model as it was loaded; its folder is read again for configuration and tokenizer.
    """

    model: ModelConfig
    base: SharedBase


class ZygoteSetup(msgspec.Struct, frozen=True, kw_only=True):
    """The set-up of a zygote, on its standard input.

    Args:
        socket: Descriptor of its end of the socket for forks.
        backbone: The base of all its functions.
        builder: Builds the parts of its functions' engines; ``None`` for live ones.
        log_level: Level of its log, and its functions', on standard error.
    """

    socket: int
    backbone: Backbone
    builder: str | None
    log_level: int


class Fork(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Fork a function, with the socket and the pipe for its log that come along.

    Args:
        number: Names the function in later messages.
        engine: Its engine.
        confinement: Its place; libraries, the base and its socket are added.
        cgroup_bytes: Most memory of its control group; ``None`` for no group of its own.
        cgroup_cpus: Most processors of the group.
        asked_at: Monotonic time of the request, in seconds.
    """

    number: int
    engine: EngineSpec
    confinement: Confinement
    cgroup_bytes: int | None
    cgroup_cpus: float | None
    asked_at: float


class Kill(msgspec.Struct, frozen=True, tag=True):
    """End a function at once; ``Exited`` follows."""

    number: int


class Warm(msgspec.Struct, frozen=True, tag=True):
    """The zygote has imported everything and forks from now on."""


class Forked(msgspec.Struct, frozen=True, tag=True):
    """A function's process exists; its descriptor comes along."""

    number: int
    pid: int


class Exited(msgspec.Struct, frozen=True, tag=True):
    """A function's process has ended, with an exit code, or minus the number of a signal; or it could not be forked."""

    number: int
    code: int


ToZygote: TypeAlias = Fork | Kill
FromZygote: TypeAlias = Warm | Forked | Exited
