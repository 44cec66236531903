"""JSON bodies, read and checked strictly, at a cost that is bounded by their size; errors name the field.

A decoder holds the event loop, and takes from 2 ms for a megabyte of text to 60 ms for one of small items. So a large
object is first decoded into the JSON of its fields, and a long list into the JSON of its items, as far as they are
allowed. Parts of at most ``SLICE_BYTES`` are then decoded at once, and between them the event loop serves others::

    {"model": "a", "messages": [{...}, {...}, ..., {"role": "user", "content": [{...}, {...}, ...]}]}
     -- at once --              ------ 64 KiB ----   ------ at once ------      ----- 64 KiB ----

A field of any shape stays JSON (``msgspec.Raw``) until its size is known, and is refused by its length.
"""

from __future__ import annotations

import functools
import logging
import re
import typing
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from manylora.core.errors import RequestError
from manylora.serving.http.turns import next_turn

__all__ = [
    "NULL",
    "SLICE_BYTES",
    "FieldRules",
    "decode",
    "decode_integers",
    "decode_items",
    "free_form",
    "is_null",
    "num_bytes",
    "parse",
    "raw_field",
    "split",
]

SLICE_BYTES = 64 * 1024  # JSON that is decoded at once, in a millisecond or two at worst
MAX_ITEMS = 4096  # items of a long list, other than numbers: of messages, tools, words, choices

MAX_REASON_CHARS = 300

MAX_NEUTRAL_BYTES = 64  # JSON of a value with which a refused field would change nothing is shorter

MAX_REPORTED, MAX_NAME_CHARS = 100, 100
"""Unknown fields that are logged, and characters of a name by which they are told apart."""

NULL = msgspec.Raw(b"null")  # the JSON of a field that is absent

_PATH = re.compile(r" - at `\$\.?([^`]*)`")
_MISSING = re.compile(r"missing required field `([^`]*)`")
_KINDS = {"[": "list", '"': "str", "n": "NoneType", "t": "bool", "f": "bool"}
_reported: set[str] = set()

Value = TypeVar("Value")
Body = TypeVar("Body", bound=msgspec.Struct)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FieldRules:
    """Rules for fields of a body that its type does not have; all others are ignored and logged once, as in vLLM."""

    harmless: Collection[str]  # fields that change nothing in the answer; they are accepted
    # Fields that would change the answer and are not supported, with the values under which they would not change it.
    # They are refused by name, because a wrong answer is worse than none.
    refused: Mapping[str, tuple[Any, ...]]


async def parse(data: bytes, body: type[Body]) -> Body:
    """Read a JSON request body; ``field_rules`` of ``body``, if any, decide about fields that it does not know.

    ``RequestError``, which names the field, for a wrong type or value, or a field that is not supported.
    """
    rules: FieldRules | None = getattr(body, "field_rules", None)
    made = _small(data, body, rules) if len(data) <= SLICE_BYTES else await _large(data, body, rules)
    for index, value in enumerate(msgspec.structs.astuple(made)):
        if type(value) is int and not -(2**63) <= value < 2**64:
            name = body.__struct_fields__[index]
            raise RequestError(f"Got a number beyond 64 bits for {name}", param=name)
    return made


def _small(data: bytes, body: type[Body], rules: FieldRules | None) -> Body:
    try:
        fields = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
    except msgspec.ValidationError:
        raise _no_object(data) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _not_json(error) from None
    if rules is not None:
        _check_fields(fields, body, rules)
    return decode(data, body)


async def _large(data: bytes, body: type[Body], rules: FieldRules | None) -> Body:
    data = data.strip()
    if not data.startswith(b"{"):
        decode(data, msgspec.Raw)
        raise _no_object(data)
    fields = _decode_shallow(data, body, () if rules is None else rules.refused)
    if rules is not None:
        _check_fields(fields, body, rules)
    return await _struct_of(fields, body)


