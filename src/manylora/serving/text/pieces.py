"""Text of an answer token by token: the text that each token adds.

A token need not be text by itself: it can end within a character, and some decoders treat spaces, or the first token
of a text, specially. So in general the new text is the difference between decoding the last tokens with and without
the new one. Byte-level decoders (GPT-2's, Llama 3's, Qwen's and most others today) only concatenate bytes; there a
table of the bytes of each token is as exact, and several times as fast.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

__all__ = ["BytePieces", "ByteTable", "DecodedPieces", "TextPieces"]

CONTEXT_TOKENS = 8
"""Prompt tokens decoded before the first answer token, so that it keeps its leading space."""

MAX_WINDOW_TOKENS = 16
"""Most tokens in the window before it is cut to the newest: a cut costs one more decode."""

MAX_UNREADABLE_TOKENS = 32
"""Most tokens without a readable end; then the text is released as it is, because no character is that long."""

MAX_SILENT_TOKENS = 32
"""Most tokens without text (skipped special ones) kept in the window; a model can emit thousands."""

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class TextPieces(Protocol):
    """Converts one answer's tokens, in order, to pieces that add up to the text of all of them."""

    def add(self, token_id: int) -> str:
        """Return the text a token adds, as far as it is final; the rest comes with a later one."""
        ...

    def end(self) -> str:
        """Return the held text: no token follows."""
        ...


class DecodedPieces:
    """Pieces by decoding twice; correct for every decoder.

    The algorithm of ``tokenizers.decoders.DecodeStream`` (decode the last tokens with and without the new one, the
    difference is the new text). That class cannot release its held text when an answer ends within a character, and
    raises on decoders that rewrite earlier text; this one does both.
    """

    def __init__(self, prompt: Sequence[int], decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        # Window over the last tokens:  | said: text released | new: not yet |
        self._window: list[int] = list(prompt[-CONTEXT_TOKENS:])
        self._num_said = len(self._window)
        self._said = decode(self._window)

    def add(self, token_id: int) -> str:
        """Return the text a token adds."""
        self._window.append(token_id)
        return self._release(is_last=False)

    def end(self) -> str:
        """Return the held text."""
        return self._release(is_last=True)

    def _release(self, *, is_last: bool) -> str:
        """Return the text of the window's new tokens and count it as said; empty while it may still change."""
        num_new = len(self._window) - self._num_said
        if num_new == 0:
            return ""
        text = self._decode(self._window)
        unreadable = text.endswith(REPLACEMENT) and num_new <= MAX_UNREADABLE_TOKENS
        if unreadable and not is_last:
            return ""
        said = self._said
        if not text.startswith(said):
            # The prompt ended within a character that is now complete, or the decoder rewrote earlier text.
            said = said.rstrip(REPLACEMENT)
            if not text.startswith(said):
                self._window = self._window[self._num_said :]
                text, said = self._decode(self._window), ""
        new = text[len(said) :]
        if new:  # tokens without text stay in the window: a decoder strips the space of the first token
            if len(self._window) > MAX_WINDOW_TOKENS:
                self._window = self._window[self._num_said :]
                text = self._decode(self._window)
            self._num_said = len(self._window)
            self._said = text
        elif num_new > MAX_SILENT_TOKENS:
            del self._window[self._num_said :]
        return new


class ByteTable(dict[int, str | bytes]):
    """The text of each token of a byte-level tokenizer, or its bytes where those are not text by themselves.

    Filled on first use with the bytes that ``look_up`` returns; safe to share between threads.
    """

    def __init__(self, look_up: Callable[[int], bytes]) -> None:
        super().__init__()
        self._look_up = look_up

    def __missing__(self, token_id: int) -> str | bytes:
        raw = self._look_up(token_id)
        try:
            piece: str | bytes = raw.decode()
        except UnicodeDecodeError:
            piece = raw
        self[token_id] = piece
        return piece


class BytePieces:
    """Pieces by a table; correct where a decoder only concatenates bytes."""

    def __init__(self, prompt: Sequence[int], table: ByteTable) -> None:
        self._table = table
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._is_within_character = self._prompt_was = False
        for token_id in prompt[-CONTEXT_TOKENS:]:
            self.add(token_id)
        self._prompt_was = self._is_within_character

    def add(self, token_id: int) -> str:
        """Return the text a token adds."""
        piece = self._table[token_id]
        if isinstance(piece, str):
            if not self._is_within_character:
                return piece
            piece = piece.encode()
        text = self._decoder.decode(piece)
        self._is_within_character = bool(self._decoder.getstate()[0])
        return self._without_prompts(text)

    def end(self) -> str:
        """Return the held text."""
        return self._without_prompts(self._decoder.decode(b"", final=True))

    def _without_prompts(self, text: str) -> str:
        """Drop the mark for a character that the prompt began and no token completed: it belongs to the prompt."""
        if text and self._prompt_was:
            self._prompt_was = False
            text = text.removeprefix(REPLACEMENT)
        return text
