"""The backbone process: it holds a base, sealed in memory, and hands its descriptor to processes of its own user.

The memory lives as long as any process maps it or holds its descriptor: it outlives this process with its last reader,
and ends with it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import stat
import struct
from dataclasses import replace
from pathlib import Path

import msgspec

from manylora.errors import ConfigError
from manylora.hosting.functions.messages import MAX_FRAME_BYTES, Backbone, FrameBuffer, frame

__all__ = ["BackboneSocket", "fetch_backbone", "holder_of"]

PATIENCE_S = 10.0
"""Longest wait for the other end of a connection."""

_CREDENTIALS = struct.calcsize("3i")

logger = logging.getLogger(__name__)


class BackboneSocket:
    """A Unix socket, for its owner alone, that gives each caller the sealed memory; a context, which removes it.

    Args:
        path: Where the socket is made; one without a listener is replaced.

    Raises:
        ConfigError: There is another file, another backbone listens, or the folder cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._socket = socket.socket(socket.AF_UNIX)
        mask = os.umask(0o177)  # from its first moment on
        try:
            _remove_stale(path)
            self._socket.bind(str(path))
            self._socket.listen(64)
        except OSError as error:
            self._socket.close()
            raise ConfigError(f"Got socket = {str(path)!r}, which cannot be made: {error}") from error
        finally:
            os.umask(mask)

    def serve(self, backbone: Backbone) -> None:
        """Hand ``backbone`` out until ``close``; blocks."""
        body = frame(msgspec.msgpack.encode(backbone))
        while True:
            try:
                caller, _ = self._socket.accept()
            except OSError:
                return  # it was closed
            with caller, contextlib.suppress(OSError):  # a caller that has gone
                caller.settimeout(PATIENCE_S)
                if _uid_of(caller) not in (0, os.geteuid()):
                    logger.warning("backbone_refused uid=%d", _uid_of(caller))
                    continue
                sent = socket.send_fds(caller, [body], [backbone.base.file])
                caller.sendall(body[sent:])

    def close(self) -> None:
        """Stop listening and remove the socket."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._path.unlink(missing_ok=True)

    def __enter__(self) -> BackboneSocket:
        """Return itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close."""
        self.close()


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


def holder_of(path: Path) -> int | None:
    """Return the process that listens on a backbone's socket; ``None`` if none does."""
    try:
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(PATIENCE_S)
            probe.connect(str(path))
            peer = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS)
            return int(struct.unpack("3i", peer)[0])
    except OSError:
        return None


def _remove_stale(path: Path) -> None:
    try:
        is_socket = stat.S_ISSOCK(path.lstat().st_mode)
    except FileNotFoundError:
        return
    if not is_socket:
        raise FileExistsError(f"{path} is not a socket")
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
    raise FileExistsError("another backbone listens there")


def _uid_of(caller: socket.socket) -> int:
    peer = caller.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS)
    return int(struct.unpack("3i", peer)[1])
