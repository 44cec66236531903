"""The bytes of a single token, by the tokenizer's own decoder.

Decoding one token alone loses bytes that log-probabilities must show: half a character becomes a replacement mark, a
leading space vanishes. So tokens are mapped one by one, by the three conventions of fast tokenizers: byte-level
alphabets, ``<0xE2>`` byte fallback, and a mark in place of a space.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from tokenizers import Tokenizer as FastTokenizer

from manylora.serving.text.pieces import ByteTable

__all__ = ["TokenBytes", "byte_tables"]

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


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
