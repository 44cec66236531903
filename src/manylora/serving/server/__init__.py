"""The HTTP server: OpenAI's routes, adapters at run time, metrics.

It parses, tokenizes and streams; the engines are run by ``hosting`` and seen as a ``Fleet``. The names below are
imported on first use, so that the command line starts without the web framework.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from manylora.serving.hosting.fleet.adapter_book import LoraModule
    from manylora.serving.hosting.fleet.keeper import RestartPolicy
    from manylora.serving.server.background import BackgroundServer
    from manylora.serving.server.serve import run

__all__ = ["BackgroundServer", "LoraModule", "RestartPolicy", "run"]

_HOMES = {
    "BackgroundServer": "manylora.serving.server.background",
    "LoraModule": "manylora.serving.hosting.fleet.adapter_book",
    "RestartPolicy": "manylora.serving.hosting.fleet.keeper",
    "run": "manylora.serving.server.serve",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
