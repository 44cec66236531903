"""JSON of chat completions whose text is read: reasoning, content and tool calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from manylora.serving.api.answers import TextPiece, WholeAnswer
from manylora.serving.api.json_parts import JsonParts, encode_parts
from manylora.serving.api.prompt_part import LEAST_LOGPROB, Details, PromptPart
from manylora.serving.api.request import Context
from manylora.serving.api.tools import ToolUse
from manylora.serving.text import MessageReader, ReasoningSplitter, TokenLogprob
from manylora.serving.text.tools import EventKind, ToolEvent

__all__ = [
    "NULL_MESSAGE_FIELDS",
    "MessageFormat",
    "chat_choice",
    "chat_head",
    "chat_logprobs",
    "logprob_items",
    "message_readers",
]

NULL_MESSAGE_FIELDS = dict.fromkeys(("refusal", "annotations", "audio", "function_call"))
"""Fields of whole messages that OpenAI and vLLM have and that are always null here."""

PROMPT_END_TOKENS = 8
"""Tokens at the end of a prompt in which a template opens or closes the reasoning."""


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


class MessageFormat:
    """JSON of chat completions with reasoning and tool calls.

    Reasoning has two names, ``reasoning_content`` and vLLM's later ``reasoning``: clients read one or the other.

    Args:
        make_reader: Makes the reader of an answer.
        use: The part of tools in the request.
        prompt: The prompt's part of the response.
        has_logprobs: Whether log-probabilities were requested.
    """

    object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    repeats_prompt = False

    def __init__(
        self, make_reader: Callable[[], MessageReader], use: ToolUse, prompt: PromptPart, *, has_logprobs: bool
    ) -> None:
        self.prompt = prompt
        self._make_reader = make_reader
        self._use = use
        self._has_logprobs = has_logprobs
        self._readers: dict[int, MessageReader] = {}
        self._whole: dict[int, WholeAnswer[bytes]] = {}
        self._events: dict[int, list[ToolEvent]] = {}

    def head(self, *, is_chunk: bool) -> dict[str, Any]:
        """Return the fields about the prompt."""
        return chat_head(self.prompt, is_chunk=is_chunk)

    def chunk(self, piece: TextPiece) -> bytes | None:
        """Return the choice of a chunk; the first of an answer has the role, the first of a call its id and name."""
        delta: dict[str, Any] = {}
        if piece.index not in self._readers:
            self._readers[piece.index] = self._make_reader()
            delta = {"role": "assistant", "content": ""}
        reader = self._readers[piece.index]
        num_calls = reader.num_calls
        events = reader.feed(piece.text)
        if piece.finish_reason is not None:
            events += reader.finish()
        delta |= self._fields(events, num_calls - 1, is_delta=True)
        if not (delta or piece.logprobs or piece.finish_reason or piece.token_ids):
            return None
        logprobs = chat_logprobs([logprob_items(piece)]) if self._has_logprobs else None
        choice = self._choice(reader, piece, "delta", delta, logprobs, piece.token_ids)
        return msgspec.json.encode(choice) if logprobs is None else b"".join(encode_parts(choice))

    def gather(self, piece: TextPiece) -> None:
        """Add a piece to its whole answer."""
        if piece.index not in self._readers:
            self._readers[piece.index] = self._make_reader()
        whole = self._whole.setdefault(piece.index, WholeAnswer())
        whole.add(piece, logprob_items(piece) if self._has_logprobs else None)
        self._events.setdefault(piece.index, []).extend(self._readers[piece.index].feed(piece.text))

    def choice(self, index: int) -> dict[str, Any]:
        """Return the choice of a whole answer."""
        whole, reader = self._whole[index], self._readers[index]
        events = self._events[index] + reader.finish()
        message: dict[str, Any] = {"role": "assistant", "content": None, **NULL_MESSAGE_FIELDS}
        message |= self._fields(events, -1, is_delta=False)
        logprobs = chat_logprobs(whole.logprobs) if self._has_logprobs else None
        return self._choice(reader, whole.last, "message", message, logprobs, whole.token_ids)

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
        self,
        reader: MessageReader,
        last: TextPiece,
        field: str,
        content: dict[str, Any],
        logprobs: dict[str, JsonParts | None] | None,
        token_ids: Sequence[int],
    ) -> dict[str, Any]:
        choice = chat_choice(last, field, content, logprobs, token_ids, self.prompt.details)
        if choice["finish_reason"] == "stop" and reader.num_calls and not self._use.is_named:
            choice["finish_reason"] = "tool_calls"
        return choice


def chat_head(prompt: PromptPart, *, is_chunk: bool) -> dict[str, Any]:
    """Return the fields about the prompt that a whole response, or the first chunk, has beside the choices."""
    return prompt.token_ids(0) if is_chunk else prompt.fields(0)


def chat_choice(
    last: TextPiece,
    field: str,
    content: dict[str, Any],
    logprobs: dict[str, JsonParts | None] | None,
    token_ids: Sequence[int],
    details: Details,
) -> dict[str, Any]:
    """Return a choice with a ``message`` or a ``delta``; its end is that of its ``last`` piece."""
    choice: dict[str, Any] = {
        "index": last.index,
        field: content,
        "logprobs": logprobs,
        "finish_reason": last.finish_reason,
        "stop_reason": last.stop_reason,
    }
    if details.has_token_ids:
        choice["token_ids"] = token_ids
    elif field == "message":
        choice["token_ids"] = None
    return choice


def logprob_items(piece: TextPiece) -> bytes:
    """Return the log-probabilities of a piece's tokens as JSON without brackets."""
    return msgspec.json.encode([_logprob(token) for token in piece.logprobs])[1:-1]


def chat_logprobs(items: Sequence[bytes]) -> dict[str, JsonParts | None]:
    """Return the ``logprobs`` of a choice from the items of its pieces."""
    return {"content": JsonParts.of_list(items), "refusal": None}


def _entry(token: TokenLogprob) -> dict[str, Any]:
    return {"token": token.text, "logprob": max(token.logprob, LEAST_LOGPROB), "bytes": list(token.raw)}


def _logprob(token: TokenLogprob) -> dict[str, Any]:
    return {**_entry(token), "top_logprobs": [_entry(other) for other in token.top]}
