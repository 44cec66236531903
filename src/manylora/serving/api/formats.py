"""The JSON of answers, in chunks or whole: of completions, and of chat completions with reasoning and tool calls."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Generic, TypeVar

import msgspec

from manylora.serving.api.answers import TextPiece
from manylora.serving.api.prompt_part import LEAST_LOGPROB, JsonParts, PromptPart, as_lists, encode_parts, logprob_items
from manylora.serving.api.request import Context
from manylora.serving.api.tools import ToolUse
from manylora.serving.text import MessageReader, ReasoningSplitter, TokenLogprob
from manylora.serving.text.tools import EventKind, ToolEvent

__all__ = ["AnswerFormat", "ChatFormat", "CompletionFormat", "logprob_entry", "message_readers"]

NULL_MESSAGE_FIELDS = dict.fromkeys(("refusal", "annotations", "audio", "function_call"))
"""Fields of whole messages that OpenAI and vLLM have and that are always null here."""

PROMPT_END_TOKENS = 8  # tokens at the end of a prompt in which a template opens or closes the reasoning

encode = msgspec.json.encode

Items = TypeVar("Items")


class AnswerFormat(ABC, Generic[Items]):
    """The JSON of the answers of one response; log-probabilities become JSON piece by piece.

    So the end of a long answer is cheap.
    """

    object: ClassVar[str]
    chunk_object: ClassVar[str]
    text_chunk: ClassVar[tuple[bytes, bytes]]
    """The JSON before and after the text of a choice that has a number and text alone, as nearly all chunks do."""

    repeats_prompt = False  # whether the first chunk of each answer has its prompt, which may be long

    def __init__(self, prompt: PromptPart, *, has_logprobs: bool) -> None:
        self.prompt = prompt
        self._has_logprobs = has_logprobs
        self._is_plain = not has_logprobs and not prompt.details.has_token_ids
        self._begun: set[int] = set()
        self._whole: dict[int, _WholeAnswer[Items]] = {}

    def head(self, *, is_chunk: bool) -> dict[str, Any]:
        """Return the fields of a whole response, or of the first chunk, that tell of all answers."""
        return {}

    def around_text(self, index: int) -> tuple[bytes, bytes] | None:
        """Return the JSON before and after the text of a later piece that has nothing else; ``None`` if it varies."""
        if index not in self._begun or not self._is_plain:
            return None
        before, after = self.text_chunk
        return before % index, after

    @abstractmethod
    def chunk(self, piece: TextPiece) -> bytes | None:
        """Return a piece of an answer as JSON for one chunk of a stream; ``None`` if the piece shows nothing."""

    def gather(self, piece: TextPiece) -> None:
        """Add a piece to its whole answer."""
        whole = self._whole.setdefault(piece.index, _WholeAnswer())
        whole.last = piece
        whole.texts.append(piece.text)
        whole.token_ids += piece.token_ids
        if self._has_logprobs:
            whole.logprobs.append(self._items(piece))

    @abstractmethod
    def choice(self, index: int) -> dict[str, Any]:
        """Return the choice of a whole answer, all of whose pieces were gathered."""

    @abstractmethod
    def _items(self, piece: TextPiece) -> Items:
        """Return the log-probabilities of a piece as JSON, of the items of lists."""


class _WholeAnswer(Generic[Items]):
    """The pieces of a whole answer."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.logprobs: list[Items] = []
        self.token_ids: list[int] = []
        self.last: TextPiece


