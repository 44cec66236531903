"""The engine process: ``python -m manylora.hosting.engine_process``, started by ``link_process``.

Its configuration comes over standard input, which then stays open: when it ends, the API process is gone, however it
went, and so is this one. Commands arrive on one socket, messages leave on the other; see ``protocol``.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import sys
import threading
from pathlib import Path

import msgspec
import zmq

from manylora.clock import WallClock
from manylora.hosting.gc_freeze import freeze_start_up_heap
from manylora.hosting.protocol import EngineSetup, Message, Ready, decode_command, encode
from manylora.hosting.service import EngineService

__all__ = ["main", "pack_setup"]

EXIT_BROKEN = 1
EXIT_REFUSED = 3
EXIT_ORPHANED = 4

logger = logging.getLogger(__name__)


def pack_setup(setup: EngineSetup) -> bytes:
    """Return the set-up as it is written to the engine's standard input: a length line, then msgpack."""
    body = encode(setup)
    return b"%d\n" % len(body) + body


def _read_setup() -> EngineSetup:
    num_bytes = int(sys.stdin.buffer.readline())
    return msgspec.msgpack.decode(sys.stdin.buffer.read(num_bytes), type=EngineSetup)


def _die_with_parent(sockets: Path) -> None:
    """End this process at once when standard input does, and remove the sockets that the parent no longer can."""
    sys.stdin.buffer.read()
    shutil.rmtree(sockets, ignore_errors=True)
    os._exit(EXIT_ORPHANED)


def _receive(context: zmq.Context[zmq.Socket[bytes]], address: str, service: EngineService) -> None:
    socket = context.socket(zmq.PULL)
    socket.set_hwm(0)
    socket.bind(address)
    try:
        while True:
            service.handle(decode_command(socket.recv()))
    except zmq.ContextTerminated:
        socket.close(linger=0)


def main() -> int:
    """Run one engine until the parent is gone or the engine breaks."""
    setup = _read_setup()
    logging.basicConfig(
        level=setup.log_level, stream=sys.stderr, format="%(asctime)s %(levelname)s engine %(name)s %(message)s"
    )
    # The terminal's Ctrl-C is the API process's to handle: it drains first and then closes our standard input.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sockets = Path(setup.messages_address.removeprefix("ipc://")).parent
    threading.Thread(target=_die_with_parent, args=(sockets,), name="die-with-parent", daemon=True).start()

    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    messages = context.socket(zmq.PUSH)
    messages.set_hwm(0)  # a slow API process must not block a step
    messages.connect(setup.messages_address)

    def send(message: Message) -> None:
        if isinstance(message, Ready):
            freeze_start_up_heap()
        messages.send(encode(message), copy=False)

    service = EngineService(
        setup.config,
        served_name=setup.served_name,
        builder=setup.builder,
        is_observed=setup.is_observed,
        clock=WallClock(),
        send=send,
    )
    # Bound before Ready is sent; the API process sends nothing before it has heard that.
    threading.Thread(
        target=_receive, args=(context, setup.commands_address, service), name="commands", daemon=True
    ).start()
    try:
        return 0 if service.run() else EXIT_REFUSED
    except Exception:
        logger.exception("engine_broke")
        return EXIT_BROKEN
    finally:
        messages.close(linger=2000)  # last words
        context.term()


if __name__ == "__main__":
    exit_code = main()
    # Neither a reader stuck on a disk nor the threads of a device library may keep a dead engine alive.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)
