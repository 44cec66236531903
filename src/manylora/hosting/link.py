"""How the API reaches an engine: one protocol, an engine process or a thread behind it.

A link carries one life of an engine. It is started once, and when the engine ends, however that comes about, it is
``closed``; a new engine gets a new link, so nothing of an old one can ever arrive late.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from manylora.hosting.protocol import Command, Message

__all__ = ["EngineLink"]


class EngineLink(Protocol):
    """One engine's life. Every method belongs to the event loop's thread."""

    @property
    def pid(self) -> int | None:
        """Return the process the engine runs in."""
        ...

    async def start(self, deliver: Callable[[Sequence[Message]], None]) -> None:
        """Start the engine; ``deliver`` is called on the event loop with all messages there are, from now on.

        Raises:
            ManyloraError: It could not even be started.
        """
        ...

    def send(self, command: Command) -> None:
        """Send a command; never blocks. Commands to a dead engine vanish."""
        ...

    async def closed(self) -> str:
        """Wait until the engine has ended and all its messages are delivered; return how it ended, in words."""
        ...

    async def stop(self) -> None:
        """End the engine now and free what it held; returns when it is gone. May be called again."""
        ...