class CompletionFormat(AnswerFormat[dict[str, bytes]]):
    """JSON of completions.

    ``echoes`` has the text to put before each answer: its prompt, or nothing.
    """

    object = "text_completion"
    chunk_object = "text_completion"
    text_chunk = b'{"index":%d,"text":', b',"logprobs":null,"finish_reason":null,"stop_reason":null}'

    def __init__(self, echoes: list[str], prompt: PromptPart, *, has_logprobs: bool) -> None:
        super().__init__(prompt, has_logprobs=has_logprobs)
        self.repeats_prompt = prompt.details.has_token_ids or any(echoes)
        self._echoes = echoes

    def chunk(self, piece: TextPiece) -> bytes | None:
        """Return a piece as JSON; the first piece of an answer has the prompt, if the request echoes it."""
        if not (piece.text or piece.logprobs or piece.finish_reason or piece.token_ids):
            return None
        is_begun = piece.index in self._begun
        logprobs = (
            self._lists(piece.index, [self._items(piece)], has_begin=not is_begun) if self._has_logprobs else None
        )
        choice = self._choice(piece, piece.text, logprobs, has_begin=not is_begun)
        if self.prompt.details.has_token_ids:
            choice["token_ids"] = piece.token_ids
        if not is_begun:
            self._begun.add(piece.index)
            choice |= self.prompt.token_ids(piece.index)
        return encode(choice) if logprobs is None else b"".join(encode_parts(choice))

    def choice(self, index: int) -> dict[str, Any]:
        """Return the choice of a whole answer."""
        whole = self._whole[index]
        logprobs = self._lists(index, whole.logprobs, has_begin=True) if self._has_logprobs else None
        choice = self._choice(whole.last, "".join(whole.texts), logprobs, has_begin=True)
        choice["token_ids"] = whole.token_ids if self.prompt.details.has_token_ids else None
        return choice | self.prompt.fields(index)

    def _choice(
        self, last: TextPiece, text: str, logprobs: dict[str, JsonParts] | None, *, has_begin: bool
    ) -> dict[str, Any]:
        return {
            "index": last.index,
            "text": self._echoes[last.index] + text if has_begin else text,
            "logprobs": logprobs,
            "finish_reason": last.finish_reason,
            "stop_reason": last.stop_reason,
        }

    def _lists(self, index: int, items: Sequence[dict[str, bytes]], *, has_begin: bool) -> dict[str, JsonParts]:
        """Return OpenAI's lists of log-probabilities; at the begin with those of an echoed prompt."""
        is_echoed = has_begin and self.prompt.details.num_echo_top is not None
        return as_lists([*self.prompt.echo(index), *items] if is_echoed else items)

    def _items(self, piece: TextPiece) -> dict[str, bytes]:
        return logprob_items(piece.logprobs, num_chars_before=len(self._echoes[piece.index]))


