"""Regular expressions from strangers, matched in bounded time.

PEFT lets ``target_modules``, ``exclude_modules``, ``rank_pattern`` and ``alpha_pattern`` be regular expressions.
Python's own matcher backtracks: ``(a+)+b`` takes exponential time, holds the interpreter lock meanwhile and so
stops the whole server. Here a pattern is parsed by Python's parser (so it means what it means there) and then
run on *sets* of positions, kept as bits of an integer::

    text      q _ p r o j          a literal:   (starts & where[c]) << 1
    positions 0 1 2 3 4 5 6        a branch:    union of what its parts reach
    starts    1 0 0 0 0 0 0        a repeat:    until nothing new is reached

No path is tried twice, so the time is polynomial; a budget of steps bounds it absolutely. Only whole matches are
asked for, and for those greedy or lazy makes no difference. What is not a property of a set of positions (back
references, look-behind, atomic groups) is refused; look-ahead, which published adapters use, is supported.
"""

from __future__ import annotations

# Private, but the only way to mean exactly what PEFT's `re` means; its public alias `sre_parse` is deprecated.
import re._constants as op  # type: ignore[import-not-found]
import re._parser as sre_parser  # type: ignore[import-not-found]
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["Budget", "Pattern", "PatternError"]

MAX_PATTERN_CHARS = 8192


class PatternError(ValueError):
    """A pattern is malformed, uses what we do not support, or takes too long to match."""


class Budget:
    """Steps that may still be spent matching; shared by all patterns of one adapter.

    Args:
        steps: How many. One costs a microsecond or two.
    """

    def __init__(self, steps: int) -> None:
        self._left = steps

    def spend(self, steps: int) -> None:
        """Take steps.

        Raises:
            PatternError: None are left.
        """
        self._left -= steps
        if self._left < 0:
            raise PatternError("its regular expressions take too long to match")


def _is_word(char: str) -> bool:
    return char.isalnum() or char == "_"


_CATEGORIES: Mapping[object, Callable[[str], bool]] = {
    op.CATEGORY_DIGIT: str.isdecimal,
    op.CATEGORY_NOT_DIGIT: lambda c: not c.isdecimal(),
    op.CATEGORY_SPACE: str.isspace,
    op.CATEGORY_NOT_SPACE: lambda c: not c.isspace(),
    op.CATEGORY_WORD: _is_word,
    op.CATEGORY_NOT_WORD: lambda c: not _is_word(c),
}


class Pattern:
    """A parsed regular expression.

    Args:
        source: Its text, with Python's syntax.
        budget: What matching is paid from.

    Raises:
        PatternError: It is malformed, too long, or uses what we do not support.
    """

    def __init__(self, source: str, budget: Budget) -> None:
        if len(source) > MAX_PATTERN_CHARS:
            raise PatternError(f"a regular expression has {len(source)} characters, at most {MAX_PATTERN_CHARS} are")
        self._budget = budget
        try:
            self._nodes = sre_parser.parse(source)
        except RecursionError as error:
            raise PatternError(f"{_shorten(source)} is nested too deeply") from error
        except (sre_parser.error, OverflowError) as error:
            raise PatternError(f"{_shorten(source)} is no regular expression: {error}") from error
        if self._nodes.state.flags & ~sre_parser.SRE_FLAG_UNICODE:
            raise PatternError(f"{_shorten(source)} uses inline flags, which are not supported")
        self._source = source

    def fullmatch(self, text: str) -> bool:
        """Whether the whole of ``text`` matches, as ``re.fullmatch`` would say.

        Raises:
            PatternError: It uses what we do not support, or the budget is spent.
        """
        try:
            return bool(_Run(text, self._budget).advance(self._nodes, 1) >> len(text) & 1)
        except _Unsupported as error:
            raise PatternError(f"{_shorten(self._source)} uses {error}, which is not supported") from error
        except RecursionError as error:
            raise PatternError(f"{_shorten(self._source)} is nested too deeply") from error


class _Unsupported(Exception):
    """A construct that is no function of a set of positions."""


