"""The JSON format of Llama 3.1 and later: the answer is nothing but calls."""

from __future__ import annotations

from manylora.serving.text.tools.parser import Reading, ToolParser

__all__ = ["Llama3JsonParser"]


class Llama3JsonParser(ToolParser):
    """Read ``{"name": "f", "parameters": {...}}``, several with ``;`` between them.

    An answer that does not begin with a call is content: JSON within a sentence is often an example. A JSON object
    without parameters is content too.
    """

    needs_special_tokens = True

    def _read(self) -> Reading:
        yield from self._attempt(self._calls())
        yield from self._rest()

    def _calls(self) -> Reading:
        yield from self._blank()
        if self._char == "<":
            yield from self._literal("<|python_tag|>")
            yield from self._blank()
        while True:
            yield from self._call_object(needs_arguments=True)
            yield from self._blank()
            if self._char != ";":
                return
            yield from self._advance()
            yield from self._blank()
