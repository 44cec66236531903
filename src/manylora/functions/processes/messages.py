"""The messages that start functions; each is one msgpack object.

::

    holder --> reader        one frame (``Backbone``), with the descriptor of the sealed memory
    API ----> zygote         ``Fork`` with the function's socket and the pipe of its log, ``Kill``; one packet each
    zygote -> API            ``Warm``, ``Forked``, ``Exited``; one packet each
    API <---> function       frames of ``hosting.protocol``, on a socket that both ends inherited
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from manylora.core.config import ModelConfig
from manylora.core.errors import ConfigError
from manylora.core.ports import SharedBase
from manylora.serving.hosting.protocol import EngineSpec

__all__ = [
    "MAX_PACKET_BYTES",
    "Backbone",
    "Exited",
    "Fork",
    "Forked",
    "FromZygote",
    "FunctionPlace",
    "Kill",
    "ToZygote",
    "Warm",
    "ZygoteSetup",
]

MAX_PACKET_BYTES = 64 << 10


class Backbone(msgspec.Struct, frozen=True, kw_only=True):
    """A base that is sealed in memory; ``base.file`` is valid in the process that holds this."""

    model: ModelConfig  # the model as it was loaded; its folder is read again for configuration and tokenizer
    base: SharedBase


class ZygoteSetup(msgspec.Struct, frozen=True, kw_only=True):
    """The set-up of a zygote, on its standard input."""

    socket: int  # descriptor of its end of the socket for forks
    backbone: Backbone
    builder: str | None  # builds the parts of its functions' engines; ``None`` for live ones
    log_level: int  # level of its log, and its functions', on standard error


class FunctionPlace(msgspec.Struct, frozen=True, kw_only=True):
    """The files, the user and the limits of a function's process; libraries and the base are added to the files."""

    readable: list[str]  # folders of its adapter
    uid: int | None = None  # user to become, if this process is root; no other process should have it
    memory_bytes: int | None = None  # most address space that it may add to the zygote's; ``None`` for no limit
    cgroup_bytes: int | None = None  # most memory of a control group of its own; ``None`` for no limit
    cgroup_cpus: float | None = None  # most processors of the group; ``None`` for no limit

    def __post_init__(self) -> None:
        if self.uid is not None and self.uid <= 0:
            raise ConfigError(f"Got uid = {self.uid}, expected one that is not root")


class Fork(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Fork a function, with the socket and the pipe for its log that come along."""

    number: int  # names the function in later messages
    engine: EngineSpec
    place: FunctionPlace
    asked_at: float  # monotonic time of the request, in seconds


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
