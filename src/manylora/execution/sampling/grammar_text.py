"""Constraints as text of ``llguidance``."""

from __future__ import annotations

import json
from collections.abc import Set
from typing import Any

import msgspec

from manylora.types import Constraint

__all__ = ["grammar_text"]

COMPILE_DEFAULTS = {"whitespace_pattern": r"[ \n\r\t]{0,16}"}
"""Whitespace between JSON tokens: bounded, else a model may write blanks to the end of its context."""

MAX_CHOICES = 4096
MAX_TAGS = 128


class _Structure(msgspec.Struct):
    begin: str
    end: str
    schema: dict[str, Any] | bool = True


class _Tags(msgspec.Struct, forbid_unknown_fields=True):
    structures: list[_Structure]
    triggers: list[str]
    type: str = "structural_tag"


def grammar_text(constraint: Constraint, special: Set[str] = frozenset()) -> str:
    """Return the grammar of a constraint.

    Args:
        constraint: The form of an answer.
        special: Special tokens of the tokenizer: a trigger that is one of them is the token, and else its text.

    Raises:
        ValueError: The text is malformed.
    """
    from llguidance import LLMatcher

    text = constraint.text
    match constraint.kind:
        case "json":
            # Any value; but only an object takes options.
            text = "{}" if text.strip() == "true" else text
            grammar: str = LLMatcher.grammar_from_json_schema(text, COMPILE_DEFAULTS)
        case "regex":
            grammar = LLMatcher.grammar_from_regex(text)
        case "choice":
            grammar = LLMatcher.grammar_from_lark(_choices(text))
        case "grammar":
            grammar = LLMatcher.grammar_from_lark(_lark(text))
        case _:
            grammar = _tags(text, special)
    return grammar


def _choices(text: str) -> str:
    choices = msgspec.json.decode(text, type=list[str])
    if not choices or not all(choices) or len(choices) > MAX_CHOICES:
        raise ValueError(f"expected 1 to {MAX_CHOICES} texts that are not empty")
    return "start: " + " | ".join(map(json.dumps, choices))


def _lark(text: str) -> str:
    """Return a grammar in Lark's notation; one with ``::=`` is in GBNF's."""
    if "::=" not in text:
        return text
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return str(gbnf_to_lark(text))
    except Exception as error:  # of a parser of strings: index errors, assertions
        raise ValueError(f"it is no grammar in GBNF: {error}") from None


def _tags(text: str, special: Set[str]) -> str:
    """Return the grammar of text in which each trigger begins one of the structures."""
    from llguidance import LLMatcher, StructTag

    tags = msgspec.json.decode(text, type=_Tags)
    if not 0 < len(tags.structures) <= MAX_TAGS or not all(tags.triggers):
        raise ValueError(f"expected 1 to {MAX_TAGS} structures, and triggers that are not empty")
    parts = []
    for one in tags.structures:
        trigger = max((word for word in tags.triggers if one.begin.startswith(word)), key=len, default=None)
        if trigger is None:
            raise ValueError(f"no trigger begins {one.begin[:50]!r}")
        schema = {} if one.schema is True else one.schema
        if schema is False:
            raise ValueError(f"the schema after {one.begin[:50]!r} allows nothing")
        parts.append(StructTag(trigger=trigger, begin=one.begin, grammar=schema, end=one.end))
    marked = [part.trigger for part in parts if part.trigger.startswith("<") and part.trigger.endswith(">")]
    grammar = StructTag.to_grammar(parts, assume_special=all(trigger in special for trigger in marked))
    text = LLMatcher.grammar_from_lark(grammar)
    return text