class ChatFormat(AnswerFormat[bytes]):
    """JSON of chat completions.

    Reasoning has two names, ``reasoning_content`` and vLLM's later ``reasoning``: clients read one or the other.

    Without ``make_reader`` the text of an answer is all content.
    """

    object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    text_chunk = b'{"index":%d,"delta":{"content":', b'},"logprobs":null,"finish_reason":null,"stop_reason":null}'

    def __init__(
        self, prompt: PromptPart, use: ToolUse, make_reader: Callable[[], MessageReader] | None, *, has_logprobs: bool
    ) -> None:
        super().__init__(prompt, has_logprobs=has_logprobs)
        self._use = use
        self._make_reader = make_reader
        self._readers: dict[int, MessageReader] = {}
        self._events: dict[int, list[ToolEvent]] = {}

    def head(self, *, is_chunk: bool) -> dict[str, Any]:
        """Return the fields about the prompt."""
        return self.prompt.token_ids(0) if is_chunk else self.prompt.fields(0)

    def around_text(self, index: int) -> tuple[bytes, bytes] | None:
        """Return the JSON around the text of a later piece; ``None`` also where text is read for calls or reasoning."""
        return super().around_text(index) if self._make_reader is None else None

    def chunk(self, piece: TextPiece) -> bytes | None:
        """Return a piece as JSON; the first piece of an answer has the role, that of a call its id and name."""
        delta: dict[str, Any] = {}
        if piece.index not in self._begun:
            self._begun.add(piece.index)
            delta["role"] = "assistant"
        elif self._make_reader is None and not (piece.text or piece.logprobs or piece.finish_reason or piece.token_ids):
            return None
        if self._make_reader is None:
            delta["content"] = piece.text
        else:
            if delta:
                delta["content"] = ""
            delta |= self._read(piece)
            if not (delta or piece.logprobs or piece.finish_reason or piece.token_ids):
                return None
        choice = self._choice(piece, "delta", delta, [self._items(piece)] if self._has_logprobs else None)
        if self.prompt.details.has_token_ids:
            choice["token_ids"] = piece.token_ids
        return b"".join(encode_parts(choice)) if self._has_logprobs else encode(choice)

    def gather(self, piece: TextPiece) -> None:
        """Add a piece to its whole answer, and read it."""
        super().gather(piece)
        if self._make_reader is not None:
            self._events.setdefault(piece.index, []).extend(self._reader(piece.index).feed(piece.text))

    def choice(self, index: int) -> dict[str, Any]:
        """Return the choice of a whole answer."""
        whole = self._whole[index]
        message: dict[str, Any] = {"role": "assistant", "content": None, **NULL_MESSAGE_FIELDS}
        if self._make_reader is None:
            message["content"] = "".join(whole.texts)
        else:
            events = self._events[index] + self._reader(index).finish()
            message |= self._fields(events, -1, is_delta=False)
        choice = self._choice(whole.last, "message", message, whole.logprobs if self._has_logprobs else None)
        choice["token_ids"] = whole.token_ids if self.prompt.details.has_token_ids else None
        return choice

    def _reader(self, index: int) -> MessageReader:
        reader = self._readers.get(index)
        if reader is None:
            assert self._make_reader is not None
            reader = self._readers[index] = self._make_reader()
        return reader

    def _read(self, piece: TextPiece) -> dict[str, Any]:
        """Return the fields of a delta that a piece adds."""
        reader = self._reader(piece.index)
        num_calls = reader.num_calls
        events = reader.feed(piece.text)
        if piece.finish_reason is not None:
            events += reader.finish()
        return self._fields(events, num_calls - 1, is_delta=True)

    def _fields(self, events: Sequence[ToolEvent], last_call: int, *, is_delta: bool) -> dict[str, Any]:
        """Return the fields of a message or delta; ``last_call`` is the index of the call that arguments continue."""
        texts: dict[EventKind, list[str]] = {}
        calls: dict[int, dict[str, Any]] = {}
        arguments: dict[int, list[str]] = {}
        for event in events:
            if event.kind is EventKind.CALL:
                last_call += 1
                numbered = {"index": last_call} if is_delta else {}
                function = {"name": event.text, "arguments": ""}
                calls[last_call] = {**numbered, "id": self._use.new_call_id(), "type": "function", "function": function}
            elif event.kind is EventKind.ARGUMENTS:
                calls.setdefault(last_call, {"index": last_call, "function": {"arguments": ""}})
                arguments.setdefault(last_call, []).append(event.text)
            else:
                texts.setdefault(event.kind, []).append(event.text)
        for index, parts in arguments.items():
            calls[index]["function"]["arguments"] = "".join(parts)
        fields: dict[str, Any] = {}
        if EventKind.REASONING in texts:
            fields["reasoning_content"] = fields["reasoning"] = "".join(texts[EventKind.REASONING])
        if EventKind.CONTENT in texts:
            fields["content"] = "".join(texts[EventKind.CONTENT])
        if calls:
            fields["tool_calls"] = list(calls.values())
        return fields

    def _choice(
        self, last: TextPiece, field: str, content: dict[str, Any], logprobs: Sequence[bytes] | None
    ) -> dict[str, Any]:
        """Return a choice with a ``message`` or a ``delta``; its end is that of its ``last`` piece."""
        finish_reason = last.finish_reason
        if finish_reason == "stop" and self._make_reader is not None and not self._use.is_named:
            finish_reason = "tool_calls" if self._reader(last.index).num_calls else "stop"
        return {
            "index": last.index,
            field: content,
            "logprobs": None if logprobs is None else {"content": JsonParts.of_list(logprobs), "refusal": None},
            "finish_reason": finish_reason,
            "stop_reason": last.stop_reason,
        }

    def _items(self, piece: TextPiece) -> bytes:
        return encode([logprob_entry(token) for token in piece.logprobs])[1:-1]


def _entry(token: TokenLogprob) -> dict[str, Any]:
    return {"token": token.text, "logprob": max(token.logprob, LEAST_LOGPROB), "bytes": list(token.raw)}


def logprob_entry(token: TokenLogprob) -> dict[str, Any]:
    """Return a token with its log-probability and the most likely tokens, as chats have them."""
    return {**_entry(token), "top_logprobs": [_entry(other) for other in token.top]}


def message_readers(
    context: Context, use: ToolUse, prompt: Sequence[int], *, is_constrained: bool
) -> Callable[[], MessageReader] | None:
    """Return a maker of readers for the answers to a chat; ``None`` if their text needs no reading.

    A grammar holds from the first token, so that a constrained answer has no reasoning.
    """
    reasoning = None if is_constrained else context.config.reasoning_parser
    if reasoning is None and use.make_parser is None:
        return None
    end = context.tokenizer.decode(prompt[-PROMPT_END_TOKENS:], skip_special_tokens=False) if reasoning else ""

    def make() -> MessageReader:
        return MessageReader(
            None if reasoning is None else ReasoningSplitter(reasoning, end),
            None if use.make_parser is None else use.make_parser(),
            max_calls=use.max_calls,
        )

    return make
