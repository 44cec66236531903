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

import msgspec

from manylora.hosting.functions.backbone import BackboneSocket
from manylora.hosting.functions.lifeline import end_with
from manylora.hosting.functions.messages import Backbone

__all__ = ["main"]


def main() -> int:
    """Serve until SIGTERM or the end of the lifeline; return the exit code."""
    path, lifeline = Path(sys.argv[1]), int(sys.argv[2])
    backbone = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Backbone)
    with BackboneSocket(path) as listening:

        def end(*_: object) -> None:
            path.unlink(missing_ok=True)
            os._exit(0)

        signal.signal(signal.SIGTERM, end)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal: the agent ends it
        if lifeline >= 0:
            threading.Thread(target=end_with, args=(lifeline, end), daemon=True).start()
        listening.serve(backbone)
    return 0


if __name__ == "__main__":
    sys.exit(main())
