"""JSON of tens of megabytes, made and sent in parts: no part is copied into a whole.

A report of a long prompt has a million numbers. To copy them once takes longer than a client should wait for another's
token.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

__all__ = ["JsonParts", "encode_parts"]


class JsonParts:
    """JSON of a value in parts; ``encode_parts`` takes it as a value of other JSON.

    Args:
        parts: The JSON, in order.
    """

    __slots__ = ("parts",)

    def __init__(self, parts: Iterable[bytes]) -> None:
        self.parts = list(parts)

    @classmethod
    def of_list(cls, items: Sequence[bytes]) -> JsonParts:
        """Return a list, given the JSON of its items, several or none in each part."""
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
