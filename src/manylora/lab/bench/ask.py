"""One request of the load: sent, read as its stream arrives, and recorded.

The parser knows only what the figures need: events end with an empty line, and their content follows ``data:``. A chunk
counts as tokens if one of its choices has text. In chats the role comes without a token and does not count. The number
of tokens of an answer is the server's, from the usage in its last chunk. For a server that reports none, chunks are
counted, and the report says so.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from manylora.lab.bench.target import aiohttp_or_fail
from manylora.lab.measure import RequestRecord

__all__ = ["EventParser", "LoadAnswer", "LoadRequest", "ask"]

RETRIED = frozenset({429, 503})
MAX_PAUSE_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRequest:
    """One request, ready to be sent."""

    request_id: str
    at_s: float  # when it is due, in seconds from the start of the run
    adapter: str  # name for the record; empty for the base
    num_prompt_tokens: int  # planned length; the server's own count replaces it
    body: bytes  # body of the HTTP request


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadAnswer:
    """The outcome of a question."""

    record: RequestRecord  # the record that reports are made from; times in seconds on the monotonic clock
    num_chunks: int = 0  # chunks that brought text
    has_usage: bool = True  # whether the server said how many tokens there were
    num_retries: int = 0  # times it was refused and sent again


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _ChoiceDelta(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = 0
    prompt_tokens_details: _PromptDetails | None = None


class _Chunk(msgspec.Struct):
    choices: list[_ChoiceDelta] = []
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Chunk).decode


class EventParser:
    """Takes bytes as they come, gives the content of every event that is complete."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield what follows ``data:`` of each event that ends in ``data``; comments and other fields are passed by."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


@dataclass(slots=True)
class _Reading:
    """An answer as far as it has been read."""

    chunk_at: list[float] = field(default_factory=list)
    usage: _Usage | None = None
    error: str | None = None
    is_done: bool = False

    def take(self, content: bytes, now: float) -> None:
        if content == b"[DONE]":
            self.is_done = True
            return
        try:
            chunk = _decode(content)
        except msgspec.DecodeError as error:
            self.error = self.error or f"a chunk that makes no sense: {error}"
            return
        if chunk.error is not None:
            message = chunk.error.get("message", chunk.error) if isinstance(chunk.error, dict) else chunk.error
            self.error = f"an error in the stream: {message}"
        if chunk.usage is not None:
            self.usage = chunk.usage
        for choice in chunk.choices:
            delta = choice.delta
            if choice.text or (delta is not None and (delta.content or delta.reasoning_content)):
                self.chunk_at.append(now)
                break


async def ask(session: Any, url: str, question: LoadRequest, *, retries: int = 0) -> LoadAnswer:
    """Send a question and read the answer to its end; never raises but when cancelled.

    Args:
        session: aiohttp's.
        url: The address.
        question: The request.
        retries: Times to ask again after a refusal for lack of room (429, 503); waiting for it is part of the
            time to first token.
    """
    aiohttp = aiohttp_or_fail()
    began_at = time.monotonic()
    reading = _Reading()
    num_retries = 0
    try:
        while True:
            async with session.post(url, data=question.body) as response:
                if response.status == 200:
                    await _read(response, reading)
                elif response.status in RETRIED and num_retries < retries:
                    num_retries += 1
                    await asyncio.sleep(_pause_s(response.headers.get("Retry-After")))
                    continue
                else:
                    text = (await response.read())[:300].decode(errors="replace")
                    reading.error = f"HTTP {response.status}: {text}"
            break
    except TimeoutError:
        reading.error = "timed out: nothing came for too long"
    except (aiohttp.ClientError, OSError) as error:
        reading.error = f"connection: {type(error).__name__}: {error}"
    return _answer(question, reading, began_at, time.monotonic(), num_retries)


async def _read(response: Any, reading: _Reading) -> None:
    parser = EventParser()
    async for data in response.content.iter_any():
        now = time.monotonic()
        for content in parser.feed(data):
            reading.take(content, now)
    if reading.error is None and not reading.is_done:
        reading.error = "ended early: the stream stopped without [DONE]"


def _pause_s(retry_after: str | None) -> float:
    try:
        return min(MAX_PAUSE_S, max(0.0, float(retry_after or 1.0)))
    except ValueError:
        return 1.0


def _answer(question: LoadRequest, reading: _Reading, began_at: float, ended_at: float, num_retries: int) -> LoadAnswer:
    usage, at = reading.usage, reading.chunk_at
    num_tokens = len(at) if usage is None else usage.completion_tokens or 0
    gaps = [later - earlier for earlier, later in itertools.pairwise(at)]
    details = None if usage is None else usage.prompt_tokens_details
    if reading.error is None and not at and num_tokens:
        at = [ended_at]  # tokens without text: nothing to see before the end
    record = RequestRecord(
        request_id=question.request_id,
        adapter=question.adapter,
        rank=0,
        num_prompt_tokens=question.num_prompt_tokens if usage is None else usage.prompt_tokens,
        num_output_tokens=num_tokens,
        arrived_at=began_at,
        admitted_at=None,
        first_token_at=at[0] if at else None,
        finished_at=at[-1] if at and reading.error is None else ended_at,
        max_gap_s=max(gaps, default=0.0),
        num_cached_tokens=0 if details is None else details.cached_tokens or 0,
        error=reading.error,
        gaps_s=gaps,
    )
    return LoadAnswer(
        record=record, num_chunks=len(reading.chunk_at), has_usage=usage is not None, num_retries=num_retries
    )
