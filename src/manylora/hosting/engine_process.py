"""The engine process: ``python -m manylora.hosting.engine_process``, started by ``link_process``.

It reads its configuration from standard input, which stays open until the API process ends; then this process ends as
well. Commands arrive on one socket, messages leave on the other (see ``protocol``).
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
from manylora.hosting.logs import configure_logging
from manylora.hosting.protocol import Message, ProcessSetup, Ready, Reply, decode_command, encode
from manylora.hosting.service import EngineService

__all__ = ["bound_primitive_caches", "main", "pack_setup"]

EXIT_BROKEN = 1
EXIT_REFUSED = 3
EXIT_ORPHANED = 4

PRIMITIVE_CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
"""Variables that bound the caches of oneDNN, and of the layer between it and torch; either alone bounds nothing."""

NUM_PRIMITIVES = 128
"""Those of about twenty sizes of a step, in 100 MB."""

logger = logging.getLogger(__name__)


def pack_setup(setup: ProcessSetup) -> bytes:
    """Return the bytes of a set-up for the engine's standard input: a line with the length, then msgpack."""
    body = encode(setup)
    return b"%d\n" % len(body) + body


def _read_setup() -> ProcessSetup:
    num_bytes = int(sys.stdin.buffer.readline())
    return msgspec.msgpack.decode(sys.stdin.buffer.read(num_bytes), type=ProcessSetup)


def _die_with_parent(sockets: Path) -> None:
    """End this process at once when standard input ends; remove the sockets in place of the parent."""
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


def bound_primitive_caches() -> None:
    """Bound the memory of compiled products, unless the environment does; call it before torch is imported.

    oneDNN compiles a product for every number of rows that it meets, and keeps half a megabyte for each, up to 1024 by
    default; torch's layer above keeps as many again. Prompts of all lengths fill both with products that do not come
    back, while those of decoding are used in every step.
    """
    for variable in PRIMITIVE_CACHES:
        os.environ.setdefault(variable, str(NUM_PRIMITIVES))


def main() -> int:
    """Run one engine until the parent ends or the engine fails; return the exit code."""
    setup = _read_setup()
    configure_logging(setup.log_level, "engine")
    if setup.engine.num_threads is not None:  # before the libraries that read it are imported
        os.environ.setdefault("OMP_NUM_THREADS", str(setup.engine.num_threads))
    bound_primitive_caches()
    # Ctrl-C is handled by the API process, which drains and then closes our standard input.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sockets = Path(setup.messages_address.removeprefix("ipc://")).parent
    threading.Thread(target=_die_with_parent, args=(sockets,), name="die-with-parent", daemon=True).start()

    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    messages = context.socket(zmq.PUSH)
    messages.set_hwm(0)  # a slow API process must not block a step
    messages.connect(setup.messages_address)

    def send(message: Message) -> None:
        # The adapters registered at the start live as long as the engine.
        if isinstance(message, Ready) or (isinstance(message, Reply) and message.registered):
            freeze_start_up_heap()
        messages.send(encode(message), copy=False)

    service = EngineService(setup.engine, clock=WallClock(), send=send, base=setup.base)
    # The socket is bound before Ready is sent, and the API process sends no command before Ready.
    threading.Thread(
        target=_receive, args=(context, setup.commands_address, service), name="commands", daemon=True
    ).start()
    try:
        return 0 if service.run() else EXIT_REFUSED
    except Exception:
        logger.exception("engine_broke")
        return EXIT_BROKEN
    finally:
        messages.close(linger=2000)  # ms, for the last messages
        context.term()


if __name__ == "__main__":
    exit_code = main()
    # Threads that hang on a disk or in a device library must not keep this process alive.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)
