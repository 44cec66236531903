"""An engine process that imports its libraries while the command still reads its options.

Torch and transformers take three seconds to import, the longest part of the start of a small model. The command spawns
the process first of all. The first engine that fits takes it over; one that no engine took is killed with the command.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from manylora.serving.hosting.protocol import EngineSpec

__all__ = ["TORCH_BUILDER", "end_early", "spawn_engine", "start_early", "take_early"]

TORCH_BUILDER = "manylora.serving.hosting.engine.build:build_live_parts"

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


def start_early(builder: str) -> None:
    """Start a process for the first engine of this builder."""
    _waiting[builder] = spawn_engine(builder)


def end_early() -> None:
    """End the processes that no engine took over."""
    while _waiting:
        _, process = _waiting.popitem()
        process.kill()
        process.communicate()


def take_early(engine: EngineSpec) -> subprocess.Popen[bytes] | None:
    """Return the process that was started for an engine, if it still runs; it waits for its set-up.

    An engine with a number of threads needs its own: libraries read that number when they are imported.
    """
    if engine.num_threads is not None or not isinstance(engine.builder, str):
        return None
    process = _waiting.pop(engine.builder, None)
    return process if process is not None and process.poll() is None else None
