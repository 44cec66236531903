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
from typing import TypeVar

from manylora.adapters.lora.patterns import Budget, Pattern, PatternError
from manylora.adapters.lora.settings import LoraSettings
from manylora.errors import AdapterError

__all__ = ["Targeting"]

MATCHING_S = 1.0
"""Seconds for all patterns of an adapter on all modules; published adapters take milliseconds."""

# Without a quantifier or group matching takes linear time, and Python's own matcher is faster.
_PLAIN = re.compile(r"[A-Za-z0-9_.-]+")
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
            self._ranks = [(_suffix_matcher(key, budget), key, rank) for key, rank in settings.rank_pattern]
            self._alphas = [(_suffix_matcher(key, budget), key, alpha) for key, alpha in settings.alpha_pattern]
        except PatternError as error:
            raise AdapterError(name, str(error)) from error
        self._exact = frozenset() if isinstance(settings.target_modules, str) else frozenset(settings.target_modules)
        self._layer_patterns = [_FIRST_INDEX]
        if settings.layers_pattern:
            for pattern in settings.layers_pattern:
                if not _PLAIN.fullmatch(pattern):
                    raise AdapterError(name, f"layers_pattern {pattern[:80]!r} is no module name")
            self._layer_patterns = [
                re.compile(rf"(?:^|.*?\.){pattern}\.(?P<idx>\d+)\.") for pattern in settings.layers_pattern
            ]

    def is_target(self, module: str) -> bool:
        """Return whether PEFT would adapt the module of this name."""
        try:
            if self._is_excluded(module) or not self._is_listed(module):
                return False
        except PatternError as error:
            raise AdapterError(self._name, str(error)) from error
        layers = self._settings.layers_to_transform
        if layers is None or module in self._exact:
            return True
        found = next((m for p in self._layer_patterns if (m := p.match(module))), None)
        return found is not None and int(found["idx"]) in layers

    def rank(self, module: str) -> int:
        """Return the module's rank."""
        return self._look_up(self._ranks, module, self._settings.r)

    def scale(self, module: str) -> float:
        """Return the factor of ``B A``."""
        alpha = self._look_up(self._alphas, module, self._settings.lora_alpha)
        rank = self.rank(module)
        return alpha / math.sqrt(rank) if self._settings.use_rslora else alpha / rank

    def _look_up(self, patterns: Sequence[tuple[Callable[[str], bool], str, _T]], module: str, default: _T) -> _T:
        try:
            matched = (value for matches, _, value in patterns if matches(module))
            found = next(matched, None)
        except PatternError as error:
            raise AdapterError(self._name, str(error)) from error
        if found is None:
            # PEFT then looks up the module's own name; this finds a name that does not match itself as a pattern.
            found = next((value for _, key, value in patterns if key == module), default)
        return found


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


def _suffix_matcher(key: str, budget: Budget) -> Callable[[str], bool]:
    if not _PLAIN.fullmatch(key):
        return Pattern(rf"(.*\.)?({key})", budget).fullmatch
    pattern = re.compile(rf"(.*\.)?({key})$")
    last = key.rpartition(".")[2]
    # Some adapters have a rank for each of hundreds of modules: the cheap first test rejects most candidates.
    return lambda module: module.endswith(last) and pattern.match(module) is not None
