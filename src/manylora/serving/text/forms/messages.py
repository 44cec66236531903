"""The messages between a server and its process that checks forms."""

from __future__ import annotations

from multiprocessing.connection import Connection

import msgspec

from manylora.core.isolation.answers import receive_answer

__all__ = ["MAX_ANSWER_BYTES", "FormChecked", "FormSettings", "encode", "receive"]

MAX_ANSWER_BYTES = 16 * 1024

encode = msgspec.msgpack.encode


class FormSettings(msgspec.Struct, frozen=True):
    """The settings of a process that checks forms.

    Args:
        tokenizer: Folder or name of the tokenizer.
        revision: Of the tokenizer.
        limit_s: Processor time of a form in whole seconds; the largest that are of use take half a second.
        limit_bytes: Memory of a form. Each answer of that form takes about as much in the engine.
    """

    tokenizer: str
    revision: str | None = None
    limit_s: int = 3
    limit_bytes: int = 64 << 20


class FormChecked(msgspec.Struct, frozen=True):
    """The answer to a form: the message of its refusal, ``None`` if it can be followed.

    The first answer of a process tells of its tokenizer in the same way.
    """

    refused: str | None = None


_decode = msgspec.msgpack.Decoder(FormChecked).decode


def receive(pipe: Connection, limit_s: float) -> FormChecked:
    """Return the next answer.

    Raises:
        TimeoutError: There is none within ``limit_s`` seconds.
        OSError: The process died, or its answer cannot be read.
    """
    return receive_answer(pipe, limit_s, _decode, max_bytes=MAX_ANSWER_BYTES)
