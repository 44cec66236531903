"""Reasoning in a model's text: the part between ``<think>`` and ``</think>`` before the answer."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["REASONING_PARSERS", "ReasoningSplitter"]

OPEN, CLOSE = "<think>", "</think>"

REASONING_PARSERS: Mapping[str, bool] = {"deepseek_r1": True, "qwen3": False}
"""Whether a model's answers begin with reasoning even where neither the prompt nor the answer opens it."""


class ReasoningSplitter:
    """Split one answer into reasoning and content, piece by piece; the cuts between pieces do not matter.

    ::

        before: blanks or part of <think>  ->  inside: up to </think>  ->  after: content

    Args:
        name: A key of ``REASONING_PARSERS``.
        prompt_end: The last text of the prompt: some templates open the reasoning, or close it to have none.
    """

    def __init__(self, name: str, prompt_end: str) -> None:
        is_closed = prompt_end.rstrip().endswith(CLOSE)
        is_opened = prompt_end.rstrip().endswith(OPEN)
        self._is_before = not is_closed and not is_opened
        self._is_inside = is_opened
        self._is_default = REASONING_PARSERS[name]
        self._held = ""

    def feed(self, text: str) -> tuple[str, str]:
        """Add a piece; return the reasoning and the content that it adds."""
        if self._is_before:
            self._held += text
            begin = self._held.lstrip()
            if OPEN.startswith(begin):
                return "", ""
            self._is_before = False
            self._is_inside = self._is_default or begin.startswith(OPEN)
            text = begin.removeprefix(OPEN) if begin.startswith(OPEN) else self._held
            self._held = ""
        if not self._is_inside:
            return "", text
        text = self._held + text
        reasoning, close, content = text.partition(CLOSE)
        if close:
            self._is_inside, self._held = False, ""
            return reasoning, content
        length = next(length for length in range(len(CLOSE) - 1, -1, -1) if text.endswith(CLOSE[:length]))
        self._held = text[len(text) - length :]
        return text[: len(text) - length], ""

    def finish(self) -> tuple[str, str]:
        """Return the held text as reasoning and content: no piece follows."""
        held, self._held = self._held, ""
        return (held, "") if self._is_inside else ("", held)
