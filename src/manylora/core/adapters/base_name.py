"""Whether an adapter was trained on the base that is served, as far as names tell.

Shapes are checked when an adapter is read, and a fine-tuned base has the shapes of its original: such an adapter loads
and answers, badly. Names are no proof either way, so a difference is a warning.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path

__all__ = ["is_same_base", "names_of_base"]

MAX_CONFIG_BYTES = 1024 * 1024

_HUB_CACHE = re.compile(r"models--[^/]+--([^/]+)")
_SEPARATORS = re.compile(r"[^a-z0-9]+")


def names_of_base(model: str, *others: str) -> tuple[str, ...]:
    """Return the names of a base: its folder's or hub's, the one that its configuration keeps, and ``others``."""
    names = [model, *others]
    try:
        content = (Path(model) / "config.json").read_bytes()[:MAX_CONFIG_BYTES]
        kept = json.loads(content).get("_name_or_path")
    except (OSError, ValueError, AttributeError):
        kept = None
    if isinstance(kept, str) and kept:
        names.append(kept)
    return tuple(names)


def is_same_base(trained_on: str, names: Iterable[str]) -> bool:
    """Return whether a base has the name that an adapter's author gave it, up to its owner, case and separators."""
    return _plain(trained_on) in {_plain(name) for name in names}


def _plain(name: str) -> str:
    """Return the last part of a path or a hub's name in lower case, with one separator."""
    cached = _HUB_CACHE.search(name)
    last = cached.group(1) if cached else name.rstrip("/").rpartition("/")[2]
    return _SEPARATORS.sub("-", last.lower()).strip("-")
