"""A made-up connection under a protocol."""

from __future__ import annotations

import asyncio


class Transport(asyncio.Transport):
    """A connection whose client reads as the test says."""

    def __init__(self, address: str | None = None) -> None:
        super().__init__({"peername": (address, 1), "sockname": ("127.0.0.1", 2)} if address else None)
        self.written = b""
        self.unread = 0
        self.is_closed = self.is_aborted = self.is_paused = False

    def write(self, data: bytes) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_closed = self.is_aborted = True

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False

    def get_write_buffer_size(self) -> int:
        return self.unread
