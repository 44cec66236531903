"""Ports for servers that must be told theirs before they start."""

from __future__ import annotations

import contextlib
import random
import socket

__all__ = ["free_ports"]

BELOW_EPHEMERAL = range(20_000, 32_768)
"""Ports that no system gives to a connection or to a server that asks for any: other tests do so all the time, and
would take a port between its choice and its use."""


def free_ports(num: int) -> list[int]:
    """Return ports that nothing has now, each another one."""
    found: list[int] = []
    with contextlib.ExitStack() as held:
        while len(found) < num:
            one = held.enter_context(socket.socket())
            port = random.choice(BELOW_EPHEMERAL)
            with contextlib.suppress(OSError):
                one.bind(("127.0.0.1", port))
                found.append(port)
    return found
