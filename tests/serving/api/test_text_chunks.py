"""Chunks of more text, which the stream joins from constant bytes, are those that the format would make."""

from __future__ import annotations

from typing import Any, cast

import msgspec
import pytest

from manylora.serving.api.answers import TextPiece
from manylora.serving.api.formats import AnswerFormat, ChatFormat, CompletionFormat
from manylora.serving.api.prompt_part import NO_DETAILS, Details, PromptPart
from manylora.serving.api.tools import ToolUse
from manylora.serving.text import MessageReader, ReasoningSplitter

ANSWERS = range(2)
TEXTS = ["a", ' "quoted" \\ and\n', "世界🙂", "\x00\x7f", "%d %b %"]


def prompt(details: Details = NO_DETAILS) -> PromptPart:
    return PromptPart(cast(Any, None), [(1, 2)], len(ANSWERS), details)


def completions(*, has_logprobs: bool = False, details: Details = NO_DETAILS) -> AnswerFormat[Any]:
    return CompletionFormat(["", "echo"], prompt(details), has_logprobs=has_logprobs)


def chats(*, reads: bool = False, has_logprobs: bool = False) -> AnswerFormat[Any]:
    def reader() -> MessageReader:
        return MessageReader(ReasoningSplitter("qwen3", ""), None, max_calls=None)

    return ChatFormat(prompt(), ToolUse(template_variables={}), reader if reads else None, has_logprobs=has_logprobs)


def begin(form: AnswerFormat[Any]) -> None:
    for index in ANSWERS:
        assert form.chunk(TextPiece(index=index, text="first")) is not None


@pytest.mark.parametrize("make", [completions, chats])
@pytest.mark.parametrize("text", TEXTS)
def test_the_bytes_around_text_make_the_chunk_of_the_format(make: Any, text: str) -> None:
    form = make()
    assert all(form.around_text(index) is None for index in ANSWERS), "a first chunk has more"
    begin(form)
    for index in ANSWERS:
        before, after = form.around_text(index)
        assert before + msgspec.json.encode(text) + after == form.chunk(TextPiece(index=index, text=text))


@pytest.mark.parametrize(
    "form",
    [
        completions(has_logprobs=True),
        completions(details=Details(has_token_ids=True)),
        chats(has_logprobs=True),
        chats(reads=True),
    ],
)
def test_no_bytes_are_constant_around_text_that_is_read_or_shown_with_more(form: AnswerFormat[Any]) -> None:
    begin(form)
    assert all(form.around_text(index) is None for index in ANSWERS)
