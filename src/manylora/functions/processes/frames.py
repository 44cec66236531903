"""How messages go from one process to another: in frames over a socket, or as a file. The standard library alone."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import BinaryIO

from manylora.core.errors import ManyloraError

__all__ = ["MAX_FRAME_BYTES", "FrameBuffer", "FrameError", "frame", "frames_of", "in_memory"]

MAX_FRAME_BYTES = 64 << 20
CHUNK_BYTES = 1 << 16
_PREFIX_BYTES = 4


class FrameError(ManyloraError):
    """The other end of a socket sent a message that it must not send."""


def frame(body: bytes) -> bytes:
    """Return a message with its length in front."""
    return len(body).to_bytes(_PREFIX_BYTES, "big") + body


class FrameBuffer:
    """Cuts a stream of bytes from a process that is not trusted into frames."""

    def __init__(self, max_bytes: int = MAX_FRAME_BYTES) -> None:
        self.max_bytes = max_bytes  # of a frame; the holder may change it
        self._bytes = bytearray()

    def feed(self, received: bytes) -> list[bytes]:
        """Return the frames that are complete now; ``FrameError`` if a frame is too long."""
        held = self._bytes
        held += received
        bodies = []
        start = 0
        while len(held) - start >= _PREFIX_BYTES:
            size = int.from_bytes(held[start : start + _PREFIX_BYTES], "big")
            if size > self.max_bytes:
                raise FrameError(f"Got a message of {size} bytes, expected at most {self.max_bytes}")
            end = start + _PREFIX_BYTES + size
            if len(held) < end:
                break
            bodies.append(bytes(held[start + _PREFIX_BYTES : end]))
            start = end
        del held[:start]
        return bodies


def frames_of(receive: Callable[[int], bytes]) -> Iterator[bytes]:
    """Yield the frames of a blocking socket's ``recv``, to its end."""
    buffer = FrameBuffer()
    while received := receive(CHUNK_BYTES):
        yield from buffer.feed(received)


def in_memory(body: bytes) -> BinaryIO:
    """Return a file of ``body`` for a child's standard input; its descriptor closes with it.

    A pipe has room for 64 KiB, and the table of a large model is longer: its writer would wait until the child reads,
    after all its imports.
    """
    file = open(os.memfd_create("setup"), "w+b")  # noqa: SIM115
    file.write(body)
    file.seek(0)
    return file
