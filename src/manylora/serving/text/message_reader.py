"""An assistant's message from a model's text: reasoning (``<think>`` to ``</think>``), then content and tool calls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from manylora.serving.text.tools import EventKind, ToolEvent, ToolParser

__all__ = ["REASONING_PARSERS", "MessageReader", "ReasoningSplitter"]

OPEN, CLOSE = "<think>", "</think>"

REASONING_PARSERS: Mapping[str, bool] = {"deepseek_r1": True, "qwen3": False}
"""Whether a model's answers begin with reasoning even where neither the prompt nor the answer opens it."""


class ReasoningSplitter:
    """Split one answer into reasoning and content, piece by piece; the cuts between pieces do not matter.

    ::

        before: blanks or part of <think>  ->  inside: up to </think>  ->  after: content

    Some templates open the reasoning in ``prompt_end``, the last text of the prompt, or close it to have none.
    ``is_inside`` says whether the text so far ends within the reasoning.
    """

    def __init__(self, name: str, prompt_end: str) -> None:
        is_closed = prompt_end.rstrip().endswith(CLOSE)
        is_opened = prompt_end.rstrip().endswith(OPEN)
        self._is_before = not is_closed and not is_opened
        self.is_inside = is_opened
        self._is_default = REASONING_PARSERS[name]
        self._held = ""

    @property
    def is_over(self) -> bool:
        """Whether only content follows."""
        return not (self._is_before or self.is_inside)

    def feed(self, text: str) -> tuple[str, str]:
        """Add a piece; return the reasoning and the content that it adds."""
        if self._is_before:
            self._held += text
            begin = self._held.lstrip()
            if OPEN.startswith(begin):
                return "", ""
            self._is_before = False
            self.is_inside = self._is_default or begin.startswith(OPEN)
            text = begin.removeprefix(OPEN) if begin.startswith(OPEN) else self._held
            self._held = ""
        if not self.is_inside:
            return "", text
        text = self._held + text
        reasoning, close, content = text.partition(CLOSE)
        if close:
            self.is_inside, self._held = False, ""
            return reasoning, content
        length = next(length for length in range(len(CLOSE) - 1, -1, -1) if text.endswith(CLOSE[:length]))
        self._held = text[len(text) - length :]
        return text[: len(text) - length], ""

    def finish(self) -> tuple[str, str]:
        """Return the held text as reasoning and content: no piece follows."""
        held, self._held = self._held, ""
        return (held, "") if self.is_inside else ("", held)


@dataclass(eq=False)
class MessageReader:
    """Read one answer piece by piece."""

    reasoning: ReasoningSplitter | None  # splits off the reasoning, if there is any
    tools: ToolParser | None  # finds the calls in the rest, if there can be any
    max_calls: int | None = None  # calls beyond these are dropped
    num_calls: int = 0  # calls that have begun

    def feed(self, text: str) -> list[ToolEvent]:
        """Return what a piece of text adds to the message."""
        thought, said = ("", text) if self.reasoning is None else self.reasoning.feed(text)
        return self._events(thought, said, is_last=False)

    def finish(self) -> list[ToolEvent]:
        """Return the rest of the message: no piece follows."""
        thought, said = ("", "") if self.reasoning is None else self.reasoning.finish()
        return self._events(thought, said, is_last=True)

    def _events(self, thought: str, said: str, *, is_last: bool) -> list[ToolEvent]:
        events = [ToolEvent(EventKind.REASONING, thought)] if thought else []
        if self.tools is None:
            return [*events, ToolEvent(EventKind.CONTENT, said)] if said else events
        found = self.tools.feed(said)
        if is_last:
            found += self.tools.finish()
        for event in found:
            if event.kind is EventKind.CALL:
                self.num_calls += 1
            is_call = event.kind in (EventKind.CALL, EventKind.ARGUMENTS)
            if not is_call or self.max_calls is None or self.num_calls <= self.max_calls:
                events.append(event)
        return events
