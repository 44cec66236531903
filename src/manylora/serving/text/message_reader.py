"""An assistant's message from a model's text: reasoning first, then content and tool calls."""

from __future__ import annotations

from manylora.serving.text.reasoning import ReasoningSplitter
from manylora.serving.text.tools import EventKind, ToolEvent, ToolParser

__all__ = ["MessageReader"]


class MessageReader:
    """Read one answer piece by piece.

    Args:
        reasoning: Splits off the reasoning; ``None`` if there is none.
        tools: Finds the calls in the rest; ``None`` if there can be none.
        max_calls: Calls beyond these are dropped.
    """

    def __init__(
        self, reasoning: ReasoningSplitter | None, tools: ToolParser | None, *, max_calls: int | None = None
    ) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._max_calls = max_calls
        self._num_calls = 0

    @property
    def num_calls(self) -> int:
        """Calls that have begun."""
        return self._num_calls

    def feed(self, text: str) -> list[ToolEvent]:
        """Return what a piece of text adds to the message."""
        thought, said = ("", text) if self._reasoning is None else self._reasoning.feed(text)
        return self._events(thought, said, is_last=False)

    def finish(self) -> list[ToolEvent]:
        """Return the rest of the message: no piece follows."""
        thought, said = ("", "") if self._reasoning is None else self._reasoning.finish()
        return self._events(thought, said, is_last=True)

    def _events(self, thought: str, said: str, *, is_last: bool) -> list[ToolEvent]:
        events = [ToolEvent(EventKind.REASONING, thought)] if thought else []
        if self._tools is None:
            return [*events, ToolEvent(EventKind.CONTENT, said)] if said else events
        found = self._tools.feed(said)
        if is_last:
            found += self._tools.finish()
        for event in found:
            if event.kind is EventKind.CALL:
                self._num_calls += 1
            is_call = event.kind in (EventKind.CALL, EventKind.ARGUMENTS)
            if not is_call or self._max_calls is None or self._num_calls <= self._max_calls:
                events.append(event)
        return events
