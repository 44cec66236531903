"""Answers of a process that handles hostile input, and may die of it."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import TypeVar

import msgspec

__all__ = ["receive_answer"]

T = TypeVar("T")


def receive_answer(pipe: Connection, limit_s: float, decode: Callable[[bytes], T], *, max_bytes: int) -> T:
    """Return the next answer of a process.

    Args:
        pipe: From the process.
        limit_s: Time to wait for it, in seconds.
        decode: Decodes an answer.
        max_bytes: Length of the longest answer that is read.

    Raises:
        TimeoutError: There is none within ``limit_s`` seconds.
        OSError: The process died, or its answer cannot be read.
    """
    if not pipe.poll(limit_s):
        raise TimeoutError
    try:
        return decode(pipe.recv_bytes(max_bytes))
    except EOFError as error:
        raise ConnectionResetError from error
    except msgspec.MsgspecError as error:
        raise OSError(f"its answer is malformed: {error}") from error
