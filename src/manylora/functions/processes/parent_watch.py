"""A pipe that no process writes: its readers learn of the end of the process that holds the other end."""

from __future__ import annotations

import select
from collections.abc import Callable

__all__ = ["end_with"]


def end_with(lifeline: int, end: Callable[[], object]) -> None:
    """Wait for the end of a pipe, then call ``end``; blocks.

    Another process that shares the pipe may have made it one whose reads do not wait.
    """
    poll = select.poll()
    poll.register(lifeline, 0)  # the end alone
    poll.poll()
    end()
