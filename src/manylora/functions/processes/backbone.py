"""A backbone as its readers see it: loaded for the agent that asks, and fetched from the process that holds it.

The memory lives as long as any process maps it or holds its descriptor: it outlives the holder with its last reader,
and ends with it.

A loader is ``python -m manylora.functions.processes.backbone PARENT ARGUMENTS...``, with the arguments of the program's
own command. The kernel kills it when the thread that started it ends, also if that was killed during the load: a loader
that went on would hold the base for good.
"""

from __future__ import annotations

import os
import runpy
import socket
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from manylora.core.errors import ConfigError, ManyloraError
from manylora.core.isolation.system import end_with_parent
from manylora.functions.processes.frames import FrameBuffer
from manylora.functions.processes.holder import TIMEOUT_S
from manylora.functions.processes.messages import Backbone

__all__ = ["fetch_backbone", "load_command", "main"]


def fetch_backbone(path: Path) -> Backbone:
    """Return the base behind a backbone's socket; the caller closes its descriptor.

    ``ConfigError`` if there is no backbone, or its answer is broken.
    """
    got = f"Got backbone = {str(path)!r}"
    descriptors: list[int] = []
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.settimeout(TIMEOUT_S)
            server.connect(str(path))
            received, descriptors, _, _ = socket.recv_fds(server, 1 << 16, 1)
            buffer = FrameBuffer()
            bodies = buffer.feed(received)
            while not bodies and (received := server.recv(1 << 16)):
                bodies = buffer.feed(received)
        if not bodies or not descriptors:
            raise ConfigError(f"{got}, which ended before it had answered")
        found = msgspec.msgpack.decode(bodies[0], type=Backbone)
        if (size := os.fstat(descriptors[0]).st_size) != found.base.num_bytes:
            raise ConfigError(f"{got}, whose memory has {size} bytes, expected {found.base.num_bytes}")
    except (OSError, msgspec.MsgspecError, ManyloraError) as error:
        for descriptor in descriptors:
            os.close(descriptor)
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{got}, which does not answer: {error}") from error
    return msgspec.structs.replace(found, base=replace(found.base, file=descriptors[0]))


def load_command(arguments: Sequence[str]) -> list[str]:
    """Return the command that runs ``manylora ARGUMENTS`` until this process ends."""
    return [sys.executable, "-P", "-m", "manylora.functions.processes.backbone", str(os.getpid()), *arguments]


def main() -> int:
    """Run the command; return 1 if the parent has ended before."""
    end_with_parent()
    if os.getppid() != int(sys.argv[1]):
        return 1
    del sys.argv[1]
    runpy.run_module("manylora", run_name="__main__", alter_sys=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