def _check_fields(values: Mapping[str, msgspec.Raw], body: type[msgspec.Struct], rules: FieldRules) -> None:
    known = body.__struct_fields__
    for name, raw in values.items():
        if name in known or name in rules.harmless:
            continue
        if name in rules.refused:
            if num_bytes(raw) > MAX_NEUTRAL_BYTES or decode(raw, object, name) not in rules.refused[name]:
                raise RequestError(f"{name} is not supported by this server", param=name)
        elif (short := name[:MAX_NAME_CHARS]) not in _reported and len(_reported) < MAX_REPORTED:
            _reported.add(short)
            logger.warning("unknown_field_ignored name=%r", short)


def _no_object(data: bytes) -> RequestError:
    first = data.lstrip()[:1].decode("ascii", "replace")
    return RequestError(f"Got a {_KINDS.get(first, 'number')} as the body, expected a JSON object")


def _not_json(error: Exception) -> RequestError:
    if isinstance(error, RecursionError):
        return RequestError("The body is nested too deeply")
    return RequestError(f"The body is not valid JSON: {error}")


def raw_field() -> Any:
    """Return the default of a field of any shape: ``NULL``."""
    return msgspec.field(default_factory=lambda: NULL)  # a default as such could not be in a JSON schema


def num_bytes(raw: msgspec.Raw) -> int:
    """Return the length of a field's JSON."""
    return len(memoryview(raw))


def is_null(raw: msgspec.Raw) -> bool:
    """Return whether a field is absent or null."""
    return raw is NULL or bytes(memoryview(raw)[:5]) == b"null"


def free_form(raw: msgspec.Raw, kind: type[Value], most_bytes: int, param: str) -> Value:
    """Read a field of at most so many bytes of JSON; ``RequestError`` if it is longer, or of another type."""
    if num_bytes(raw) > most_bytes:
        raise RequestError(f"{param} has {num_bytes(raw)} bytes of JSON, expected at most {most_bytes}", param=param)
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"Got a wrong value for {param}: {str(error)[:300]}", param=param) from None
    except RecursionError:
        raise RequestError(f"{param} is nested too deeply", param=param) from None


def decode(data: bytes | msgspec.Raw, kind: type[Value], at: str = "") -> Value:
    """Read JSON of a known type, or raise ``RequestError``, which names the field.

    ``at`` is the field in which it is, for messages; empty for the whole body.
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
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _not_json(error) from None


async def _decode_in_slices(raw: bytes | msgspec.Raw, kind: Any, at: str = "") -> Any:
    """Read JSON of a known type as ``decode`` does; a list of more than ``MAX_ITEMS`` items is refused as well."""
    data = memoryview(raw)
    if len(data) <= SLICE_BYTES:
        return decode(raw, kind, at)
    await next_turn()
    first = bytes(data[:1])
    for one in _alternatives(kind):
        if isinstance(one, type) and issubclass(one, msgspec.Struct) and first == b"{":
            return await _struct_of(_decode_shallow(raw, one, at=at), one, at)
        if typing.get_origin(one) is list and first == b"[":
            (item,) = typing.get_args(one)
            if item is int:
                return await decode_integers(bytes(data), at)
            return await decode_items(split(raw, MAX_ITEMS, at), item, at)
        if typing.get_origin(one) is dict and first == b"{":
            raise RequestError(f"{at} has {len(data)} bytes of JSON, expected at most {SLICE_BYTES}", param=at or None)
    return decode(raw, kind, at)


def _decode_shallow(
    raw: bytes | msgspec.Raw, kind: type[msgspec.Struct], extra: Collection[str] = (), at: str = ""
) -> dict[str, msgspec.Raw]:
    """Return the JSON of the fields that an object has of a struct's, and of some others."""
    shallow = decode(raw, _shallow(kind, tuple(extra)), at)
    return {name: value for name, value in msgspec.structs.asdict(shallow).items() if value is not NULL}


