"""Hermes' format, which Qwen 2.5 and 3 use too: JSON objects between tags."""

from __future__ import annotations

from manylora.serving.text.tools.parser import Reading, ToolParser

__all__ = ["HermesParser"]

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesParser(ToolParser):
    """Read ``<tool_call>{"name": "f", "arguments": {...}}</tool_call>``, any number of times, with content between."""

    def _read(self) -> Reading:
        while (yield from self._content_until(OPEN)):
            yield from self._attempt(self._between_tags(), OPEN)

    def _between_tags(self) -> Reading:
        yield from self._blank()
        yield from self._body()
        yield from self._blank()
        yield from self._literal(CLOSE)

    def _body(self) -> Reading:
        yield from self._call_object()
