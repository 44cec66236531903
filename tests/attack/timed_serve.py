"""`manylora` on an event loop that notes the processor time of its longest callback, and where it was spent.

    python timed_serve.py FILE serve demo ...

Processor time of the loop's thread does not depend on what else the machine does. A callback of many milliseconds holds
up every stream by as much, on whatever machine. The note is in FILE, which the tests map: seconds, then text.
"""

from __future__ import annotations

import asyncio
import mmap
import signal
import struct
import sys
import threading
import time
import traceback
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

NUM_BYTES = 1 << 14
SAMPLED_S = 0.002
"""Processor time of the process between two looks at the running callback."""

HEAD = struct.Struct("dq")


@dataclass(frozen=True)
class Longest:
    """The longest callback: seconds of the processor, and the lines that it was seen at, with how often."""

    cpu_s: float
    seen_at: str

    def __str__(self) -> str:
        return f"{self.cpu_s * 1e3:.1f} ms of the processor in one callback:\n{self.seen_at}"


class Note:
    """The longest callback so far, in a file that the server and the tests map."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(bytes(NUM_BYTES))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), NUM_BYTES)

    @property
    def cpu_s(self) -> float:
        return float(HEAD.unpack_from(self._memory)[0])

    def write(self, cpu_s: float, text: str) -> None:
        content = text.encode()[: NUM_BYTES - HEAD.size]
        self._memory[HEAD.size : HEAD.size + len(content)] = content
        HEAD.pack_into(self._memory, 0, cpu_s, len(content))

    def take(self) -> Longest:
        """Return the longest callback since the last call."""
        cpu_s, num_bytes = HEAD.unpack_from(self._memory)
        text = bytes(self._memory[HEAD.size : HEAD.size + num_bytes]).decode(errors="replace")
        self.write(0.0, "")
        return Longest(cpu_s, text)


def watch(note: Note) -> None:
    """Measure every callback of event loops in the calling thread from now on."""
    run = asyncio.Handle._run
    thread = threading.get_ident()
    places: Counter[str] = Counter()

    def look(number: int, frame: FrameType | None) -> None:
        lines = [line for line in traceback.extract_stack(frame) if "/manylora/" in line.filename][-5:]
        shown = (f"  {line.filename.rpartition('/manylora/')[2]}:{line.lineno} {line.name}" for line in lines)
        places["\n".join(shown)] += 1

    def measured(handle: asyncio.Handle) -> Any:
        if threading.get_ident() != thread:
            return run(handle)
        places.clear()
        began_s = time.thread_time()
        try:
            return run(handle)
        finally:
            took_s = time.thread_time() - began_s
            if took_s > note.cpu_s:
                seen = "\n".join(f"{count} times at\n{place}" for place, count in places.most_common(4))
                note.write(took_s, f"{handle!r}\n{seen}")

    signal.signal(signal.SIGPROF, look)
    signal.setitimer(signal.ITIMER_PROF, SAMPLED_S, SAMPLED_S)
    asyncio.Handle._run = measured  # type: ignore[method-assign, assignment]


def main() -> None:
    """Run the command."""
    sys.modules["uvloop"] = None  # type: ignore[assignment]  # its handles are not Python's
    watch(Note(Path(sys.argv.pop(1))))
    from manylora.cli import main as run

    run()


if __name__ == "__main__":
    main()
