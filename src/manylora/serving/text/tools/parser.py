"""A parser of tool calls as a generator over characters, and the readings that the formats share.

``_read`` of a format takes one character after the other, then ``""`` at the end of the text, and reports content and
calls. Since it never sees a piece, any cuts of the text into pieces give the same calls.

A call is reported as soon as its function is known, and its arguments as they come. Before that point the text may
still turn out not to be a call; then it is content, as it stands. A function that reads part of a call raises
``NotACall`` at the first character that does not fit, and leaves that character unread::

    ... reported | raw: read, not reported yet | char | not seen yet ...

Blanks between content and calls belong to neither and are dropped.
"""

from __future__ import annotations

import contextlib
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping
from enum import Enum, auto
from typing import Any, ClassVar, NamedTuple

import msgspec

__all__ = ["EventKind", "NotACall", "Reading", "ToolEvent", "ToolParser", "ToolSchemas"]


class EventKind(Enum):
    """The part of an assistant's message that a text belongs to."""

    REASONING = auto()
    CONTENT = auto()
    CALL = auto()
    ARGUMENTS = auto()


class ToolEvent(NamedTuple):
    """More text of one part; the parts of a message come in order.

    ``CALL`` begins a call, and its text is the whole name of the function; ``ARGUMENTS`` continues the JSON text of the
    arguments of the last call.
    """

    kind: EventKind
    text: str


Reading = Generator[None, str, None]  # takes characters, and ``""`` at the end of the text

ToolSchemas = Mapping[str, Mapping[str, Any]]  # the JSON schema of the parameters of each function


class NotACall(Exception):
    """The text does not go on as a call does."""


