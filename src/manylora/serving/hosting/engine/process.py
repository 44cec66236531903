"""The engine process: ``python -m manylora.serving.hosting.engine.process``, started as an ``EngineChild``.

With the name of a builder as its argument it imports that first (see ``startup``). Then it reads its set-up from
standard input, which stays open until its parent ends; then this process ends as well. On Linux the kernel kills it
with its parent even while it is stopped, and would not see the end of its input. Its parent is the API process, or a
Ray actor. Commands arrive on one socket, messages leave on the other (see ``protocol``).
"""

from __future__ import annotations

import gc
import logging
import os
import shutil
import signal
import sys
import threading
import time

import msgspec
import zmq

from manylora.core.clock import WallClock
from manylora.core.isolation.system import end_with_parent
from manylora.core.logs import configure_logging
from manylora.serving.hosting.engine.service import EngineService, load_builder
from manylora.serving.hosting.engine.startup import (
    collector_paused,
    freeze_start_up_heap,
    keep_freed_memory,
    limit_openmp_spin,
    use_one_heap,
)
from manylora.serving.hosting.protocol import Message, ProcessSetup, Ready, Reply, decode_command, encode
from manylora.serving.hosting.sockets import EngineSockets, UnixSockets, open_sockets

__all__ = ["main"]

EXIT_BROKEN = 1
EXIT_REFUSED = 3
EXIT_ORPHANED = 4

logger = logging.getLogger(__name__)


def _read_setup() -> ProcessSetup | None:
    """Return the set-up; ``None`` if the parent ended before it sent one."""
    line = sys.stdin.buffer.readline()
    if not line:
        return None
    num_bytes = int(line)
    return msgspec.msgpack.decode(sys.stdin.buffer.read(num_bytes), type=ProcessSetup)


def _end_with_parent(sockets: EngineSockets) -> None:
    """End this process at once when standard input ends; remove the sockets' directory in place of the parent."""
    sys.stdin.buffer.read()
    if isinstance(sockets, UnixSockets):
        shutil.rmtree(sockets.directory, ignore_errors=True)
    os._exit(EXIT_ORPHANED)


def _receive(commands: zmq.Socket[bytes], service: EngineService) -> None:
    try:
        while True:
            service.handle(decode_command(commands.recv()))
    except zmq.ContextTerminated:
        commands.close(linger=0)


def main() -> int:
    """Run one engine until the parent ends or the engine fails; return the exit code."""
    began_at = time.perf_counter()
    if sys.platform == "linux":  # if the parent has ended before this, the end of the input says so
        end_with_parent()
    limit_openmp_spin()
    use_one_heap()
    if is_prestarted := len(sys.argv) > 1:
        with collector_paused():
            load_builder(sys.argv[1], is_alone=True)
        gc.freeze()  # so that the collection at the end of the start visits a fraction of the heap
    took_s = time.perf_counter() - began_at
    setup = _read_setup()
    if setup is None:
        return EXIT_ORPHANED
    configure_logging(setup.log_level, "engine")
    if is_prestarted:
        logger.info("engine_start stage=imports took_s=%.2f next=%r", took_s, "weights")
    if setup.engine.num_threads is not None:  # before the libraries that read it are imported
        os.environ.setdefault("OMP_NUM_THREADS", str(setup.engine.num_threads))
    # Ctrl-C is handled by the API process, which drains and then closes our standard input.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, args=(setup.sockets,), name="end-with-parent", daemon=True).start()

    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    commands, messages = open_sockets(context, setup.sockets)

    def send(message: Message) -> None:
        # The adapters registered at the start live as long as the engine.
        if isinstance(message, Ready):
            keep_freed_memory()
        if isinstance(message, Ready) or (isinstance(message, Reply) and message.registered):
            freeze_start_up_heap()
        messages.send(encode(message), copy=False)

    service = EngineService(setup.engine, clock=WallClock(), send=send, base=setup.base, is_alone=True)
    # The API process sends no command before Ready.
    threading.Thread(target=_receive, args=(commands, service), name="commands", daemon=True).start()
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
