"""Constraints and tokenizers as ``llguidance`` takes them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence, Set
from decimal import Decimal
from typing import Any, NamedTuple

import msgspec

from manylora.core.types import Constraint

__all__ = ["GrammarTokenizer", "grammar_text"]

COMPILE_DEFAULTS = {"whitespace_pattern": r"[ \n\r\t]{0,16}"}
"""Whitespace between JSON tokens: bounded, else a model may write blanks to the end of its context."""

MAX_CHOICES = 4096
MAX_TAGS = 128
MAX_MULTIPLES = 20_000
"""Remainders of all ``multipleOf`` in a constraint. The compiler makes a state for each, 6 us, and no limit of its own
ends that."""

LITERAL_TOKENS = {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]}
"""A decoder that llguidance reads, for tokenizers whose tokens are the text itself."""

_NUMBERS = re.compile(r'"((?:[^"\\]|\\.)*)"\s*:\s*(-?[0-9][-+.0-9eE]*)')


class GrammarTokenizer(NamedTuple):
    """A tokenizer whose tokens forms are made of."""

    tokens: Any  # an ``LLTokenizer``
    special: frozenset[str]  # the texts of its special tokens

    @classmethod
    def of(cls, hf: Any, *, vocab_size: int = 0, eos: Sequence[int] = ()) -> GrammarTokenizer:
        """Return the tokenizer of one of Hugging Face's; takes about a second for 128,000 tokens.

        Args:
            hf: A ``PreTrainedTokenizerFast``.
            vocab_size: Rows of the model's head; there may be more than tokens.
            eos: Tokens that end an answer; by default the tokenizer's own.
        """
        from llguidance import LLTokenizer

        description = json.loads(hf.backend_tokenizer.to_str())
        description["truncation"] = description["padding"] = None
        if description["decoder"] is None or description["decoder"]["type"] == "Fuse":
            description["decoder"] = LITERAL_TOKENS
        special = frozenset(token["content"] for token in description["added_tokens"] if token["special"])
        size = max(vocab_size, len(hf))
        return cls(LLTokenizer(json.dumps(description), n_vocab=size, eos_token=list(eos) or hf.eos_token_id), special)


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
        special: Special tokens of the tokenizer: a trigger among them stands for the token, any other for its text.

    Raises:
        ValueError: The text is malformed.
    """
    from llguidance import LLMatcher

    text = constraint.text
    if constraint.kind not in ("regex", "choice"):
        _check_multiples(text)
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


def _check_multiples(text: str) -> None:
    """Raise ``ValueError`` if divisors of numbers, alone or together (``allOf``), have too many remainders."""
    divisors = []
    for name, number in _NUMBERS.findall(text):
        if name == "multipleOf" or ("\\" in name and json.loads(f'"{name}"', strict=False) == "multipleOf"):
            try:
                divisors.append(Decimal(number))
            except ArithmeticError:
                raise ValueError(f"Got multipleOf = {number[:50]}, expected a number") from None
    if not divisors:
        return
    if not all(1e-9 <= abs(one) <= MAX_MULTIPLES for one in divisors):
        raise ValueError(f"expected multipleOf between 1e-9 and {MAX_MULTIPLES}")
    scale = 10 ** max(0, *(-int(one.normalize().as_tuple().exponent) for one in divisors), 0)
    whole = [int(abs(one) * scale) for one in divisors]
    num = sum(whole) // math.gcd(*whole)
    if num <= MAX_MULTIPLES:  # else their multiple may have a hundred thousand digits
        num = max(num, math.lcm(*whole) // math.gcd(*whole))
    if num > MAX_MULTIPLES:
        raise ValueError(f"its multipleOf have {num} remainders, expected at most {MAX_MULTIPLES}")


def _choices(text: str) -> str:
    choices = msgspec.json.decode(text, type=list[str])
    if not choices or not all(choices) or len(choices) > MAX_CHOICES:
        raise ValueError(f"expected 1 to {MAX_CHOICES} texts that are not empty")
    return "start: CHOICE\nCHOICE: " + " | ".join(map(json.dumps, choices))  # a terminal: rules would be ambiguous


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
