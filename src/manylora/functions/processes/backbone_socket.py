"""The socket of a backbone, over which its holder gives the sealed memory to processes of its own user.

The holder lives as long as its base, so this file imports the standard library alone.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import stat
import struct
from pathlib import Path

from manylora.core.errors import ConfigError
from manylora.functions.processes.frames import frame

__all__ = ["PATIENCE_S", "BackboneSocket", "holder_of"]

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

    def serve(self, backbone: bytes, file: int) -> None:
        """Hand an encoded ``Backbone`` and the descriptor of its memory out until ``close``; blocks."""
        body = frame(backbone)
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
                sent = socket.send_fds(caller, [body], [file])
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
