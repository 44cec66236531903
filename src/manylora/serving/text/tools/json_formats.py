"""The formats whose calls are JSON objects: Hermes', Llama's, Mistral's and Qwen's, and calls that a grammar forces."""

from __future__ import annotations

import uuid
from typing import Any

import msgspec

from manylora.serving.text.tools.parser import NotACall, Reading, ToolParser

__all__ = ["HermesParser", "Llama3JsonParser", "MistralParser", "NamedCall", "QwenParser", "RequiredCalls"]

TAG, END_TAG = "<tool_call>", "</tool_call>"
MISTRAL_MARK = "[TOOL_CALLS]"

encode = msgspec.json.encode


class HermesParser(ToolParser):
    """Read ``<tool_call>{"name": "f", "arguments": {...}}</tool_call>``, any number of times, with content between.

    Qwen 2.5 and 3 write calls in this way too.
    """

    def _read(self) -> Reading:
        while (yield from self._content_until(TAG)):
            yield from self._attempt(self._between_tags(), TAG)

    def _between_tags(self) -> Reading:
        yield from self._blank()
        yield from self._body()
        yield from self._blank()
        yield from self._literal(END_TAG)

    def _body(self) -> Reading:
        yield from self._call_object()


class QwenParser(HermesParser):
    """Read Hermes' JSON (Qwen 2.5 and 3), or the tags of Qwen 3 Coder.

    Those are ``<function=f><parameter=x>value</parameter></function>``, between ``<tool_call>`` tags as well. Values
    are bare text. The function's schema says whether one is a string; other values are JSON. A value is reported when
    it is complete.
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


class Llama3JsonParser(ToolParser):
    """Read ``{"name": "f", "parameters": {...}}`` of Llama 3.1 and later, several with ``;`` between them.

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
            self._end_call()
            yield from self._blank()
            if self._char != ";":
                return
            yield from self._advance()
            yield from self._blank()


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
        while (yield from self._content_until(MISTRAL_MARK)):
            yield from self._attempt(self._calls(), MISTRAL_MARK)

    def _calls(self) -> Reading:
        yield from self._blank()
        if self._char == "[":
            yield from self._call_list()
            return
        name: list[str] = []
        while self._char and self._char not in "[{" and not self._char.isspace():
            name.append(self._char)
            yield from self._advance()
        yield from self._blank()
        if not name or self._char not in ("[", "{"):
            raise NotACall
        while self._char != "{":  # [CALL_ID]..., [ARGS]
            if not self._char:
                raise NotACall
            yield from self._advance()
        self._start("".join(name))
        yield from self._json_value(self._argue)


class RequiredCalls(ToolParser):
    """Read an answer that is a list of ``{"name": "f", "parameters": {...}}``."""

    def _read(self) -> Reading:
        yield from self._attempt(self._call_list())
        yield from self._rest()


class NamedCall(ToolParser):
    """Read an answer that is the arguments of one function, named by the request."""

    def __init__(self, name: str) -> None:
        self._name = name
        super().__init__({})

    def _read(self) -> Reading:
        self._start(self._name)
        while self._char:
            self._argue(self._char)
            self._char = yield
