"""Regular expressions of strangers, matched in bounded time.

PEFT lets ``target_modules``, ``exclude_modules``, ``rank_pattern`` and ``alpha_pattern`` be regular expressions, and an
expression such as ``(a+)+b`` takes exponential time. Python's ``re`` cannot be interrupted; the ``regex`` library can.
An expression must be valid for ``re`` first, so that it means here what it means to PEFT.
"""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import regex

__all__ = ["Budget", "Pattern", "PatternError"]

MAX_PATTERN_CHARS = 8192

# Valid for both libraries, with another meaning for `regex`: approximate matches, and classes of characters by name.
_AMBIGUOUS = re.compile(r"\{(?!\d+(?:,\d*)?\}|,\d*\})|\[:")


class PatternError(ValueError):
    """A pattern is malformed, uses unsupported syntax, or takes too long to match."""


class Budget:
    """Time that may still be spent matching; shared by all patterns of one adapter.

    Args:
        seconds: How much.
    """

    def __init__(self, seconds: float) -> None:
        self._left = seconds

    def match(self, pattern: regex.Pattern[str], text: str) -> bool:
        """Return whether the whole of ``text`` matches.

        Raises:
            PatternError: The time is spent.
        """
        began_at = time.perf_counter()
        try:
            return pattern.fullmatch(text, timeout=max(self._left, 1e-6)) is not None
        except TimeoutError as error:
            raise PatternError("its regular expressions take too long to match") from error
        finally:
            self._left -= time.perf_counter() - began_at


class Pattern:
    """A compiled regular expression.

    Args:
        source: Its text, with Python's syntax.
        budget: Pays for matching.

    Raises:
        PatternError: It is malformed, too long, or uses unsupported syntax.
    """

    def __init__(self, source: str, budget: Budget) -> None:
        if len(source) > MAX_PATTERN_CHARS:
            raise PatternError(f"a regular expression has {len(source)} characters, at most {MAX_PATTERN_CHARS} are")
        self._budget = budget
        # A process that reads adapters starts in a tenth of a second, of which this library is a quarter; few need it.
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
        """Return whether the whole of ``text`` matches, as ``re.fullmatch`` would say.

        Raises:
            PatternError: The budget is spent.
        """
        return self._budget.match(self._pattern, text)
