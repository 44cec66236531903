"""Hold a sealed base and hand it out: ``python -m manylora.hosting.functions.hold SOCKET LIFELINE``.

The process that loads a base has imported torch; this one has not. It takes the memory's descriptor over, so that the
loader can end and the base outlives the agent. It ends with the pipe ``LIFELINE`` (a descriptor; -1 for none).
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from typing import NoReturn

import msgspec

from manylora.hosting.functions.backbone import BackboneSocket
from manylora.hosting.functions.lifeline import end_with
from manylora.hosting.functions.messages import Backbone, in_memory

__all__ = ["become_holder", "hold_command", "main"]


def hold_command(path: Path, lifeline: int = -1) -> list[str]:
    """Return the command of a holder, which reads its ``Backbone`` from standard input."""
    return [sys.executable, "-P", "-m", "manylora.hosting.functions.hold", str(path), str(lifeline)]


def become_holder(path: Path, backbone: Backbone) -> NoReturn:
    """Replace this process, and all that it has imported, by a holder."""
    with in_memory(msgspec.msgpack.encode(backbone)) as table:
        os.dup2(table.fileno(), sys.stdin.fileno())
    os.set_inheritable(backbone.base.file, True)
    command = hold_command(path)
    os.execv(command[0], command)


def main() -> int:
    """Serve until SIGTERM, SIGINT or the end of the lifeline; return the exit code."""
    path, lifeline = Path(sys.argv[1]), int(sys.argv[2])
    backbone = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Backbone)
    with BackboneSocket(path) as listening:
        if lifeline < 0:  # the process of a command
            served = f"{backbone.base.num_bytes} bytes of {backbone.model.model}"
            print(f"serving {served} on {path}, pid {os.getpid()}", file=sys.stderr, flush=True)

        def end(*_: object) -> None:
            path.unlink(missing_ok=True)
            os._exit(0)

        signal.signal(signal.SIGTERM, end)
        signal.signal(signal.SIGINT, end)
        if lifeline >= 0:
            threading.Thread(target=end_with, args=(lifeline, end), daemon=True).start()
        listening.serve(backbone)
    return 0


if __name__ == "__main__":
    sys.exit(main())
