"""Triton's interpreter in a third of its time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

__all__ = ["speed_up"]


class _Nothing:
    def restore(self) -> None:
        """Leave the language as it is: the launch that surrounds this call restores it."""


def speed_up() -> None:
    """Spare the interpreter what costs it two thirds of its time, in this process, whose launches are on one thread.

    It replaces the functions of Triton's language for a launch, and goes through all of them again at each call of a
    function within; once a launch is enough. It computes whether integers of fewer than 64 bits overflow, and says so
    only where it debugs. A release of Triton that has other names inside stays as slow as it is.
    """
    from triton.runtime import interpreter

    try:
        patch, execute = interpreter._patch_lang, interpreter.GridExecutor.__call__
        languages = (interpreter.tl, interpreter.tl.core)
        builder = interpreter.interpreter_builder
        builder.options = replace(builder.options, sanitize_overflow=False)
    except (AttributeError, TypeError):
        return
    seen_by: dict[Any, tuple[bool, ...]] = {}  # the languages that a function sees
    patched: set[tuple[bool, ...]] = set()  # in this launch

    def launch(self: Any, *args: Any, **kwargs: Any) -> object:
        patched.clear()
        return execute(self, *args, **kwargs)

    def patch_once(function: Any) -> object:
        if function not in seen_by:
            values = function.__globals__.values()
            seen_by[function] = tuple(any(value is one for value in values) for one in languages)
        if seen_by[function] in patched:
            return _Nothing()
        patched.add(seen_by[function])
        return patch(function)

    interpreter.GridExecutor.__call__ = launch
    interpreter._patch_lang = patch_once
