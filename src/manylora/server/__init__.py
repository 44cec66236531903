"""The HTTP face: OpenAI's routes, adapters at run time, metrics, and an engine process kept alive behind them.

Two processes joined by messages (``protocol``): the API process parses, tokenizes and streams (``app``, ``chat``,
``completions``), the engine process runs the loop (``service``). ``supervisor`` stands between them.

The names below are imported when they are asked for: the engine process lives in this package too and needs no
web framework.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from manylora.hosting.engine_keeper import LoraModule, RestartPolicy
    from manylora.server.background import BackgroundServer
    from manylora.server.serve import run

__all__ = ["BackgroundServer", "LoraModule", "RestartPolicy", "run"]

_HOMES = {
    "BackgroundServer": "manylora.server.background",
    "LoraModule": "manylora.hosting.engine_keeper",
    "RestartPolicy": "manylora.hosting.engine_keeper",
    "run": "manylora.server.serve",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
