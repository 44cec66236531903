"""How the API reaches an engine: one interface, and the ways to host an engine behind it by name.

A link carries one life of an engine. It is started once, and when the engine ends, however that comes about, it is
``closed``; a new engine gets a new link, so nothing of an old one can ever arrive late.

Another way to host an engine is a class that does what ``EngineLink`` says, in a file of its own, and a line in
``LINKS``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from manylora.config import EngineConfig
from manylora.hosting.link_process import ProcessLink
from manylora.hosting.link_thread import ThreadLink
from manylora.hosting.protocol import Command, Message
from manylora.hosting.service import Builder

__all__ = ["LINKS", "EngineLink", "make_link"]


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
        """End the engine now and free its resources; returns when it is gone. May be called again."""
        ...


class _MakeLink(Protocol):
    def __call__(
        self, config: EngineConfig, *, served_name: str, builder: Builder, is_observed: bool
    ) -> EngineLink: ...


LINKS: dict[str, _MakeLink] = {"process": ProcessLink, "thread": ThreadLink}
"""The ways to host an engine, by name."""


def make_link(
    kind: str, config: EngineConfig, *, served_name: str, builder: Builder, is_observed: bool = True
) -> EngineLink:
    """Return the link to a new engine, not yet started.

    Args:
        kind: The way it is hosted, in ``LINKS``.
        config: Its configuration.
        served_name: The base model's name in the API.
        builder: Builds its parts; given by name where it has to travel.
        is_observed: Whether it sends ``Observations``; they cost a few percent of a step that takes no time.
    """
    return LINKS[kind](config, served_name=served_name, builder=builder, is_observed=is_observed)
