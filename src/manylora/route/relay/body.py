"""The few fields of a request's body that the router reads, with bounded work: the model, and the prompt's length.

The body itself goes to the backend as it came. Values of other fields are skipped, not decoded.
"""

from __future__ import annotations

import msgspec

from manylora.core.errors import RequestError

__all__ = ["BodyFields", "read_asked", "with_model"]

BYTES_PER_TOKEN = 4
_NONE = msgspec.Raw(b"")


class _Body(msgspec.Struct):
    model: str | None = None
    prompt: msgspec.Raw = _NONE
    messages: msgspec.Raw = _NONE
    input: msgspec.Raw = _NONE


class BodyFields(msgspec.Struct, frozen=True):
    """The fields.

    Args:
        model: The base or an adapter; ``None`` where the request names none.
        num_prompt_tokens: About: token ids are counted, of text every four bytes count as one.
    """

    model: str | None
    num_prompt_tokens: int


_decoder = msgspec.json.Decoder(_Body)
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


def read_asked(body: bytes) -> BodyFields:
    """Read the fields of a body; ``RequestError`` if it is not a JSON object or the model not a string."""
    try:
        read = _decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"The body is not a JSON object as expected: {error}") from None
    return BodyFields(read.model, _num_tokens(bytes(read.prompt or read.messages or read.input)))


def with_model(body: bytes, model: str) -> bytes:
    """Return a body that names another model; all other fields stay as they are, byte by byte."""
    fields = _fields.decode(body)
    fields["model"] = msgspec.Raw(msgspec.json.encode(model))
    return msgspec.json.encode(fields)


def _num_tokens(raw: bytes) -> int:
    inner = raw[1:32].lstrip()
    if raw[:1] == b"[" and (inner[:1].isdigit() or inner[:1] == b"["):
        return raw.count(b",") + 1
    return len(raw) // BYTES_PER_TOKEN