class _Run:
    """One text under match. A set of positions ``0..len(text)`` is an integer with those bits set."""

    def __init__(self, text: str, budget: Budget) -> None:
        self._text = text
        self._filled = (1 << len(text)) - 1  # every position that has a character
        self._budget = budget
        budget.spend(len(text))
        self._chars: dict[int, int] = {}
        for i, char in enumerate(text):
            self._chars[ord(char)] = self._chars.get(ord(char), 0) | 1 << i
        self._classes: dict[int, int] = {}

    def advance(self, nodes: Any, starts: int) -> int:
        """Return every position that ``nodes``, one after another, can end at when begun at one of ``starts``."""
        for kind, arg in nodes:
            if not starts:
                return 0
            self._budget.spend(1)
            if kind in (op.LITERAL, op.NOT_LITERAL, op.ANY, op.IN):
                starts = (starts & self._where(kind, arg)) << 1
            elif kind is op.BRANCH:
                starts = self._union(arg[1], starts)
            elif kind is op.SUBPATTERN:
                _, add_flags, del_flags, inner = arg
                if add_flags or del_flags:
                    raise _Unsupported("inline flags")
                starts = self.advance(inner, starts)
            elif kind in (op.MAX_REPEAT, op.MIN_REPEAT):
                least, most, inner = arg
                starts = self._repeat(least, most, inner, starts)
            elif kind is op.AT:
                starts &= self._anchors(arg)
            elif kind in (op.ASSERT, op.ASSERT_NOT):
                direction, inner = arg
                if direction < 0:
                    raise _Unsupported("look-behind")
                ahead = sum(p for p in self._each(starts) if self.advance(inner, p))
                starts = ahead if kind is op.ASSERT else starts & ~ahead
            else:
                raise _Unsupported(str(kind).lower().replace("_", " "))
        return starts

    def _union(self, branches: Any, starts: int) -> int:
        reached = 0
        for branch in branches:
            reached |= self.advance(branch, starts)
        return reached

    def _repeat(self, least: int, most: int, inner: Any, starts: int) -> int:
        # Positions never move back, so whatever the counts are this settles within len(text) + 2 rounds.
        reached = starts if least == 0 else 0
        current, count = starts, 0
        while current and count < most:
            following = self.advance(inner, current)
            count += 1
            if count < least:
                if following == current:
                    return current
                current = following
            else:
                current = following & ~reached
                reached |= following
        return reached

    def _where(self, kind: Any, arg: Any) -> int:
        """Return the positions whose character is accepted."""
        if kind is op.LITERAL:
            return self._chars.get(arg, 0)
        if kind is op.NOT_LITERAL:
            return self._filled & ~self._chars.get(arg, 0)
        if kind is op.ANY:
            return self._filled & ~self._chars.get(ord("\n"), 0)
        if id(arg) not in self._classes:
            self._budget.spend(len(self._chars))
            self._classes[id(arg)] = sum(where for char, where in self._chars.items() if _is_in(arg, char))
        return self._classes[id(arg)]

    def _anchors(self, anchor: Any) -> int:
        first, last = 1, 1 << len(self._text)
        if anchor in (op.AT_BEGINNING, op.AT_BEGINNING_STRING):
            return first
        if anchor is op.AT_END_STRING:
            return last
        if anchor is op.AT_END:
            return last | (last >> 1 if self._text.endswith("\n") else 0)
        if anchor in (op.AT_BOUNDARY, op.AT_NON_BOUNDARY):
            self._budget.spend(len(self._text))
            word = [False, *map(_is_word, self._text), False]
            at = sum(1 << i for i in range(len(self._text) + 1) if word[i] != word[i + 1])
            if anchor is op.AT_BOUNDARY:
                return at
            # Python before 3.14 finds no \B in an empty text; module names are never empty.
            return (self._filled << 1 | 1) & ~at
        raise _Unsupported(str(anchor).lower())

    def _each(self, positions: int) -> list[int]:
        return [1 << i for i in range(len(self._text) + 1) if positions >> i & 1]


def _is_in(items: Any, char: int) -> bool:
    """Whether a character is in a class such as ``[^a-z_]``."""
    is_negated = items[0][0] is op.NEGATE
    for kind, arg in items[is_negated:]:
        if (
            (kind is op.LITERAL and char == arg)
            or (kind is op.RANGE and arg[0] <= char <= arg[1])
            or (kind is op.CATEGORY and _CATEGORIES[arg](chr(char)))
        ):
            return not is_negated
    return is_negated


def _shorten(source: str) -> str:
    return repr(source if len(source) <= 80 else source[:77] + "...")
