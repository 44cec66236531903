"""A backbone as its readers see it: a base that a holder keeps sealed in memory.

The memory lives as long as any process maps it or holds its descriptor: it outlives the holder with its last reader,
and ends with it.
"""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from pathlib import Path

import msgspec

from manylora.core.errors import ConfigError
from manylora.functions.processes.backbone_socket import PATIENCE_S
from manylora.functions.processes.frames import MAX_FRAME_BYTES, FrameBuffer
from manylora.functions.processes.messages import Backbone

__all__ = ["fetch_backbone"]


def fetch_backbone(path: Path) -> Backbone:
    """Return the base behind a backbone's socket; the caller closes its descriptor.

    Raises:
        ConfigError: There is no backbone, or its answer is broken.
    """
    got = f"Got backbone = {str(path)!r}"
    descriptors: list[int] = []
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.settimeout(PATIENCE_S)
            server.connect(str(path))
            received, descriptors, _, _ = socket.recv_fds(server, 1 << 16, 1)
            buffer = FrameBuffer(MAX_FRAME_BYTES)
            bodies = buffer.feed(received)
            while not bodies and (received := server.recv(1 << 16)):
                bodies = buffer.feed(received)
        if not bodies or not descriptors:
            raise ConfigError(f"{got}, which ended before it had answered")
        found = msgspec.msgpack.decode(bodies[0], type=Backbone)
        if os.fstat(descriptors[0]).st_size != found.base.num_bytes:
            raise ConfigError(f"{got}, whose memory has another size than it says")
    except (OSError, msgspec.MsgspecError, ConfigError) as error:
        for descriptor in descriptors:
            os.close(descriptor)
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{got}, which does not answer: {error}") from error
    return msgspec.structs.replace(found, base=replace(found.base, file=descriptors[0]))
