"""The modules that an adapter's settings select, and their ranks and scales, exactly by PEFT's rules.

Names and patterns are matched only against the short names of the base's modules (in the layout that the adapter was
trained on). Regular expressions go through ``patterns``.

Source: PEFT 0.21, ``tuners_utils.check_target_module_exists``, ``utils.other.get_pattern_key``,
``tuners.lora.layer.LoraLayer.update_layer``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Sequence
from typing import Generic, TypeVar

from manylora.core.adapters.lora.patterns import Budget, Names, Pattern, PatternError, is_plain
from manylora.core.adapters.lora.settings import LoraSettings
from manylora.core.errors import AdapterError

__all__ = ["Targeting"]

MATCHING_S = 0.5
"""Processor time for all patterns of an adapter on all modules; published adapters take milliseconds."""

_FIRST_INDEX = re.compile(r".*?\.[^.]*\.(?P<idx>\d+)\.")

_T = TypeVar("_T")


class Targeting:
    """Targets, ranks and scales of one adapter; ``all_linear`` are the targets of ``target_modules="all-linear"``.

    Raises:
        AdapterError: A pattern is malformed or unsupported, or (from the methods) takes too long to match.
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
            if self._is_excluded(module) or not self._is_listed(module):
                return False
            if self._layers is None or module in self._exact:
                return True
            with self._budget.spend():
                found = next((m for p in self._layer_patterns if (m := p.match(module))), None)
        except PatternError as error:
            raise AdapterError(self._name, str(error)) from error
        return found is not None and int(found["idx"]) in self._layers

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
