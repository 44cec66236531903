"""Token by token to text: what a token adds to all that came before it.

A token is not always a text of its own: it can end within a character, and some decoders treat spaces, or the first
token of a text, in their own way. So in general what is new is found by decoding the last tokens with and without it.
Decoders over bytes (GPT-2's, and with it Llama 3's, Qwen's and most others today) do nothing but string bytes together;
there a table of what each token stands for is as exact, and several times as fast.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

__all__ = ["BytePieces", "ByteTable", "DecodedPieces", "TextPieces"]

CONTEXT_TOKENS = 8
"""Prompt tokens the first answer token is decoded after, so that it keeps its leading space."""

MAX_WINDOW_TOKENS = 16
"""Tokens the window grows to before it is cut to the newest: a cut costs a decode more."""

MAX_UNREADABLE_TOKENS = 32
"""Tokens without a readable end after which the text is let go as it is: no character is that long."""

MAX_SILENT_TOKENS = 32
"""Tokens without any text (skipped special ones) that are kept in the window; a model can emit thousands."""

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class TextPieces(Protocol):
    """One answer's tokens, in order, as text that adds up to what all of them decode to."""

    def add(self, token_id: int) -> str:
        """Return the text a token adds, as far as it will not change; what it begins comes with a later one."""
        ...

    def end(self) -> str:
        """Return what is still held: no token follows."""
        ...


class DecodedPieces:
    """Pieces by decoding twice; right for every decoder.

    ``tokenizers.decoders.DecodeStream`` does the first half of this, but cannot give out what it still holds when an
    answer ends within a character, and raises on decoders that rewrite what they said before. This is the same
    algorithm (decode the last tokens with and without the new one, the difference is the new text) with both mended.

    Args:
        prompt: Token ids before the answer.
        decode: Turns token ids into text.
    """

    def __init__(self, prompt: Sequence[int], decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        # Window over the last tokens:  | said: their text is out | new: not yet |
        self._window: list[int] = list(prompt[-CONTEXT_TOKENS:])
        self._num_said = len(self._window)
        self._said = decode(self._window)

    def add(self, token_id: int) -> str:
        """Return the text a token adds."""
        self._window.append(token_id)
        return self._take(is_last=False)

    def end(self) -> str:
        """Return what is still held."""
        return self._take(is_last=True)

    def _take(self, *, is_last: bool) -> str:
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
            # The prompt ended within a character that is now whole, or a decoder took back what it said.
            said = said.rstrip(REPLACEMENT)
            if not text.startswith(said):
                self._window = self._window[self._num_said :]
                text, said = self._decode(self._window), ""
        new = text[len(said) :]
        if new:  # tokens without text stay in the window: a decoder strips the space of what would come first
            if len(self._window) > MAX_WINDOW_TOKENS:
                self._window = self._window[self._num_said :]
                text = self._decode(self._window)
            self._num_said = len(self._window)
            self._said = text
        elif num_new > MAX_SILENT_TOKENS:
            del self._window[self._num_said :]
        return new


class ByteTable(dict[int, str | bytes]):
    """What each token of a byte-level tokenizer stands for: text, or bytes where those are no text by themselves.

    Filled as tokens are asked for; safe to share between threads.

    Args:
        look_up: Tells the bytes a decoder makes of a token.
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
    """Pieces by a table; right where a decoder strings bytes together.

    Args:
        prompt: Token ids before the answer.
        table: Of the tokenizer.
    """

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
        """Return what is still held."""
        return self._without_prompts(self._decoder.decode(b"", final=True))

    def _without_prompts(self, text: str) -> str:
        """Leave out the mark for a character that the prompt began and nothing finished: it is the prompt's."""
        if text and self._prompt_was:
            self._prompt_was = False
            text = text.removeprefix(REPLACEMENT)
        return text
