"""The parts of an assistant's message, in order: reasoning, content, calls and their arguments."""

from __future__ import annotations

from enum import Enum, auto
from typing import NamedTuple

__all__ = ["EventKind", "ToolEvent"]


class EventKind(Enum):
    """The part of the message that a text belongs to."""

    REASONING = auto()
    CONTENT = auto()
    CALL = auto()
    ARGUMENTS = auto()


class ToolEvent(NamedTuple):
    """More text of one part.

    ``CALL`` begins a call, and its text is the whole name of the function; ``ARGUMENTS`` continues the JSON text of the
    arguments of the last call.
    """

    kind: EventKind
    text: str
