"""Untrusted regular expressions, matched in bounded time.

PEFT allows regular expressions in ``target_modules``, ``exclude_modules``, ``rank_pattern`` and ``alpha_pattern``. An
expression such as ``(a+)+b`` takes exponential time; the ``regex`` library has a timeout, unlike Python's ``re``. An
expression must also be valid for ``re``, so that it has the meaning it has in PEFT.

Most keys of patterns are names. They are expressions as well, in which a dot stands for any character, and there may be
one for every module. ``Names`` looks a module up among all of them at once. One budget of processor time covers an
adapter: its expressions, which are compiled and matched, and its names, however many there are of either.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import regex

__all__ = ["Budget", "Names", "Pattern", "PatternError", "is_plain"]

MAX_PATTERN_CHARS = 8192
TOO_LONG = "its regular expressions and module names take too long to match"

_PLAIN = re.compile(r"[A-Za-z0-9_.-]+")
# Valid for both libraries, with another meaning in `regex`: approximate matches and named character classes.
_AMBIGUOUS = re.compile(r"\{(?!\d+(?:,\d*)?\}|,\d*\})|\[:")


class PatternError(ValueError):
    """A pattern is malformed, uses unsupported syntax, or takes too long to match."""


class Budget:
    """Processor time left for the patterns of one adapter, in seconds; a busy machine takes none of it."""

    def __init__(self, seconds: float) -> None:
        self._left = seconds

    @contextmanager
    def spend(self) -> Iterator[float]:
        """Yield the time left and count the time inside; raise ``PatternError`` if none is left."""
        if self._left <= 0:
            raise PatternError(TOO_LONG)
        began_at = time.thread_time()
        try:
            yield self._left
        finally:
            self._left -= time.thread_time() - began_at

    def match(self, pattern: regex.Pattern[str], text: str) -> bool:
        """Return whether the whole of ``text`` matches; raise ``PatternError`` if the time is spent."""
        with self.spend() as left:
            try:
                return pattern.fullmatch(text, timeout=left) is not None
            except TimeoutError as error:
                self._left = 0.0
                raise PatternError(TOO_LONG) from error


class Pattern:
    """A compiled regular expression in Python's syntax.

    Raises:
        PatternError: It is malformed, too long, or uses unsupported syntax.
    """

    def __init__(self, source: str, budget: Budget) -> None:
        if len(source) > MAX_PATTERN_CHARS:
            raise PatternError(f"a regular expression has {len(source)} characters, at most {MAX_PATTERN_CHARS} are")
        self._budget = budget
        # Imported late: it takes a quarter of the start of a reader process, and few adapters have patterns.
        import regex

        shown = repr(source if len(source) <= 80 else source[:77] + "...")
        try:
            with budget.spend():
                re.compile(source)
                self._pattern = regex.compile(source, regex.VERSION0, cache_pattern=False)
        except RecursionError as error:
            raise PatternError(f"{shown} is nested too deeply") from error
        except (re.error, regex.error, OverflowError) as error:
            raise PatternError(f"{shown} is no regular expression: {error}") from error
        if ambiguous := _AMBIGUOUS.search(source):
            raise PatternError(f"{shown} uses {ambiguous[0]!r} outside a count, which is not supported")

    def fullmatch(self, text: str) -> bool:
        """Return whether the whole of ``text`` matches, as ``re.fullmatch`` would; raise as ``Budget.match`` does."""
        return self._budget.match(self._pattern, text)


def is_plain(source: str) -> bool:
    """Return whether an expression is a name: dots are its only special characters."""
    return _PLAIN.fullmatch(source) is not None


class Names:
    r"""Many expressions that are names, for a module of which one is the end: ``(.*\.)?(name)$`` of each, at once.

    They are kept by the places of their dots, each of which matches any character::

        "q_proj", "v_proj"   no dots    -> {"q_proj": 0, "v_proj": 2}
        "mlp.up_proj"        dot at 3   -> {"mlp.up_proj": 1}

    Args:
        names: Pairs of a number and a name; of two that match, that of the lesser number counts.
        budget: Covers the look-ups.
    """

    def __init__(self, names: Iterable[tuple[int, str]], budget: Budget) -> None:
        self._budget = budget
        self._by_length: dict[int, dict[tuple[int, ...], dict[str, int]]] = {}
        with budget.spend():
            for number, name in names:
                dots = tuple(place for place, character in enumerate(name) if character == ".")
                self._by_length.setdefault(len(name), {}).setdefault(dots, {}).setdefault(name, number)

    def first(self, module: str) -> int | None:
        """Return the least number whose name the module ends in, after a dot or whole; ``None`` if there is none.

        Raises:
            PatternError: The budget is spent.
        """
        found: list[int] = []
        with self._budget.spend():
            end = module
            while end:
                for dots, names in self._by_length.get(len(end), {}).items():
                    number = names.get(_with_dots(end, dots))
                    if number is not None:
                        found.append(number)
                _, _, end = end.partition(".")
        return min(found, default=None)


def _with_dots(text: str, dots: tuple[int, ...]) -> str:
    """Return text with dots in some places."""
    for place in dots:
        if text[place] != ".":
            text = f"{text[:place]}.{text[place + 1 :]}"
    return text
