"""The link between the API and an engine, and the ways to host an engine, by name.

A link is started once and belongs to one engine. A restarted engine gets a new link, so no message of the old engine
can arrive late. To add a way to host engines, write a class with the methods of ``EngineLink`` in a file of its own
and add a line to ``LINKS``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

from manylora.serving.hosting.links.base_share import BaseShare
from manylora.serving.hosting.links.process import ProcessLink
from manylora.serving.hosting.links.thread import ThreadLink
from manylora.serving.hosting.protocol import Command, Ending, EngineSpec, Message

__all__ = ["LINKS", "EngineLink", "MakeLink"]


class EngineLink(Protocol):
    """The link to one engine. All methods are called on the event loop's thread."""

    @property
    def pid(self) -> int | None:
        """Return the id of the engine's process."""

    @property
    def node(self) -> str | None:
        """Return the node of a cluster that the engine runs on; ``None`` for this machine."""

    async def start(self, deliver: Callable[[Sequence[Message]], None]) -> None:
        """Start the engine, or raise ``ManyloraError``; ``deliver`` is called on the event loop with its messages."""

    def send(self, command: Command) -> None:
        """Send a command without blocking; a command to a dead engine is dropped."""

    async def closed(self) -> Ending:
        """Wait until the engine has ended and its messages are delivered; return how it ended."""

    async def stop(self) -> None:
        """End the engine now and free its resources; may be called again."""


MakeLink: TypeAlias = Callable[[EngineSpec, BaseShare], EngineLink]

LINKS: dict[str, MakeLink] = {"process": ProcessLink, "thread": lambda engine, share: ThreadLink(engine)}
"""Makes the link to a new engine, not yet started, by the way to host it; a thread loads a base of its own."""
