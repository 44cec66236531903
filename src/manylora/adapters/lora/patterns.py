"""Untrusted regular expressions, matched in bounded time.

PEFT allows regular expressions in ``target_modules``, ``exclude_modules``, ``rank_pattern`` and ``alpha_pattern``. An
expression such as ``(a+)+b`` takes exponential time; the ``regex`` library has a timeout, unlike Python's ``re``. An
expression must also be valid for ``re``, so that it has the meaning it has in PEFT.
"""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import regex

__all__ = ["Budget", "Pattern", "PatternError"]

MAX_PATTERN_CHARS = 8192

# Valid for both libraries, with another meaning in `regex`: approximate matches and named character classes.
_AMBIGUOUS = re.compile(r"\{(?!\d+(?:,\d*)?\}|,\d*\})|\[:")


class PatternError(ValueError):
    """A pattern is malformed, uses unsupported syntax, or takes too long to match."""


class Budget:
    """Time left for matching, in seconds, shared by all patterns of one adapter."""

    def __init__(self, seconds: float) -> None:
        self._left = seconds

    def match(self, pattern: regex.Pattern[str], text: str) -> bool:
        """Return whether the whole of ``text`` matches; raise ``PatternError`` if the time is spent."""
        began_at = time.perf_counter()
        try:
            return pattern.fullmatch(text, timeout=max(self._left, 1e-6)) is not None
        except TimeoutError as error:
            raise PatternError("its regular expressions take too long to match") from error
        finally:
            self._left -= time.perf_counter() - began_at


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
