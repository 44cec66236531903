"""The prompt's part of a response: its tokens and their log-probabilities, as JSON that is made and sent in parts.

A long prompt has a million numbers. They become JSON in slices, between which the event loop serves others, and only
as JSON they wait for the rest of the response. No part is copied into a whole: to copy tens of megabytes once takes
longer than a client should wait for another's token.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import msgspec

from manylora.core.errors import RequestError
from manylora.core.types import PromptLogprobs
from manylora.serving.api.schemas import SamplingFields
from manylora.serving.http.turns import next_turn
from manylora.serving.text import Tokenizer, TokenLogprob, describe_prompt

__all__ = [
    "LEAST_LOGPROB",
    "NO_DETAILS",
    "Details",
    "JsonParts",
    "PromptPart",
    "as_lists",
    "encode_parts",
    "logprob_items",
    "named_by_id",
]

MAX_PROMPT_LOGPROBS = 1 << 20  # log-probabilities of the prompts of a request: each is some 70 bytes of JSON
LEAST_LOGPROB = -9999.0  # vLLM's number for minus infinity, which JSON does not have
SLICE_NUMBERS = 1024  # log-probabilities that become JSON at once, in a millisecond or two

LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")

encode = msgspec.json.encode


class JsonParts:
    """A value that is JSON already, as bytes in several parts. It may stand in a value for ``encode_parts``."""

    __slots__ = ("parts",)

    def __init__(self, parts: Iterable[bytes]) -> None:
        self.parts = list(parts)

    @classmethod
    def of_list(cls, items: Sequence[bytes]) -> JsonParts:
        """Return the JSON of a list; each of ``items`` is empty or some elements as JSON, separated by commas."""
        parts = [b"["]
        for part in filter(None, items):
            if len(parts) > 1:
                parts.append(b",")
            parts.append(part)
        return cls([*parts, b"]"])


def encode_parts(value: Any) -> list[bytes]:
    """Return the JSON of a value that has ``JsonParts`` in it, in parts."""
    mark = b'"%b"' % uuid.uuid4().hex.encode()  # no text of a client can be it
    long: list[JsonParts] = []

    def set_aside(one: Any) -> msgspec.Raw:
        assert isinstance(one, JsonParts)
        long.append(one)
        return msgspec.Raw(mark)

    between = msgspec.json.Encoder(enc_hook=set_aside).encode(value).split(mark)
    parts = [between[0]]
    for one, after in zip(long, between[1:], strict=True):
        parts += one.parts
        parts.append(after)
    return parts


@dataclass(frozen=True, slots=True, kw_only=True)
class Details:
    """The details that a response shows beside the text of its answers."""

    has_token_ids: bool = False  # token ids of prompts and answers: vLLM's ``return_token_ids``
    is_by_token: bool = False  # tokens that arrive together are read one by one
    names_by_id: bool = False  # tokens in log-probabilities are named ``token_id:5``: ``return_tokens_as_token_ids``
    num_prompt_top: int | None = None  # most likely tokens in vLLM's ``prompt_logprobs``; ``None`` for no such list
    # Most likely tokens of the prompt in OpenAI's ``logprobs`` with ``echo``; ``None`` for none.
    num_echo_top: int | None = None
    is_prompt_only: bool = False  # the answer, of one token, is left out: ``max_tokens`` is 0

    @classmethod
    def of(cls, body: SamplingFields, *, num_echo_top: int | None = None, is_prompt_only: bool = False) -> Details:
        """Return the details that a request asks for; ``RequestError`` for a stream that cannot have them."""
        if body.stream and body.prompt_logprobs is not None:
            raise RequestError("`prompt_logprobs` are not available when `stream=True`.", param="prompt_logprobs")
        return cls(
            has_token_ids=bool(body.return_token_ids),
            names_by_id=bool(body.return_tokens_as_token_ids),
            num_prompt_top=body.prompt_logprobs,
            num_echo_top=num_echo_top,
            is_prompt_only=is_prompt_only,
        )

    @property
    def prompt_logprobs(self) -> int | None:
        """The number of most likely tokens that the engine reports for the prompt; ``None`` for no report."""
        return max((top for top in (self.num_prompt_top, self.num_echo_top) if top is not None), default=None)


NO_DETAILS = Details()


class PromptPart:
    """The prompts' part of one response; ``RequestError`` if they have too many log-probabilities in all."""

    def __init__(
        self, tokenizer: Tokenizer, prompts: Sequence[tuple[int, ...]], num_answers: int, details: Details
    ) -> None:
        self.details = details
        self._tokenizer = tokenizer
        self._prompts = prompts
        self._num_answers = num_answers
        self._token_ids: dict[int, msgspec.Raw] = {}  # JSON, by prompt
        self._listed: dict[int, JsonParts] = {}  # vLLM's list, by answer
        self._echoed: dict[int, list[dict[str, bytes]]] = {}  # the items of OpenAI's lists, likewise
        num_top = details.prompt_logprobs
        num_numbers = 0 if num_top is None else sum(map(len, prompts)) * num_answers * (num_top + 1)
        if num_numbers > MAX_PROMPT_LOGPROBS:
            raise RequestError(
                f"The prompts have {num_numbers} log-probabilities, expected at most {MAX_PROMPT_LOGPROBS} in one "
                "request: send fewer prompts at a time, or ask for fewer at each token",
                param="prompt_logprobs" if details.num_echo_top is None else "logprobs",
            )

    async def add(self, index: int, report: PromptLogprobs) -> None:
        """Make the JSON of the log-probabilities of an answer's prompt."""
        if (num_top := self.details.num_prompt_top) is not None:
            self._listed[index] = await self._list(report, num_top)
        if (num_top := self.details.num_echo_top) is not None:
            self._echoed[index] = await self._echo(self._prompt(index), report, num_top)

    def fields(self, index: int) -> dict[str, Any]:
        """Return vLLM's fields about the prompt of an answer; null if they are not asked for."""
        logprobs = JsonParts([b"[null]"]) if self.details.num_prompt_top is not None else None  # of a single token
        return {
            "prompt_logprobs": self._listed.get(index, logprobs),
            "prompt_token_ids": self._token_ids_of(index) if self.details.has_token_ids else None,
        }

    def token_ids(self, index: int) -> dict[str, Any]:
        """Return the tokens of an answer's prompt as a field, if they are asked for."""
        return {"prompt_token_ids": self._token_ids_of(index)} if self.details.has_token_ids else {}

    def echo(self, index: int) -> list[dict[str, bytes]]:
        """Return the items of OpenAI's lists for the prompt of an answer, as JSON in parts."""
        return self._echoed.get(index) or [self._first(self._prompt(index))]

    def _token_ids_of(self, index: int) -> msgspec.Raw:
        """Return the tokens of an answer's prompt as JSON, which all of its answers share."""
        prompt = index // self._num_answers
        if prompt not in self._token_ids:
            self._token_ids[prompt] = msgspec.Raw(encode(self._prompts[prompt]))
        return self._token_ids[prompt]

    def _prompt(self, index: int) -> tuple[int, ...]:
        return self._prompts[index // self._num_answers]

    async def _list(self, report: PromptLogprobs, num_top: int) -> JsonParts:
        parts = [b"null"]
        text = self._tokenizer.token_text
        num_rows = max(1, SLICE_NUMBERS // (num_top + 1))
        for start in range(0, len(report), num_rows):
            rows: list[dict[str, Any]] = []
            for token in report.rows(start, start + num_rows):
                row: dict[str, Any] = {}
                ranked = enumerate(token.top[:num_top], 1)
                for token_id, value, rank in (token[:3], *((other, value, rank) for rank, (other, value) in ranked)):
                    row[str(token_id)] = {"logprob": value, "rank": rank, "decoded_token": text(token_id)}
                rows.append(row)
            parts.append(encode(rows)[1:-1])
            await next_turn()
        return JsonParts.of_list(parts)

    async def _echo(self, prompt: tuple[int, ...], report: PromptLogprobs, num_top: int) -> list[dict[str, bytes]]:
        parts = [self._first(prompt)]
        tokens = describe_prompt(self._tokenizer, prompt, report)
        num_rows = max(1, SLICE_NUMBERS // (num_top + 1))
        while rows := [msgspec.structs.replace(token, top=token.top[:num_top]) for token in islice(tokens, num_rows)]:
            named = map(named_by_id, rows) if self.details.names_by_id else rows
            parts.append(logprob_items(tuple(named)))
            await next_turn()
        return parts

    def _first(self, prompt: tuple[int, ...]) -> dict[str, bytes]:
        """Return the items of the first token, which has no probability."""
        raw = self._tokenizer.token_bytes(prompt[0])
        name = f"token_id:{prompt[0]}" if self.details.names_by_id else _name(raw)
        return dict(zip(LISTS, (encode(name), b"null", b"null", b"0"), strict=True))


def logprob_items(tokens: Sequence[TokenLogprob], *, num_chars_before: int = 0) -> dict[str, bytes]:
    """Return the items of OpenAI's lists of a completion's log-probabilities, as JSON without brackets."""
    lists: dict[str, list[Any]] = {
        "tokens": [_name(token.raw) for token in tokens],
        "token_logprobs": [max(token.logprob, LEAST_LOGPROB) for token in tokens],
        "top_logprobs": [
            {_name(other.raw): max(other.logprob, LEAST_LOGPROB) for other in (token, *token.top)} for token in tokens
        ],
        "text_offset": [num_chars_before + token.text_offset for token in tokens],
    }
    return {name: encode(values)[1:-1] for name, values in lists.items()}


def as_lists(parts: Sequence[Mapping[str, bytes]]) -> dict[str, JsonParts]:
    """Return OpenAI's ``logprobs`` of a whole answer; ``parts`` are the JSON elements of each list, in order."""
    return {name: JsonParts.of_list([one[name] for one in parts]) for name in LISTS}


def named_by_id(token: TokenLogprob) -> TokenLogprob:
    """Return a token, and the most likely ones, under the name ``token_id:5``."""
    name = f"token_id:{token.token_id}"
    return msgspec.structs.replace(
        token, text=name, raw=name.encode(), top=tuple([named_by_id(other) for other in token.top])
    )


def _name(raw: bytes) -> str:
    """Return a token as OpenAI names it: its text, or its bytes if they are not valid UTF-8."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
