"""The fields that ask for an answer of a given form: OpenAI's, vLLM's, and vLLM's older names.

Fields of any shape: they stay JSON until their size is known.

A decoder builds an object for each value, and holds Python's lock meanwhile, so a field of a megabyte must be refused
by its length.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from manylora.core.errors import RequestError
from manylora.core.types import Constraint
from manylora.serving.http.bounds import MAX_SCHEMA_BYTES

__all__ = [
    "NULL",
    "ConstraintFields",
    "JsonSchema",
    "ResponseFormat",
    "constraint_field",
    "constraint_of",
    "free_form",
    "is_null",
    "num_bytes",
]

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


JSON_OBJECT = '{"type":"object"}'


class JsonSchema(msgspec.Struct, kw_only=True):
    """``response_format.json_schema``."""

    schema: msgspec.Raw
    name: str | None = None


class ResponseFormat(msgspec.Struct, kw_only=True):
    """OpenAI's ``response_format``; ``structural_tag`` is vLLM's."""

    type: str
    json_schema: JsonSchema | None = None
    structures: msgspec.Raw = NULL
    triggers: list[str] | None = None


class StructuredOutputs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """vLLM's ``structured_outputs``: one of the first six."""

    json: msgspec.Raw = NULL
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    structural_tag: str | None = None
    disable_fallback: bool | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: str | None = None


class ConstraintFields(msgspec.Struct, kw_only=True):
    """The fields of both endpoints."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: msgspec.Raw = NULL
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None


def constraint_of(body: ConstraintFields) -> Constraint | None:
    """Return the constraint that a request asks for.

    Raises:
        RequestError: It asks for several, or for a kind that is not supported.
    """
    found = _found(body)
    if len(found) > 1:
        names = ", ".join(sorted(field for field, _ in found))
        raise RequestError(f"Got {len(found)} constraints of the answer in {names}, expected one", param=found[0][0])
    return found[0][1] if found else None


def constraint_field(body: ConstraintFields) -> str:
    """Return the field that has the one constraint of a body; no schema is read again for it."""
    for kind in ("json", "regex", "choice", "grammar"):
        value = getattr(body, f"guided_{kind}")
        if not (is_null(value) if kind == "json" else value is None):
            return f"guided_{kind}"
    if body.response_format is not None and body.response_format.type != "text":
        return "response_format"
    return "structured_outputs"


def _found(body: ConstraintFields) -> list[tuple[str, Constraint]]:
    found = [(f"guided_{kind}", constraint) for kind, constraint in _by_kind(body, "guided_")]
    if body.structured_outputs is not None:
        found += [("structured_outputs", one) for _, one in _by_kind(body.structured_outputs, "")]
        found += [("structured_outputs", one) for one in _of_structured_outputs_alone(body.structured_outputs)]
    if body.response_format is not None and body.response_format.type != "text":
        found.append(("response_format", _of_response_format(body.response_format)))
    return found


def _by_kind(values: msgspec.Struct, prefix: str) -> list[tuple[str, Constraint]]:
    """Return the constraints of the kinds that have a field of the older names too."""
    found = []
    schema = getattr(values, f"{prefix}json")
    if not is_null(schema):
        value = _read(schema, str | dict[str, Any] | bool, f"{prefix}json")
        found.append(("json", Constraint("json", value if isinstance(value, str) else _text(value))))
    for kind in ("regex", "choice", "grammar"):
        value = getattr(values, prefix + kind)
        if value is not None:
            found.append((kind, Constraint(kind, value if isinstance(value, str) else _text(value))))
    return found


def _read(raw: msgspec.Raw, kind: Any, param: str) -> Any:
    return free_form(raw, kind, MAX_SCHEMA_BYTES, param)


def _of_structured_outputs_alone(given: StructuredOutputs) -> list[Constraint]:
    for name in ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern"):
        if getattr(given, name):
            raise RequestError(f"structured_outputs.{name} is not supported by this server", param="structured_outputs")
    found = []
    if given.json_object:
        found.append(Constraint("json", JSON_OBJECT))
    if given.structural_tag is not None:
        found.append(Constraint("structural_tag", given.structural_tag))
    return found


def _of_response_format(form: ResponseFormat) -> Constraint:
    if form.type == "json_object":
        return Constraint("json", JSON_OBJECT)
    if form.type == "structural_tag":
        structures = _read(form.structures, list[dict[str, Any]] | None, "response_format")
        return Constraint("structural_tag", _text({"structures": structures, "triggers": form.triggers}))
    if form.type != "json_schema":
        raise RequestError(
            f"Got response_format.type = {form.type[:50]!r}, expected one of text, json_object, json_schema, "
            "structural_tag",
            param="response_format",
        )
    if form.json_schema is None:
        raise RequestError("response_format of type json_schema needs a json_schema", param="response_format")
    return Constraint("json", _text(_read(form.json_schema.schema, dict[str, Any] | bool, "response_format")))


def _text(value: Any) -> str:
    return msgspec.json.encode(value).decode()
