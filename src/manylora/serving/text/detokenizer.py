"""Incremental detokenisation: one detokenizer per request, which also ends the answer at a stop string.

Text arrives in pieces; only a possible beginning of a stop string is held.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from manylora.core.types import PromptLogprobs, SampledToken, SamplingParams
from manylora.serving.text.tokenizer import Tokenizer

__all__ = ["Detokenizer", "StopMatch", "StopStrings", "TextDelta", "TokenLogprob", "describe_prompt"]


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A stop string that was found, and the text before it that was not released yet."""

    stop: str
    before: str


class _StopProgress:
    """The longest beginning of one stop string that the text so far ends with.

    Knuth, Morris and Pratt's automaton. After a character that does not fit, it falls back to the longest end of the
    beginning that begins the string too *and goes on with another character*, so that a character costs
    logarithmically many steps in the worst case, also for a string of one repeated character. The table of fallbacks
    grows as far as the text has matched: a long string costs nothing at first.
    """

    __slots__ = ("_border", "_fallbacks", "length", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.length = 0
        self._fallbacks = [-1]  # of each beginning; -1 for none, not even the empty one
        self._border = 0  # longest end of the last beginning in the table that begins the string; of the first, none

    def add(self, char: str) -> bool:
        """Add a character of the text; return whether the string is complete."""
        stop, fallbacks, length = self.stop, self._fallbacks, self.length
        while length >= 0 and stop[length] != char:
            length = fallbacks[length]
        self.length = length = length + 1
        if length == len(stop):
            return True
        if length == len(fallbacks):
            self._extend(length)
        return False

    def _extend(self, length: int) -> None:
        """Add the fallback of ``stop[:length]``, the first beginning that has none."""
        stop, fallbacks, border = self.stop, self._fallbacks, self._border
        char = stop[length]
        fallbacks.append(fallbacks[border] if stop[border] == char else border)
        while border >= 0 and stop[border] != char:
            border = fallbacks[border]
        self._border = border + 1


class StopStrings:
    """Find the stop string that completes first (of those that complete together, the longest).

    That rule does not depend on the cuts between pieces. Text is released as soon as no continuation can make it part
    of a stop string::

        ... released | held = the longest end of the text that begins a stop string
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._all = [_StopProgress(stop) for stop in stops]
        self._firsts = frozenset(stop[0] for stop in stops)
        self._held = ""

    def feed(self, text: str) -> str | StopMatch:
        """Add the next piece; return the text to release, or the match that ends it."""
        if not self._held and self._firsts.isdisjoint(text):  # the usual case
            return text
        begin = len(self._held)
        text = self._held + text
        for at in range(begin, len(text)):
            char, found = text[at], ""
            for progress in self._all:
                if progress.add(char) and len(progress.stop) > len(found):
                    found = progress.stop
            if found:
                self._held = ""
                return StopMatch(stop=found, before=text[: at + 1 - len(found)])
        keep = max((progress.length for progress in self._all), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """Release the held text: no piece follows."""
        held, self._held = self._held, ""
        return held


class TokenLogprob(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The log-probability of one token."""

    token_id: int
    text: str  # the token on its own (see ``Tokenizer.token_text``)
    raw: bytes  # its bytes
    logprob: float
    # The most likely tokens at this position, most likely first; their own ``top`` is empty.
    top: tuple[TokenLogprob, ...] = ()
    text_offset: int  # characters of the answer, or of the prompt that it is a token of, before it


class TextDelta(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The text that new tokens add to an answer."""

    text: str  # new text; it is final
    num_tokens: int  # tokens used; fewer than were pushed when a stop string ended the answer before the last
    finished: bool  # whether the answer is over
    # The stop string or the requested stop token that ended the answer; ``None`` for an end-of-sequence token, for
    # other endings and before the end (vLLM's ``stop_reason``).
    stop_reason: str | int | None = None
    # One entry per token used, when the request asks for log-probabilities. They come with their tokens, so held text
    # can come later.
    logprobs: tuple[TokenLogprob, ...] = ()


class Detokenizer:
    """Turn the tokens of one request into text, incrementally.

    The deltas add up to the same text for any split of the tokens into pushes: prompt and answer decoded together, less
    the prompt's text, up to the stop string. Text is held only while it ends within a character or could become a stop
    string. Stop strings are searched after the first ``min_tokens`` tokens. A stop token's text is left out, unless
    ``include_stop_str_in_output``.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], sampling: SamplingParams) -> None:
        self._tokenizer = tokenizer
        self._sampling = sampling
        self._stops = StopStrings(sampling.stop) if sampling.stop else None
        self._pieces = tokenizer.pieces(prompt, skip_special_tokens=sampling.skip_special_tokens)
        self._num_tokens = 0
        self._num_chars = 0  # decoded, both released and held
        self._finished = False

    def add(self, token_id: int) -> str | TextDelta:
        """Add a token without a log-probability that did not end the sequence, as nearly all are.

        Return its new text alone, or the delta with which a stop string ends the answer.
        """
        self._num_tokens += 1
        text = self._release(self._pieces.add(token_id))
        return self._stop_at(text, [], 1, []) if isinstance(text, StopMatch) else text

    def push(self, tokens: Sequence[SampledToken], *, stop_token: int | None = None) -> TextDelta:
        """Add sampled tokens, in order.

        ``stop_token`` is the last of them if it ended the sequence (``Output.stop_token``) and so the answer.
        """
        assert not self._finished, "the answer is over"
        if len(tokens) == 1 and stop_token is None and tokens[0].logprob is None:
            added = self.add(tokens[0].token_id)
            return TextDelta(text=added, num_tokens=1, finished=False) if isinstance(added, str) else added
        parts: list[str] = []
        logprobs: list[TokenLogprob] = []
        for taken, token in enumerate(tokens, 1):
            self._num_tokens += 1
            if token.logprob is not None:
                logprobs.append(
                    _token_logprob(self._tokenizer, token.token_id, token.logprob, token.top, self._num_chars)
                )
            is_stop = stop_token is not None and taken == len(tokens)
            if is_stop and not self._sampling.include_stop_str_in_output:
                break
            released = self._release(self._pieces.add(token.token_id))
            if isinstance(released, StopMatch):
                return self._stop_at(released, parts, taken, logprobs)
            parts.append(released)
        if stop_token is None:
            return TextDelta(text="".join(parts), num_tokens=len(tokens), finished=False, logprobs=tuple(logprobs))
        rest = self.finish()
        asked_for = stop_token in self._sampling.stop_token_ids
        return TextDelta(
            text="".join(parts) + rest.text,
            num_tokens=len(tokens),
            finished=True,
            stop_reason=rest.stop_reason or (stop_token if asked_for else None),
            logprobs=tuple(logprobs),
        )

    def finish(self) -> TextDelta:
        """Release the held text: no token follows. Adds nothing when the answer is over already."""
        if self._finished:
            return TextDelta(text="", num_tokens=0, finished=True)
        self._finished = True
        released = self._release(self._pieces.end())
        if isinstance(released, StopMatch):
            return self._stop_at(released, [], 0, [])
        held = "" if self._stops is None else self._stops.flush()
        return TextDelta(text=released + held, num_tokens=0, finished=True)

    def _stop_at(self, match: StopMatch, parts: list[str], taken: int, logprobs: list[TokenLogprob]) -> TextDelta:
        self._finished = True
        kept = match.stop if self._sampling.include_stop_str_in_output else ""
        return TextDelta(
            text="".join(parts) + match.before + kept,
            num_tokens=taken,
            finished=True,
            stop_reason=match.stop,
            logprobs=tuple(logprobs),
        )

    def _release(self, text: str) -> str | StopMatch:
        self._num_chars += len(text)
        if not text or self._stops is None or self._num_tokens <= self._sampling.min_tokens:
            return text
        return self._stops.feed(text)


def _token_logprob(
    tokenizer: Tokenizer, token_id: int, logprob: float, top: Sequence[tuple[int, float]], text_offset: int
) -> TokenLogprob:
    """Return a token's log-probability with the texts of the tokens; ``top`` are the most likely ones."""
    return TokenLogprob(
        token_id=token_id,
        text=tokenizer.token_text(token_id),
        raw=tokenizer.token_bytes(token_id),
        logprob=logprob,
        top=tuple([_token_logprob(tokenizer, other, value, (), text_offset) for other, value in top]),
        text_offset=text_offset,
    )


def describe_prompt(tokenizer: Tokenizer, prompt: Sequence[int], logprobs: PromptLogprobs) -> Iterator[TokenLogprob]:
    """Yield the tokens of a prompt from its second on, with their log-probabilities; the first has none.

    Their ``text_offset`` counts a text without special tokens.
    """
    pieces = tokenizer.pieces((), skip_special_tokens=True)
    offset = len(pieces.add(prompt[0]))
    for token in logprobs.rows():
        yield _token_logprob(tokenizer, token.token_id, token.logprob, token.top, offset)
        offset += len(pieces.add(token.token_id))
