"""The link between the API and an engine, and the ways to host an engine, by name.

A link is started once and belongs to one engine. A restarted engine gets a new link, so no message of the old engine
can arrive late. To add a way to host engines, write a class with the methods of ``EngineLink`` in a file of its own
and add a line to ``LINKS``.
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
    """The link to one engine. All methods are called on the event loop's thread."""

    @property
    def pid(self) -> int | None:
        """Return the id of the engine's process."""
        ...

    async def start(self, deliver: Callable[[Sequence[Message]], None]) -> None:
        """Start the engine; from now on ``deliver`` is called on the event loop with its messages.

        Raises:
            ManyloraError: The engine could not be started.
        """
        ...

    def send(self, command: Command) -> None:
        """Send a command without blocking; a command to a dead engine is dropped."""
        ...

    async def closed(self) -> str:
        """Wait until the engine has ended and its messages are delivered; return the reason, in words."""
        ...

    async def stop(self) -> None:
        """End the engine now and free its resources; may be called again."""
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
        kind: The way to host it, in ``LINKS``.
        config: Configuration of the engine.
        served_name: The base model's name in the API.
        builder: Builds the engine's parts; a name for an engine in another process.
        is_observed: Whether the engine sends ``Observations``, which cost a few percent of an empty step.
    """
    return LINKS[kind](config, served_name=served_name, builder=builder, is_observed=is_observed)
