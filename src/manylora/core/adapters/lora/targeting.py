"""The modules that an adapter's settings select, and their ranks and scales, exactly by PEFT's rules.

Names and patterns are matched only against the short names of the base's modules (in the layout that the adapter was
trained on). PEFT allows regular expressions in ``target_modules``, ``exclude_modules``, ``rank_pattern`` and
``alpha_pattern``. A stranger's expression such as ``(a+)+b`` takes exponential time; the ``regex`` library has a
timeout, unlike Python's ``re``. An expression must also be valid for ``re``, so that it has the meaning it has in PEFT.

Most keys of patterns are names. They are expressions as well, in which a dot stands for any character, and there may be
one for every module. ``Names`` looks a module up among all of them at once. One budget of processor time covers an
adapter: its expressions, which are compiled and matched, and its names, however many there are of either.

Source: PEFT 0.21, ``tuners_utils.check_target_module_exists``, ``utils.other.get_pattern_key``,
``tuners.lora.layer.LoraLayer.update_layer``.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, TypeVar

from manylora.core.adapters.lora.settings import LoraSettings
from manylora.core.errors import AdapterError

__all__ = ["Budget", "Names", "Pattern", "PatternError", "Targeting", "is_plain"]

MATCHING_S = 0.5  # processor time for all patterns of an adapter on all modules; published adapters take milliseconds

_FIRST_INDEX = re.compile(r".*?\.[^.]*\.(?P<idx>\d+)\.")

_T = TypeVar("_T")

MAX_PATTERN_CHARS = 8192
TOO_LONG = "its regular expressions and module names take too long to match"

_PLAIN = re.compile(r"[A-Za-z0-9_.-]+")
# Valid for both libraries, with another meaning in `regex`: approximate matches and named character classes.
_AMBIGUOUS = re.compile(r"\{(?!\d+(?:,\d*)?\}|,\d*\})|\[:")


class Targeting:
    """Targets, ranks and scales of one adapter; ``all_linear`` are the targets of ``target_modules="all-linear"``.

    ``AdapterError`` if a pattern is malformed or unsupported, or (from the methods) takes too long to match.
    """

    def __init__(self, name: str, settings: LoraSettings, all_linear: Collection[str]) -> None:
        self._name = name
        self._settings = settings
        budget = Budget(MATCHING_S)
        try:
            self._is_excluded = _name_matcher(settings.exclude_modules, budget)
            if isinstance(settings.target_modules, str) and settings.target_modules.lower() == "all-linear":
                self._is_listed: Callable[[str], bool] = frozenset(all_linear).__contains__
            else:
                self._is_listed = _name_matcher(settings.target_modules, budget)
            self._ranks = _ByPattern(settings.rank_pattern, budget)
            self._alphas = _ByPattern(settings.alpha_pattern, budget)
            self._layer_patterns = [_FIRST_INDEX]
            if settings.layers_pattern:
                self._layer_patterns = [_layer_pattern(pattern, budget) for pattern in settings.layers_pattern]
        except PatternError as error:
            raise AdapterError(name, str(error)) from error
        self._budget = budget
        self._layers = None if settings.layers_to_transform is None else frozenset(settings.layers_to_transform)
        self._exact = frozenset() if isinstance(settings.target_modules, str) else frozenset(settings.target_modules)

    def is_target(self, module: str) -> bool:
        """Return whether PEFT would adapt the module of this name."""
        try:
            if self._is_excluded(module) or self._is_saved(module) or not self._is_listed(module):
                return False
            if self._layers is None or module in self._exact:
                return True
            with self._budget.spend():
                found = next((m for p in self._layer_patterns if (m := p.match(module))), None)
        except PatternError as error:
            raise AdapterError(self._name, str(error)) from error
        return found is not None and int(found["idx"]) in self._layers

    def _is_saved(self, module: str) -> bool:
        """Whether a module is trained whole, or is part of one that is: PEFT adapts no such module, listed or not."""
        return any(f".{saved}." in f".{module}." for saved in self._settings.saved)

    def rank(self, module: str) -> int:
        """Return the module's rank."""
        return self._look_up(self._ranks, module, self._settings.r)

    def scale(self, module: str) -> float:
        """Return the factor of ``B A``."""
        alpha = self._look_up(self._alphas, module, self._settings.lora_alpha)
        rank = self.rank(module)
        return alpha / math.sqrt(rank) if self._settings.use_rslora else alpha / rank

    def _look_up(self, patterns: _ByPattern[_T], module: str, default: _T) -> _T:
        try:
            return patterns.look_up(module, default)
        except PatternError as error:
            raise AdapterError(self._name, str(error)) from error


