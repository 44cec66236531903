"""The HTTP face: OpenAI's routes, adapters at run time, metrics, and an engine process kept alive behind them.

Two processes joined by messages (``protocol``): the API process parses, tokenizes and streams (``app``, ``chat``,
``completions``), the engine process runs the loop (``service``). ``supervisor`` stands between them.

The names below are imported when they are asked for: the engine process lives in this package too and needs no
web framework.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from manylora.server.serve import BackgroundServer, run
    from manylora.server.supervisor import LoraModule, RestartPolicy

__all__ = ["BackgroundServer", "LoraModule", "RestartPolicy", "run"]


def __getattr__(name: str) -> Any:
    if name in ("BackgroundServer", "run"):
        from manylora.server import serve

        return getattr(serve, name)
    if name in ("LoraModule", "RestartPolicy"):
        from manylora.server import supervisor

        return getattr(supervisor, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
