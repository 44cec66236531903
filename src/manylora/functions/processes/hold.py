"""Hold a sealed base and hand it out: ``python -m manylora.functions.processes.hold SOCKET LIFELINE FILE TEXT``.

The process that loads a base has imported torch, and its agent much else. This one imports the standard library alone
and takes the memory's descriptor over, so that the loader can end and the base outlives the agent. It ends with the
pipe ``LIFELINE`` (a descriptor; -1 for none).
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from typing import NoReturn

from manylora.functions.processes.backbone_socket import BackboneSocket
from manylora.functions.processes.frames import in_memory
from manylora.functions.processes.parent_watch import end_with

__all__ = ["become_holder", "hold_command", "main"]


def hold_command(path: Path, file: int, *, lifeline: int = -1, text: str = "") -> list[str]:
    """Return the command of a holder, which reads its encoded ``Backbone`` from standard input.

    Args:
        path: Where its socket is made.
        file: Descriptor of the memory.
        lifeline: Descriptor of the pipe that it ends with.
        text: A line that it prints once it listens.
    """
    return [sys.executable, "-P", "-m", "manylora.functions.processes.hold", str(path), str(lifeline), str(file), text]


def become_holder(path: Path, backbone: bytes, file: int, text: str) -> NoReturn:
    """Replace this process, and all that it has imported, by a holder of an encoded ``Backbone``."""
    with in_memory(backbone) as table:
        os.dup2(table.fileno(), sys.stdin.fileno())
    os.set_inheritable(file, True)
    command = hold_command(path, file, text=text)
    os.execv(command[0], command)


def main() -> int:
    """Serve until SIGTERM, SIGINT or the end of the lifeline; return the exit code."""
    path, lifeline, file, text = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    backbone = sys.stdin.buffer.read()
    with BackboneSocket(path) as listening:
        if text:
            print(f"{text}, pid {os.getpid()}", file=sys.stderr, flush=True)

        def end(*_: object) -> None:
            path.unlink(missing_ok=True)
            os._exit(0)

        signal.signal(signal.SIGTERM, end)
        signal.signal(signal.SIGINT, end)
        if lifeline >= 0:
            threading.Thread(target=end_with, args=(lifeline, end), daemon=True).start()
        listening.serve(backbone, file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
