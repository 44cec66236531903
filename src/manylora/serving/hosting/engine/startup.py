"""The start of a process that serves: libraries imported early; gc, OpenMP and the heap set for service.

Torch and transformers take seconds to import, the longest part of the start of a small model. So the command
spawns an engine process first of all, which imports them while the command still reads its options. The first engine
that fits takes the process over; if none does, it is killed with the command.

Gc visits no start-up heap: with a tokenizer's libraries imported there are 200,000 objects, with torch several times as
many, and a full collection of them takes some 150 ms on a quiet machine, in which no token is sent.

OpenMP threads do not spin for long: libgomp's threads spin for milliseconds after every parallel region. Where more
threads want to run than there are processors, each takes its whole time slice for that, and the thread that it waits
for cannot run. Isolated functions share their processors with many others, and a server's engine with its API process
and often with clients. ``bench/functions_cold.py`` with ``GOMP_SPINCOUNT=300000``, libgomp's own choice, shows it.

The heap keeps what a step frees. By default glibc maps large tensors one by one, and the system clears their pages at
every step, which shows wherever prompts are read. Isolated functions, which are many, give memory back.
"""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from manylora.serving.hosting.protocol import EngineSpec

__all__ = [
    "SPIN_COUNT",
    "TORCH_BUILDER",
    "collector_paused",
    "end_prestarted",
    "freeze_start_up_heap",
    "keep_freed_memory",
    "limit_openmp_spin",
    "prestart_engine",
    "spawn_engine",
    "take_prestarted",
    "use_one_heap",
]

SPIN_COUNT = 100  # rounds of a spinning thread: some microseconds

TORCH_BUILDER = "manylora.execution.build:build_parts"

KEPT_BYTES = 1 << 30  # freed memory that the heap keeps: more than a step has activations at once
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # parameters of glibc's ``mallopt``

_waiting: dict[str, subprocess.Popen[bytes]] = {}


def spawn_engine(builder: str | None = None, files: Sequence[int] = ()) -> subprocess.Popen[bytes]:
    """Start an engine process in a group of its own, with a pipe to its standard input; it ends with this thread.

    It imports ``builder`` before it reads its set-up, and inherits the descriptors ``files``.
    """
    # -P: do not import files from the working directory.
    command = [sys.executable, "-P", "-m", "manylora.serving.hosting.engine.process"]
    if builder is not None:
        command.append(builder)
    return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True, pass_fds=files)


def prestart_engine(builder: str) -> None:
    """Start a process for the first engine of this builder."""
    _waiting[builder] = spawn_engine(builder)


def end_prestarted() -> None:
    """End the processes that no engine took over."""
    while _waiting:
        _, process = _waiting.popitem()
        process.kill()
        process.communicate()


def take_prestarted(engine: EngineSpec) -> subprocess.Popen[bytes] | None:
    """Return the process that was started for an engine, if it still runs; it waits for its set-up.

    An engine with a number of threads needs its own: libraries read that number when they are imported.
    """
    if engine.num_threads is not None or not isinstance(engine.builder, str):
        return None
    process = _waiting.pop(engine.builder, None)
    return process if process is not None and process.poll() is None else None


def limit_openmp_spin() -> None:
    """Bound the spinning of OpenMP threads in this process, unless its environment has a setting for it.

    Call it before torch is imported, which reads the environment once.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(SPIN_COUNT))


@contextmanager
def collector_paused() -> Iterator[None]:
    """Run imports without gc: they leave no unreachable objects, and collections take a fifth of their time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def freeze_start_up_heap() -> None:
    """Exclude all present objects from gc; called when a process starts to serve."""
    gc.collect()
    gc.freeze()


def use_one_heap() -> None:
    """Let threads that start from now on allocate from the main heap: the parts of others keep no large tensors."""
    _set_allocator(_ARENA_MAX, 1)


def keep_freed_memory() -> None:
    """Let the heap keep what is freed; called once the weights are loaded, whose leftovers go back."""
    _set_allocator(_MMAP_THRESHOLD, KEPT_BYTES)
    _set_allocator(_TRIM_THRESHOLD, KEPT_BYTES)


def _set_allocator(parameter: int, value: int) -> None:
    """Set a parameter of glibc's allocator; other C libraries have none."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(parameter, value)
