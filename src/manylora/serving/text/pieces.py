"""Text of an answer token by token: the text that each token adds, and the bytes of a single token.

A token need not be text by itself: it can end within a character, and some decoders treat spaces, or the first token
of a text, specially. So in general the new text is the difference between decoding the last tokens with and without
the new one. Byte-level decoders (GPT-2's, Llama 3's, Qwen's and most others today) only concatenate bytes; there a
table of the bytes of each token is as exact, and several times as fast.

Decoding one token alone loses bytes that log-probabilities must show: half a character becomes a replacement mark, a
leading space vanishes. So tokens are mapped one by one, by the three conventions of fast tokenizers: byte-level
alphabets, ``<0xE2>`` byte fallback, and a mark in place of a space.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from tokenizers import Tokenizer as FastTokenizer

__all__ = ["BytePieces", "ByteTable", "DecodedPieces", "TextPieces", "TokenBytes", "byte_tables"]

CONTEXT_TOKENS = 8  # prompt tokens decoded before the first answer token, so that it keeps its leading space
MAX_WINDOW_TOKENS = 16  # most tokens in the window before it is cut to the newest: a cut costs one more decode

MAX_UNREADABLE_TOKENS = 32
"""Most tokens without a readable end; then the text is released as it is, because no character is that long."""

MAX_SILENT_TOKENS = 32  # most tokens without text (skipped special ones) kept in the window; a model can emit thousands

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TextPieces(Protocol):
    """Converts one answer's tokens, in order, to pieces that add up to the text of all of them."""

    def add(self, token_id: int) -> str:
        """Return the text a token adds, as far as it is final; the rest comes with a later one."""

    def end(self) -> str:
        """Return the held text: no token follows."""


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


def _byte_level_alphabet() -> dict[str, int]:
    """Return GPT-2's alphabet: the byte of each character; printable bytes are their own character."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _decoders(decoder: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """Yield the decoder's parts, with sequences flattened."""
    if decoder is None:
        return
    if decoder["type"] == "Sequence":
        for part in decoder["decoders"]:
            yield from _decoders(part)
    else:
        yield decoder


class TokenBytes:
    """Map token ids to bytes, with a cache; safe to share between threads."""

    def __init__(self, fast: FastTokenizer) -> None:
        self._fast = fast
        self._known: dict[int, bytes] = {}
        self._added = {id_: token.content for id_, token in fast.get_added_tokens_decoder().items()}
        parts = list(_decoders(json.loads(fast.to_str())["decoder"]))
        kinds = [part["type"] for part in parts]
        self._alphabet = _byte_level_alphabet() if "ByteLevel" in kinds else None
        self._has_byte_tokens = "ByteFallback" in kinds
        self._space = next((part["replacement"] for part in parts if part["type"] == "Metaspace"), None) or next(
            (part["pattern"].get("String") for part in parts if part["type"] == "Replace" and part["content"] == " "),
            None,
        )

    def __call__(self, token_id: int) -> bytes:
        """Return the token's bytes, empty for an id that names no token."""
        known = self._known.get(token_id)
        if known is None:
            known = self._known[token_id] = self._look_up(token_id)
        return known

    def _look_up(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].encode()
        token = self._fast.id_to_token(token_id)
        if token is None:
            return b""
        if self._alphabet is not None and all(char in self._alphabet for char in token):
            return bytes(self._alphabet[char] for char in token)
        if self._has_byte_tokens and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        return (token.replace(self._space, " ") if self._space else token).encode()


def byte_tables(fast: FastTokenizer) -> dict[bool, ByteTable] | None:
    """Return the bytes of each token, with special tokens skipped or not; ``None`` if they depend on its position.

    They do not if the decoder only concatenates bytes: each character of the byte-level alphabet is one byte, and a
    token with any other character is its own text.
    """
    if [part["type"] for part in _decoders(json.loads(fast.to_str())["decoder"])] != ["ByteLevel"]:
        return None
    alphabet = _byte_level_alphabet()
    special = {token.content for token in fast.get_added_tokens_decoder().values() if token.special}

    def look_up(token_id: int) -> bytes:
        token = fast.id_to_token(token_id)
        if token is None:
            return b""
        if all(char in alphabet for char in token):
            return bytes(alphabet[char] for char in token)
        return token.encode()

    def look_up_unless_special(token_id: int) -> bytes:
        return b"" if fast.id_to_token(token_id) in special else look_up(token_id)

    return {True: ByteTable(look_up_unless_special), False: ByteTable(look_up)}
