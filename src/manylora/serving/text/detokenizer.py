"""Incremental detokenisation: one detokenizer per request, which also ends the answer at a stop string."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from manylora.core.types import PromptLogprobs, SampledToken, SamplingParams
from manylora.serving.text.stop_strings import StopMatch, StopStrings
from manylora.serving.text.tokenizer import Tokenizer

__all__ = ["Detokenizer", "TextDelta", "TokenLogprob", "describe_prompt"]


class TokenLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """The log-probability of one token.

    Args:
        text: The token on its own (see ``Tokenizer.token_text``).
        raw: Its bytes.
        top: The most likely tokens at this position, most likely first; their own ``top`` is empty.
        text_offset: Characters of the answer, or of the prompt that it is a token of, before it.
    """

    token_id: int
    text: str
    raw: bytes
    logprob: float
    top: tuple[TokenLogprob, ...] = ()
    text_offset: int


class TextDelta(msgspec.Struct, frozen=True, kw_only=True):
    """The text that new tokens add to an answer.

    Args:
        text: New text; it is final.
        num_tokens: Tokens used; fewer than were pushed when a stop string ended the answer before the last.
        finished: Whether the answer is over.
        stop_reason: The stop string or the requested stop token that ended the answer; ``None`` for an
            end-of-sequence token, for other endings and before the end (vLLM's ``stop_reason``).
        logprobs: One entry per token used, when the request asks for log-probabilities. They come with their
            tokens, so held text can come later.
    """

    text: str
    num_tokens: int
    finished: bool
    stop_reason: str | int | None = None
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

    def push(self, tokens: Sequence[SampledToken], *, stop_token: int | None = None) -> TextDelta:
        """Add sampled tokens, in order.

        ``stop_token`` is the last of them if it ended the sequence (``Output.stop_token``) and so the answer.
        """
        assert not self._finished, "the answer is over"
        if len(tokens) == 1 and stop_token is None and tokens[0].logprob is None:  # the usual case
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

    Args:
        tokenizer: The base model's tokenizer.
        prompt: Token ids.
        logprobs: A row for each token from the second on. Their ``text_offset`` counts a text without special tokens.
    """
    pieces = tokenizer.pieces((), skip_special_tokens=True)
    offset = len(pieces.add(prompt[0]))
    for token in logprobs.rows():
        yield _token_logprob(tokenizer, token.token_id, token.logprob, token.top, offset)
        offset += len(pieces.add(token.token_id))
