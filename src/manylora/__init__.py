"""manylora: serve hundreds to thousands of LoRA adapters of one base model from shared hardware.

The offline API: ``from manylora import Engine, SamplingParams``. Importing this is cheap; torch comes with the
first use of ``Engine``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from manylora.core import __version__
from manylora.core.types import Constraint, SamplingParams

if TYPE_CHECKING:
    from manylora.serving.offline import Engine, Generation

__all__ = ["Constraint", "Engine", "Generation", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    if name in ("Engine", "Generation"):
        from manylora.serving import offline

        return getattr(offline, name)
    raise AttributeError(f"module 'manylora' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
