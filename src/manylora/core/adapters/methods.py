"""The registry of adapter methods. A module of its own: ``lora`` implements ``method``, and this imports both."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from manylora.core.adapters.lora.plain import PlainLora
from manylora.core.adapters.method import AdapterMethod

__all__ = ["METHODS", "PLAIN_LORA", "find_method"]

PLAIN_LORA = PlainLora()

METHODS: list[AdapterMethod] = []
"""Methods tried before plain LoRA, which handles (or refuses by name) every configuration that none of them accepts."""


def find_method(config: Mapping[str, Any]) -> AdapterMethod:
    """Return the method that a configuration asks for."""
    return next((method for method in METHODS if method.accepts(config)), PLAIN_LORA)
