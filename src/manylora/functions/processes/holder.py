"""Hold a sealed base and hand it out: ``python -m manylora.functions.processes.holder SOCKET PARENT_PIPE FILE TEXT``.

The process that loads a base has imported torch, and its agent much else. This one imports only the standard library
and takes the memory's descriptor over, so that the loader can end and the base outlives the agent. It ends with the
pipe ``PARENT_PIPE`` (a descriptor; -1 for none), which no process writes: its readers learn of the end of the process
that holds the other end.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import stat
import struct
import sys
import threading
from pathlib import Path
from typing import NoReturn

from manylora.core.errors import ConfigError
from manylora.functions.processes.frames import frame, in_memory

__all__ = ["TIMEOUT_S", "BackboneSocket", "become_holder", "hold_command", "holder_of", "main"]

TIMEOUT_S = 10.0  # longest wait for the other end of a connection

_CREDENTIALS = struct.calcsize("3i")

logger = logging.getLogger(__name__)


class BackboneSocket:
    """A Unix socket, for its owner alone, that gives each caller the sealed memory; a context, which removes it.

    One without a listener is replaced. ``ConfigError`` if there is another file, another backbone
    listens, or the folder cannot be written.
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
        """Hand an encoded ``Backbone`` and the descriptor of its memory out for ever; blocks."""
        body = frame(backbone)
        while True:
            caller, _ = self._socket.accept()
            with caller, contextlib.suppress(OSError):  # a caller that has gone
                caller.settimeout(TIMEOUT_S)
                _, uid, _ = _credentials_of(caller)
                if uid not in (0, os.geteuid()):
                    logger.warning("backbone_refused uid=%d", uid)
                    continue
                sent = socket.send_fds(caller, [body], [file])
                caller.sendall(body[sent:])

    def __enter__(self) -> BackboneSocket:
        """Return itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """Stop listening and remove the socket."""
        self._socket.close()
        self._path.unlink(missing_ok=True)


def holder_of(path: Path) -> int | None:
    """Return the process that listens on a backbone's socket; ``None`` if none does."""
    try:
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(TIMEOUT_S)
            probe.connect(str(path))
            return _credentials_of(probe)[0]
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


def _credentials_of(other: socket.socket) -> tuple[int, int, int]:
    """Return the process, the user and the group at the other end."""
    pid, uid, gid = struct.unpack("3i", other.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS))
    return pid, uid, gid


def hold_command(path: Path, file: int, *, parent_pipe: int = -1, text: str = "") -> list[str]:
    """Return the command of a holder, which reads its encoded ``Backbone`` from standard input.

    It makes its socket at ``path``, holds the memory of the descriptor ``file``, ends with the ``parent_pipe``, and
    prints a line of ``text`` once it listens.
    """
    return [
        sys.executable,
        "-P",
        "-m",
        "manylora.functions.processes.holder",
        str(path),
        str(parent_pipe),
        str(file),
        text,
    ]


def become_holder(path: Path, backbone: bytes, file: int, text: str) -> NoReturn:
    """Replace this process, and all that it has imported, by a holder of an encoded ``Backbone``."""
    with in_memory(backbone) as table:
        os.dup2(table.fileno(), sys.stdin.fileno())
    os.set_inheritable(file, True)
    command = hold_command(path, file, text=text)
    os.execv(command[0], command)


def main() -> int:
    """Serve until SIGTERM, SIGINT or the end of the parent_pipe; return the exit code."""
    path, parent_pipe, file, text = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    backbone = sys.stdin.buffer.read()
    with BackboneSocket(path) as listening:
        if text:
            print(f"{text}, pid {os.getpid()}", file=sys.stderr, flush=True)

        def end(*_: object) -> None:
            path.unlink(missing_ok=True)
            os._exit(0)

        def end_with_parent_pipe() -> None:
            poll = select.poll()  # not a read: another process may have made the pipe one whose reads do not wait
            poll.register(parent_pipe, 0)  # the end alone
            poll.poll()
            end()

        signal.signal(signal.SIGTERM, end)
        signal.signal(signal.SIGINT, end)
        if parent_pipe >= 0:
            threading.Thread(target=end_with_parent_pipe, daemon=True).start()
        listening.serve(backbone, file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
