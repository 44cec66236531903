"""Qwen's formats: Hermes' JSON of Qwen 2.5 and 3, and the tags of Qwen 3 Coder."""

from __future__ import annotations

from typing import Any

import msgspec

from manylora.serving.text.tools.hermes import HermesParser
from manylora.serving.text.tools.parser import NotACall, Reading

__all__ = ["QwenParser"]

encode = msgspec.json.encode


class QwenParser(HermesParser):
    """Read Hermes' JSON, or ``<function=f><parameter=x>value</parameter></function>``, between ``<tool_call>`` tags.

    Values between tags are bare text. The function's schema says whether one is a string; other values are JSON. A
    value is reported when it is complete.
    """

    def _body(self) -> Reading:
        if self._char == "{":
            yield from super()._body()
            return
        yield from self._literal("<function=")
        name = (yield from self._until(">")).strip()
        if not name:
            raise NotACall
        self._start(name)
        separator = "{"
        while True:
            yield from self._blank()
            yield from self._literal("<")
            if self._char == "/":
                break
            yield from self._literal("parameter=")
            key = (yield from self._until(">")).strip()
            text = yield from self._until("</parameter>")
            value = self._value(name, key, text.removeprefix("\n").removesuffix("\n"))
            self._argue(f"{separator}{encode(key).decode()}: {encode(value).decode()}")
            separator = ", "
        self._argue("{}" if separator == "{" else "}")
        yield from self._literal("/function>")

    def _value(self, name: str, key: str, text: str) -> Any:
        """Return the value of a parameter: JSON where its schema is not a string's and the text is JSON."""
        properties = self._tools.get(name, {}).get("properties")
        schema = properties.get(key) if isinstance(properties, dict) else None
        if not isinstance(schema, dict) or schema.get("type") == "string":
            return text
        literal = text.strip()
        try:
            return msgspec.json.decode(literal.lower() if literal in ("True", "False", "None") else literal)
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            return None if literal == "None" else text
