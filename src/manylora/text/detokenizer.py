"""Tokens to text as they come: one detokenizer per request, which knows when an answer is over."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from manylora.text.stop_strings import StopMatch, StopStrings
from manylora.text.tokenizer import Tokenizer
from manylora.types import SampledToken, SamplingParams

__all__ = ["Detokenizer", "TextDelta", "TokenLogprob"]


class TokenLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """What is reported about one token.

    Args:
        token_id: The token.
        text: It on its own (see ``Tokenizer.token_text``).
        raw: Its bytes.
        logprob: Its log-probability.
        top: The most likely tokens at this position, most likely first, their own ``top`` empty.
        text_offset: Characters of answer before it.
    """

    token_id: int
    text: str
    raw: bytes
    logprob: float
    top: tuple[TokenLogprob, ...] = ()
    text_offset: int


class TextDelta(msgspec.Struct, frozen=True, kw_only=True):
    """What new tokens add to an answer.

    Args:
        text: New text, final: it will not be taken back.
        num_tokens: Tokens taken; fewer than were pushed when a stop string ended the answer before the last.
        finished: Nothing will follow.
        stop_reason: The stop string or the requested stop token that ended the answer; ``None`` for an
            end-of-sequence token, for other endings and before the end (vLLM's ``stop_reason``).
        logprobs: One entry per token taken, when the request asks for log-probabilities. They come with their
            tokens, so text that is held back can be later than they are.
    """

    text: str
    num_tokens: int
    finished: bool
    stop_reason: str | int | None = None
    logprobs: tuple[TokenLogprob, ...] = ()


class Detokenizer:
    """Turn the tokens of one request into text, as they come.

    However the tokens are cut into pushes, the deltas add up to the one text: that of the prompt and answer decoded
    together, less the prompt's, up to the stop string. Text is held back only while it ends within a character
    or could still become a stop string. Stop strings are looked for in what follows the first ``min_tokens``
    tokens. A stop token's text is no part of the answer, unless ``include_stop_str_in_output``.

    Args:
        tokenizer: Shared.
        prompt: Token ids before the answer.
        sampling: The request's.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], sampling: SamplingParams) -> None:
        self._tokenizer = tokenizer
        self._sampling = sampling
        self._stops = StopStrings(sampling.stop) if sampling.stop else None
        self._pieces = tokenizer.pieces(prompt, skip_special_tokens=sampling.skip_special_tokens)
        self._num_tokens = 0
        self._num_chars = 0  # decoded, so released or held
        self._finished = False

    def push(self, tokens: Sequence[SampledToken], *, stop_token: int | None = None) -> TextDelta:
        """Take new tokens, in order.

        Args:
            tokens: What was sampled.
            stop_token: The last of ``tokens`` where it ended the sequence (``Output.stop_token``): the answer is
                then finished.
        """
        assert not self._finished, "the answer is over"
        if len(tokens) == 1 and stop_token is None and tokens[0].logprob is None:  # nearly always
            self._num_tokens += 1
            text = self._release(self._pieces.add(tokens[0].token_id))
            if isinstance(text, StopMatch):
                return self._stop_at(text, [], 1, [])
            return TextDelta(text=text, num_tokens=1, finished=False)
        parts: list[str] = []
        logprobs: list[TokenLogprob] = []
        for taken, token in enumerate(tokens, 1):
            self._num_tokens += 1
            if token.logprob is not None:
                logprobs.append(self._report(token.token_id, token.logprob, token.top))
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
        """Release what is held: no token follows. Adds nothing when the answer is over already."""
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

    def _report(self, token_id: int, logprob: float, top: Sequence[tuple[int, float]]) -> TokenLogprob:
        return TokenLogprob(
            token_id=token_id,
            text=self._tokenizer.token_text(token_id),
            raw=self._tokenizer.token_bytes(token_id),
            logprob=logprob,
            top=tuple(self._report(other, value, ()) for other, value in top),
            text_offset=self._num_chars,
        )
