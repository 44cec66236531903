"""JSON to values of a known type; errors name the field."""

from __future__ import annotations

import re
from typing import TypeVar

import msgspec

from manylora.errors import RequestError

__all__ = ["decode"]

MAX_REASON_CHARS = 300

_PATH = re.compile(r" - at `\$\.?([^`]*)`")
_MISSING = re.compile(r"missing required field `([^`]*)`")

T = TypeVar("T")


def decode(data: bytes | msgspec.Raw, kind: type[T], at: str = "") -> T:
    """Read JSON of a known type.

    Args:
        data: The JSON.
        kind: Its type.
        at: The field in which it is, for messages; empty for the whole body.

    Raises:
        RequestError: Not JSON, or of another type; names the field.
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        message = str(error)
        missing = _MISSING.search(message)
        found = _PATH.search(message)
        inner = found.group(1) if found else ""
        path = f"{at}.{inner}" if at and inner and not inner.startswith("[") else at + inner
        param = (f"{path}.{missing.group(1)}".lstrip(".") if missing else path)[:MAX_REASON_CHARS]
        reason = _PATH.sub("", message)[:MAX_REASON_CHARS]
        raise RequestError(
            f"Got a wrong value for {param}: {reason}" if param else reason, param=param or None
        ) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"The body is not valid JSON: {error}") from None
    except RecursionError:
        raise RequestError("The body is nested too deeply") from None
