"""Output of ``/v1/responses``: the items of an answer, and the events of a stream that build them up."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from manylora.core.errors import ManyloraError
from manylora.serving.api.answers import RequestAnswers, TextPiece
from manylora.serving.api.formats import logprob_entry
from manylora.serving.api.respond import EventStream, version_headers
from manylora.serving.http.errors import error_response
from manylora.serving.http.turns import ClientGone
from manylora.serving.text import MessageReader
from manylora.serving.text.tools import EventKind, ToolEvent

__all__ = ["BuiltResponse", "OutputItems", "ResponseStream", "WholeResponse"]

encode = msgspec.json.encode


class OutputItems:
    """The items of one answer: reasoning, messages and calls, the last of them open until the next begins."""

    def __init__(self, new_call_id: Callable[[], str]) -> None:
        self._new_call_id = new_call_id
        self._kind: EventKind | None = None
        self._parts: list[str] = []
        self._logprobs: list[msgspec.Raw] = []  # of the open item
        self.done: list[dict[str, Any]] = []
        self._item: dict[str, Any] = {}

    def add(self, events: Sequence[ToolEvent], logprobs: Sequence[msgspec.Raw] = ()) -> list[dict[str, Any]]:
        """Add text; return the events of the stream that report it.

        ``logprobs`` are those of the tokens that complete the text, as JSON: only content shows them.
        """
        reports: list[dict[str, Any]] = []
        for kind, text in events:
            if kind is EventKind.CALL or (kind is not EventKind.ARGUMENTS and kind is not self._kind):
                reports += self.close("completed")
                reports += self._open(kind, text)
            if kind is not EventKind.CALL:
                self._parts.append(text)
                shown = {}
                if kind is EventKind.CONTENT and logprobs:
                    shown["logprobs"], logprobs = list(logprobs), ()
                    self._logprobs += shown["logprobs"]
                reports.append(self._report(f"{_NAMES[self._item['type']]}.delta", delta=text, **shown))
        return reports

    def close(self, status: str) -> list[dict[str, Any]]:
        """End the open item, if any; return the events that report it."""
        if self._kind is None:
            return []
        text, item, logprobs = "".join(self._parts), self._item, self._logprobs
        item["status"] = status
        self._kind, self._parts, self._logprobs = None, [], []
        name = _NAMES[item["type"]]
        if item["type"] == "function_call":
            item["arguments"] = text
            reports = [self._report(f"{name}.done", arguments=text, name=item["name"])]
        else:
            part = _part(item["type"], text, logprobs)
            item["content"] = [part]
            shown = {"logprobs": logprobs} if item["type"] == "message" else {}
            reports = [self._report(f"{name}.done", text=text, **shown), self._report("content_part.done", part=part)]
        reports.append({"type": "response.output_item.done", "output_index": len(self.done), "item": item})
        self.done.append(item)
        return reports

    def _open(self, kind: EventKind, name: str) -> list[dict[str, Any]]:
        self._kind = kind
        if kind is EventKind.CALL:
            item: dict[str, Any] = {"type": "function_call", "id": _new_id("fc")}
            item |= {"call_id": self._new_call_id(), "name": name, "arguments": ""}
        elif kind is EventKind.REASONING:
            item = {"type": "reasoning", "id": _new_id("rs"), "summary": [], "content": []}
        else:
            item = {"type": "message", "id": _new_id("msg"), "role": "assistant", "content": []}
        item["status"] = "in_progress"
        self._item = item
        reports = [{"type": "response.output_item.added", "output_index": len(self.done), "item": dict(item)}]
        if kind is not EventKind.CALL:
            reports.append(self._report("content_part.added", part=_part(item["type"], "")))
        return reports

    def _report(self, kind: str, /, **fields: Any) -> dict[str, Any]:
        place: dict[str, Any] = {"item_id": self._item["id"], "output_index": len(self.done)}
        if self._item["type"] != "function_call":
            place["content_index"] = 0
        if kind.startswith("output_text"):
            place["logprobs"] = []
        return {"type": f"response.{kind}", **place, **fields}


_NAMES = {"function_call": "function_call_arguments", "message": "output_text", "reasoning": "reasoning_text"}


def _part(kind: str, text: str, logprobs: Sequence[msgspec.Raw] = ()) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


@dataclass(eq=False)
class BuiltResponse:
    """A response while it is built."""

    answers: RequestAnswers  # started answers, of one request
    reader: MessageReader  # reads the answer's text
    fields: dict[str, Any]  # the fields of the response that are known before its output
    items: OutputItems
    _status: str = "completed"
    _num_chars: int = 0  # of the text that was read
    _num_thought: int = 0  # tokens up to that with which the reasoning ends
    _unread: list[msgspec.Raw] = field(default_factory=list)  # log-probabilities of tokens whose text is held

    def read(self, pieces: list[TextPiece]) -> list[dict[str, Any]]:
        """Add pieces to the items; return the events of the stream that report them."""
        reports: list[dict[str, Any]] = []
        thinks = self.reader.reasoning
        for piece in pieces:
            if thinks is not None and not thinks.is_over:
                self._num_thought += len(piece.token_ids)
            reports += self._add(piece) if piece.logprobs else self.items.add(self.reader.feed(piece.text))
            if piece.finish_reason is not None:
                reports += self.items.add(self.reader.finish(), self._unread)
                self._status = "incomplete" if piece.finish_reason == "length" else "completed"
                reports += self.items.close(self._status)
        return reports

    def _add(self, piece: TextPiece) -> list[dict[str, Any]]:
        """Add a piece token by token, so that its log-probabilities come with their own text."""
        reports: list[dict[str, Any]] = []
        thinks = self.reader.reasoning
        ends = [token.text_offset - self._num_chars for token in piece.logprobs[1:]]
        begin = 0
        for token, end in zip(piece.logprobs, [*ends, len(piece.text)], strict=True):
            self._unread.append(msgspec.Raw(encode(logprob_entry(token))))
            was_inside = thinks is not None and thinks.is_inside
            if events := self.reader.feed(piece.text[begin : (begin := max(begin, end))]):
                reports += self.items.add(events, self._unread)
                self._unread = []
            elif thinks is not None and (was_inside or thinks.is_inside):
                self._unread = []  # of the reasoning, or of a tag around it
        self._num_chars += len(piece.text)
        return reports

    def begun(self) -> dict[str, Any]:
        """Return the response before its output."""
        return {**self.fields, "status": "in_progress", "error": None, "incomplete_details": None, "output": []}

    def ended(self) -> dict[str, Any]:
        """Return the whole response."""
        usage = self.answers.usage()
        has_thought = any(item["type"] == "reasoning" for item in self.items.done)
        return {
            **self.begun(),
            "status": self._status,
            "incomplete_details": {"reason": "max_output_tokens"} if self._status == "incomplete" else None,
            "output": self.items.done,
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": {"cached_tokens": self.answers.num_cached_tokens},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": self._num_thought if has_thought else 0},
                "total_tokens": usage["total_tokens"],
            },
        }

    def failed(self, error: ManyloraError) -> dict[str, Any]:
        """Return the response up to an error."""
        failure = {"code": "server_error", "message": str(error)}
        return {**self.begun(), "status": "failed", "error": failure, "output": self.items.done}


class WholeResponse(Response):
    """A whole response."""

    def __init__(self, built: BuiltResponse) -> None:
        self._built = built

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Wait for the answer, then send it."""

        def gather(pieces: list[TextPiece]) -> None:
            self._built.read(pieces)

        answers = self._built.answers
        async with answers.while_connected(receive):
            try:
                await answers.deliver(gather)
            except ClientGone:
                return
            except ManyloraError as error:
                response = error_response(error)
            else:
                headers = {name.decode(): value.decode() for name, value in version_headers(answers)}
                response = Response(encode(self._built.ended()), headers=headers, media_type="application/json")
            await response(scope, receive, send)


class ResponseStream(EventStream):
    """A response as events, each with a type and a number."""

    def __init__(self, built: BuiltResponse) -> None:
        super().__init__(built.answers)
        self._built = built
        self._number = 0

    def _first(self) -> bytes:
        begun = self._built.begun()
        return self._encode([{"type": f"response.{name}", "response": begun} for name in ("created", "in_progress")])

    def _render(self, pieces: list[TextPiece]) -> bytes:
        return self._encode(self._built.read(pieces))

    def _last(self) -> bytes:
        return self._end(self._built.ended())

    def _failed(self, error: ManyloraError) -> bytes:
        return self._end(self._built.failed(error))

    def _end(self, ended: dict[str, Any]) -> bytes:
        return self._encode([{"type": f"response.{ended['status']}", "response": ended}])

    def _encode(self, reports: list[dict[str, Any]]) -> bytes:
        body = b""
        for report in reports:
            report["sequence_number"] = self._number
            self._number += 1
            body += b"event: " + report["type"].encode() + b"\ndata: " + encode(report) + b"\n\n"
        return body