class ToolParser(ABC):
    """Find the tool calls in one answer."""

    needs_special_tokens: ClassVar[bool] = False
    """Whether the text must contain special tokens, because one of them marks a call."""

    def __init__(self, tools: ToolSchemas) -> None:
        self._tools = tools
        self._events: list[ToolEvent] = []
        self._kind = EventKind.CONTENT
        self._parts: list[str] = []
        self._blanks: list[str] = []
        self._num_calls = self._num_whole = 0
        self._char = ""
        self._raw: list[str] = []
        self._reading = self._begin()
        next(self._reading)

    def feed(self, text: str) -> list[ToolEvent]:
        """Add the next piece of text; return what it adds to the message."""
        send = self._reading.send
        for char in text:
            send(char)
        return self._take()

    def finish(self) -> list[ToolEvent]:
        """Return the rest of the message: no piece follows."""
        with contextlib.suppress(StopIteration):
            self._reading.send("")
        if not self._num_calls:
            self._emit(EventKind.CONTENT, "".join(self._blanks))
        return self._take()

    @staticmethod
    def new_call_id() -> str:
        """Return an id for a call."""
        return f"call_{uuid.uuid4().hex[:24]}"

    @abstractmethod
    def _read(self) -> Reading:
        """Read the text, from ``_char`` on."""

    def _begin(self) -> Reading:
        self._char = yield
        yield from self._read()

    # Reports.

    def _emit(self, kind: EventKind, text: str) -> None:
        if kind is not self._kind or kind is EventKind.CALL:
            self._close_event()
            self._kind = kind
        self._parts.append(text)

    def _close_event(self) -> None:
        if text := "".join(self._parts):
            self._events.append(ToolEvent(self._kind, text))
        self._parts.clear()

    def _take(self) -> list[ToolEvent]:
        self._close_event()
        events, self._events = self._events, []
        return events

    def _say(self, text: str) -> None:
        if text.isspace():
            self._blanks.append(text)
        elif text:
            self._emit(EventKind.CONTENT, "".join(self._blanks) + text)
            self._blanks.clear()

    def _start(self, name: str) -> None:
        self._blanks.clear()
        self._num_calls += 1
        self._emit(EventKind.CALL, name)

    def _argue(self, text: str) -> None:
        self._emit(EventKind.ARGUMENTS, text)

    # Content.

    def _content_until(self, marker: str) -> Generator[None, str, bool]:
        """Report content and take the marker after it; return whether there was one before the end."""
        held = ""
        while char := self._char:
            held += char
            while not marker.startswith(held):
                self._say(held[0])
                held = held[1:]
            self._char = yield
            if held == marker:
                return True
        self._say_all(held)
        return False

    def _rest(self) -> Reading:
        """Report all that follows as content."""
        while self._char:
            self._say(self._char)
            self._char = yield

    def _say_all(self, text: str) -> None:
        for char in text:
            self._say(char)

    def _attempt(self, reading: Reading, opening: str = "") -> Reading:
        """Read calls; text that is none, with the ``opening`` before it or behind whole calls, is content.

        An answer that ends within a later call has no more content for it.
        """
        self._raw = [opening]
        num_calls = self._num_whole = self._num_calls
        try:
            yield from reading
        except NotACall:
            if self._num_calls == num_calls or (self._char and self._num_calls == self._num_whole):
                self._say_all("".join(self._raw))

    def _end_call(self) -> None:
        """Count the calls so far as whole: their text is reported."""
        self._raw.clear()
        self._num_whole = self._num_calls

    # Parts of calls.

    def _advance(self) -> Reading:
        self._raw.append(self._char)
        self._char = yield

    def _blank(self) -> Reading:
        while self._char.isspace():
            yield from self._advance()

    def _literal(self, text: str) -> Reading:
        for char in text:
            if self._char != char:
                raise NotACall
            yield from self._advance()

    def _until(self, end: str) -> Generator[None, str, str]:
        """Take and return the text before ``end``; take ``end`` too."""
        taken: list[str] = []
        tail = ""
        while tail != end:
            if not self._char:
                raise NotACall
            taken.append(self._char)
            tail = (tail + self._char)[-len(end) :]
            yield from self._advance()
        return "".join(taken)[: -len(end)]

    def _json_value(self, put: Callable[[str], object]) -> Reading:
        """Take a JSON value and hand its characters to ``put``; only brackets and quotes are checked."""
        depth, is_string, is_escaped = 0, False, False
        while char := self._char:
            if is_string:
                if is_escaped:
                    is_escaped = False
                elif char == "\\":
                    is_escaped = True
                elif char == '"':
                    is_string = False
            elif char == '"':
                is_string = True
            elif char in "{[":
                depth += 1
            elif char in "}]" and depth:
                depth -= 1
            elif not depth and (char in ",}]" or char.isspace()):  # the end of a number, true, false or null
                return
            put(char)
            yield from self._advance()
            if not depth and not is_string and char in '"}]':
                return
        raise NotACall

    def _json_string(self) -> Generator[None, str, str]:
        if self._char != '"':
            raise NotACall
        chars: list[str] = []
        yield from self._json_value(chars.append)
        try:
            return msgspec.json.decode("".join(chars), type=str)
        except (msgspec.DecodeError, UnicodeError):
            raise NotACall from None

    def _call_object(self, *, needs_arguments: bool = False) -> Reading:
        """Take a call as ``{"name": ..., "arguments": {...}}``, or with ``parameters``, in any order."""
        yield from self._literal("{")
        name, is_started = "", False
        arguments: list[str] = []
        while True:
            yield from self._blank()
            key = yield from self._json_string()
            yield from self._blank()
            yield from self._literal(":")
            yield from self._blank()
            if key == "name":
                name = yield from self._json_string()
                if not name:
                    raise NotACall
            elif key in ("arguments", "parameters") and self._char != "n" and not arguments and not is_started:
                if self._char != "{":
                    raise NotACall
                if name:
                    is_started = True
                    self._start(name)
                yield from self._json_value(self._argue if is_started else arguments.append)
            else:  # of another key, or null in place of arguments
                yield from self._json_value(lambda char: None)
            yield from self._blank()
            if self._char != ",":
                break
            yield from self._advance()
        if self._char != "}" or not name or (needs_arguments and not (arguments or is_started)):
            raise NotACall
        if not is_started:
            self._start(name)
            self._argue("".join(arguments) or "{}")
        yield from self._advance()

    def _call_list(self, take_call: Callable[[], Reading] | None = None) -> Reading:
        """Take a list of calls after blanks: JSON objects, or what ``take_call`` takes."""
        yield from self._blank()
        yield from self._literal("[")
        while True:
            yield from self._blank()
            yield from (take_call or self._call_object)()
            self._end_call()
            yield from self._blank()
            if self._char != ",":
                break
            yield from self._advance()
        yield from self._literal("]")
