"""Fields of any shape: they stay JSON until their size is known.

A decoder builds an object for each value, and holds Python's lock meanwhile, so a field of a megabyte must be refused
by its length.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from manylora.errors import RequestError

__all__ = ["NULL", "free_form", "is_null", "num_bytes"]

NULL = msgspec.Raw(b"null")
"""The default of a free-form field."""

Value = TypeVar("Value")


def num_bytes(raw: msgspec.Raw) -> int:
    """Return the length of a field's JSON."""
    return len(memoryview(raw))


def is_null(raw: msgspec.Raw) -> bool:
    """Return whether a field is absent or null."""
    return raw is NULL or bytes(memoryview(raw)[:5]) == b"null"


def free_form(raw: msgspec.Raw, kind: type[Value], most_bytes: int, param: str) -> Value:
    """Read a field whose JSON may have at most so many bytes.

    Raises:
        RequestError: It is longer, or not of that type.
    """
    if num_bytes(raw) > most_bytes:
        raise RequestError(f"{param} has {num_bytes(raw)} bytes of JSON, expected at most {most_bytes}", param=param)
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"Got a wrong value for {param}: {str(error)[:300]}", param=param) from None
    except RecursionError:
        raise RequestError(f"{param} is nested too deeply", param=param) from None