def split(raw: bytes | msgspec.Raw, most: int, at: str) -> Sequence[msgspec.Raw]:
    """Return the JSON of the items of a list; ``RequestError`` if it is none, or has more than ``most`` items."""
    if len(memoryview(raw)) <= SLICE_BYTES or most > MAX_ITEMS:  # the latter by an option of the server
        items = decode(raw, list[msgspec.Raw], at)
    else:
        items = [item for item in msgspec.structs.astuple(decode(raw, _array(), at)) if item is not NULL]
    if len(items) > most:
        field, _, _ = at.partition("[")
        raise RequestError(f"Got more than {most} items in {at}, expected at most as many", param=field)
    return items


async def decode_integers(data: bytes, at: str) -> list[int]:
    """Read a list of whole numbers, in slices that end at a comma."""
    if len(data) <= SLICE_BYTES:
        return decode(data, list[int], at)
    found: list[int] = []
    begin, end = data.index(b"[") + 1, data.rindex(b"]") if data.endswith(b"]") else len(data)
    while True:
        stop = data.find(b",", min(begin + SLICE_BYTES, end), end)
        found += decode(b"[%b]" % data[begin : stop if stop >= 0 else end], list[int], at)
        if stop < 0:
            return found
        begin = stop + 1
        await next_turn()


async def _struct_of(values: dict[str, msgspec.Raw], kind: type[Body], at: str = "") -> Body:
    """Return the struct whose fields have this JSON."""
    made: dict[str, Any] = {}
    for one in msgspec.structs.fields(kind):
        place = f"{at}.{one.name}" if at else one.name
        if one.name in values:
            made[one.name] = await _decode_in_slices(values[one.name], one.type, place)
        elif one.required:
            raise RequestError(f"Got a wrong value for {place}: missing required field", param=place)
    return kind(**made)


async def decode_items(items: Sequence[msgspec.Raw], kind: Any, at: str) -> list[Any]:
    """Return the items of a list; several short ones are decoded together."""
    found: list[Any] = []
    together: list[msgspec.Raw] = []
    num_bytes = 0

    def flush() -> None:
        nonlocal together, num_bytes
        if together:
            first = len(found)
            try:
                found.extend(decode(b"[%b]" % b",".join(together), list[kind]))
            except RequestError:
                for index, one in enumerate(together, first):  # to name the one at fault
                    decode(one, kind, f"{at}[{index}]")
                raise
            together, num_bytes = [], 0

    for item in items:
        size = len(memoryview(item))
        if num_bytes + size > SLICE_BYTES:
            flush()
            await next_turn()
        if size > SLICE_BYTES:
            found.append(await _decode_in_slices(item, kind, f"{at}[{len(found)}]"))
        else:
            together.append(item)
            num_bytes += size + 1
    flush()
    return found


def _alternatives(kind: Any) -> Sequence[Any]:
    """Return the types of which JSON may be one."""
    if typing.get_origin(kind) is typing.Annotated:
        kind = typing.get_args(kind)[0]
    is_one = isinstance(kind, type) or typing.get_origin(kind) in (list, dict)
    return (kind,) if is_one else typing.get_args(kind)


@functools.cache
def _shallow(kind: type[msgspec.Struct], extra: tuple[str, ...]) -> type[msgspec.Struct]:
    """Return a struct with the JSON of another's fields."""
    names = [one.encode_name for one in msgspec.structs.fields(kind)]
    names += [name for name in extra if name not in names]
    fields, is_closed = [(name, msgspec.Raw, NULL) for name in names], kind.__struct_config__.forbid_unknown_fields
    return msgspec.defstruct(f"Shallow{kind.__name__}", fields, forbid_unknown_fields=is_closed)


@functools.cache
def _array() -> type[msgspec.Struct]:
    """Return a struct that is read from a list with one item too many; the decoder skips the rest."""
    items = [(f"item_{index}", msgspec.Raw, NULL) for index in range(MAX_ITEMS + 1)]
    return msgspec.defstruct("Array", items, array_like=True)
