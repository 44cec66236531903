"""Mistral's formats: a marker, then a list of JSON objects, or a name and its arguments."""

from __future__ import annotations

import uuid

from manylora.serving.text.tools.parser import NotACall, Reading, ToolParser

__all__ = ["MistralParser"]

OPEN = "[TOOL_CALLS]"


class MistralParser(ToolParser):
    """Read ``[TOOL_CALLS][{"name": "f", "arguments": {...}}]``, or since version 11 ``[TOOL_CALLS]f[ARGS]{...}``.

    In the second form each call has its own marker, ``[ARGS]`` may be missing, and an id may stand before it.
    """

    needs_special_tokens = True

    @staticmethod
    def new_call_id() -> str:
        """Return an id of nine letters and digits: Mistral's templates refuse others."""
        return uuid.uuid4().hex[:9]

    def _read(self) -> Reading:
        while (yield from self._content_until(OPEN)):
            yield from self._attempt(self._calls(), OPEN)

    def _calls(self) -> Reading:
        yield from self._blank()
        if self._char == "[":
            yield from self._call_list()
            return
        name: list[str] = []
        while self._char and self._char not in "[{" and not self._char.isspace():
            name.append(self._char)
            yield from self._advance()
        while self._char and self._char != "{":  # [CALL_ID]..., [ARGS]
            yield from self._advance()
        if not name or not self._char:
            raise NotACall
        self._start("".join(name))
        yield from self._json_value(self._argue)