class _ByPattern(Generic[_T]):
    """Values by pattern; the first pattern that matches a module's end counts."""

    def __init__(self, pairs: Sequence[tuple[str, _T]], budget: Budget) -> None:
        self._values = [value for _, value in pairs]
        self._own = {key: number for number, (key, _) in enumerate(pairs)}
        self._names = Names(((number, key) for number, (key, _) in enumerate(pairs) if is_plain(key)), budget)
        self._patterns = [
            (number, Pattern(rf"(.*\.)?({key})", budget)) for number, (key, _) in enumerate(pairs) if not is_plain(key)
        ]

    def look_up(self, module: str, default: _T) -> _T:
        if not self._values:
            return default
        first = self._names.first(module)
        for number, pattern in self._patterns:
            if first is not None and number > first:
                break
            if pattern.fullmatch(module):
                first = number
                break
        if first is None:
            # PEFT then looks up the module's own name; this finds a name that does not match itself as a pattern.
            first = self._own.get(module)
        return default if first is None else self._values[first]


def _layer_pattern(pattern: str, budget: Budget) -> re.Pattern[str]:
    if not is_plain(pattern):
        raise PatternError(f"layers_pattern {pattern[:80]!r} is no module name")
    with budget.spend():
        return re.compile(rf"(?:^|.*?\.){pattern}\.(?P<idx>\d+)\.")


def _name_matcher(names: tuple[str, ...] | str, budget: Budget) -> Callable[[str], bool]:
    if isinstance(names, str):
        return Pattern(names, budget).fullmatch if names else lambda module: False
    listed = frozenset(names)

    def matches(module: str) -> bool:
        # The name itself, or its end after any dot.
        while module not in listed:
            _, dot, module = module.partition(".")
            if not dot:
                return False
        return True

    return matches


class PatternError(ValueError):
    """A pattern is malformed, uses unsupported syntax, or takes too long to match."""


class Budget:
    """Processor time left for the patterns of one adapter, in seconds; waiting for a processor does not count."""

    def __init__(self, seconds: float) -> None:
        self.left_s = seconds

    @contextmanager
    def spend(self) -> Iterator[float]:
        """Charge the processor time of a ``with`` block to the budget; yield the seconds that are left.

        ``PatternError`` if no time is left.
        """
        if self.left_s <= 0:
            raise PatternError(TOO_LONG)
        began_at = time.thread_time()
        try:
            yield self.left_s
        finally:
            self.left_s -= time.thread_time() - began_at


class Pattern:
    """A compiled regular expression in Python's syntax.

    ``PatternError`` if the pattern is malformed, too long, or uses unsupported syntax.
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
        """Return whether the whole of ``text`` matches, as ``re.fullmatch`` would; ``PatternError`` if that is slow."""
        with self._budget.spend() as left:
            try:
                return self._pattern.fullmatch(text, timeout=left) is not None
            except TimeoutError as error:
                self._budget.left_s = 0.0
                raise PatternError(TOO_LONG) from error


def is_plain(source: str) -> bool:
    """Return whether an expression is a name: dots are its only special characters."""
    return _PLAIN.fullmatch(source) is not None


class Names:
    r"""Many expressions of the form ``(.*\.)?(name)$``, matched against a module's name all at once.

    They are kept by the places of their dots, each of which matches any character::

        "q_proj", "v_proj"   no dots    -> {"q_proj": 0, "v_proj": 2}
        "mlp.up_proj"        dot at 3   -> {"mlp.up_proj": 1}

    Args:
        names: Pairs of a number and a name; of two that match, the name of the lesser number counts.
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
        """Return the least number of a name that matches the module; ``None`` if none does.

        ``PatternError`` if the budget is spent.
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
