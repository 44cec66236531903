"""Public names of models: a name that clients use, and the versions that answer it by weight.

::

    "sql=sql-v1:90,sql-v2:10"             nine of ten conversations are answered by sql-v1
    "chat=base:1,base@http://new:8000:1"  half of them by one server alone

A conversation stays with its version: the choice is a hash of the name and of the conversation's key, so routers agree
without a word, and a weight that changes moves only as many conversations as it must (weighted rendezvous hashing).

Source: Schindelhauer and Schomaker, "Weighted distributed hash tables", 2005: the version with the least
``-log(hash) / weight``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b

import msgspec

from manylora.core.errors import ConfigError
from manylora.route.upstream.address import parse_backend

__all__ = ["Arm", "arms_in_order", "conversation_key", "parse_names"]

MAX_ARMS = 16
MAX_FIRST = 8  # messages that are looked at for the first one of the user
MAX_KEY_BYTES = 16 * 1024


@dataclass(frozen=True, slots=True)
class Arm:
    """One version behind a public name."""

    model: str  # as backends list it
    weight: float  # its share of conversations, beside those of the others
    url: str | None = None  # the only backend that it is asked of; ``None`` for all that list it

    def __str__(self) -> str:
        return self.model if self.url is None else f"{self.model}@{self.url}"


def parse_names(texts: Iterable[str]) -> dict[str, tuple[Arm, ...]]:
    """Return the versions behind each public name, of ``NAME=MODEL:WEIGHT,MODEL@URL:WEIGHT``.

    ``ConfigError`` if a text has another form, a name comes twice, or no weight of a name is above 0.
    """
    names: dict[str, tuple[Arm, ...]] = {}
    for text in texts:
        name, _, rest = text.partition("=")
        arms = tuple(_arm(text, part) for part in rest.split(","))
        is_plain = text.isascii() and text.isprintable()  # versions are shown in a header
        if not is_plain or not name or name in names or len(arms) > MAX_ARMS or not any(arm.weight for arm in arms):
            raise ConfigError(f"Got name = {text!r}, expected a new name and 1 to {MAX_ARMS} versions with weights")
        if len({str(arm) for arm in arms}) < len(arms) or any(arm.model == name and arm.url is None for arm in arms):
            raise ConfigError(f"Got name = {text!r}, expected versions that differ from each other and from the name")
        names[name] = arms
    chained = [name for name, arms in names.items() if any(arm.model in names for arm in arms)]
    if chained:
        raise ConfigError(f"Got name {chained[0]!r} for another public name, expected models of backends")
    return names


def arms_in_order(name: str, arms: Iterable[Arm], key: bytes) -> list[Arm]:
    """Return the versions of a name that may answer a conversation: its own first, then the others."""
    root = blake2b(f"{len(name)} {name} ".encode(errors="replace") + key, digest_size=8)

    def distance(arm: Arm) -> float:
        hasher = root.copy()
        hasher.update(str(arm).encode())
        return -math.log((int.from_bytes(hasher.digest()) + 1) / (2**64 + 1)) / arm.weight

    return sorted((arm for arm in arms if arm.weight), key=distance)


def conversation_key(body: bytes) -> bytes:
    """Return the part of a body that all turns of a conversation have in common, and other conversations do not.

    That is the field ``prompt_cache_key``, ``user`` or ``metadata.user_id``; without them the messages up to the first
    one of the user, or the beginning of the prompt.
    """
    try:
        read = _decoder.decode(body)
        named = read.prompt_cache_key or read.user or (read.metadata.user_id if read.metadata is not None else None)
        if named:
            return named[:MAX_KEY_BYTES].encode(errors="replace")
        if not (read.messages or read.input):
            return bytes(read.prompt)[:MAX_KEY_BYTES]
        first = b""
        for raw in _messages.decode(read.messages or read.input)[:MAX_FIRST]:
            first += bytes(raw)[:MAX_KEY_BYTES]
            if _message.decode(raw).role == "user":
                break
        return first
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):  # the backend says why
        return body[:MAX_KEY_BYTES]


def _arm(text: str, part: str) -> Arm:
    target, _, weight = part.rpartition(":")
    model, at, url = target.partition("@")
    if not model or not weight.isascii() or not weight.replace(".", "", 1).isdigit():
        raise ConfigError(f"Got name = {text!r}, expected NAME=MODEL:WEIGHT,MODEL@URL:WEIGHT with weights of 0 or more")
    try:
        only_at = parse_backend(url).url if at else None
    except ConfigError as error:
        raise ConfigError(f"Got name = {text!r} with the backend of one of its versions malformed: {error}") from None
    return Arm(model, float(weight), only_at)


class _Metadata(msgspec.Struct):
    user_id: str | None = None


class _Keyed(msgspec.Struct):
    prompt_cache_key: str | None = None
    user: str | None = None
    metadata: _Metadata | None = None
    prompt: msgspec.Raw = msgspec.Raw(b"")
    messages: msgspec.Raw = msgspec.Raw(b"")
    input: msgspec.Raw = msgspec.Raw(b"")


class _Message(msgspec.Struct):
    role: str = ""


_decoder = msgspec.json.Decoder(_Keyed)
_messages = msgspec.json.Decoder(list[msgspec.Raw])
_message = msgspec.json.Decoder(_Message)
