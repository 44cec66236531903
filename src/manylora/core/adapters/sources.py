"""Validation of adapter names and paths from requests.

The name reaches logs, metrics and URLs; the path reaches the disk. Both are checked for form before any lookup, and a
path outside the allowed roots is refused without revealing whether it exists.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from manylora.core.adapters.folder import CONFIG_FILE, WEIGHT_FILES, lies_in
from manylora.core.errors import AdapterError, AdapterForbidden, AdapterNotFound

__all__ = ["MAX_NAME_CHARS", "MAX_PATH_CHARS", "check_name", "resolve_path"]

MAX_NAME_CHARS = 256
MAX_PATH_CHARS = 4096

_NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_ ./:@+=()\[\]-]*[A-Za-z0-9_)\]+])?")


def check_name(name: str) -> str:
    """Return ``name`` if it is a valid adapter name.

    Allowed are letters, digits, ``_ . - / : @ + = ( ) [ ]`` and inner spaces, with a letter, digit or underscore first.

    Raises:
        AdapterError: The name is empty, too long, or has other characters.
    """
    if not 1 <= len(name) <= MAX_NAME_CHARS:
        shown = name if not name else name[:32] + "..."
        raise AdapterError(shown, f"its name has {len(name)} characters, expected 1 to {MAX_NAME_CHARS}")
    if not _NAME.fullmatch(name):
        raise AdapterError(
            name,
            "its name must begin with a letter or digit, end with no space or punctuation, "
            "and hold only letters, digits, inner spaces and _.-/:@+=()[]",
        )
    return name


def resolve_path(path: str, roots: Sequence[Path]) -> Path:
    """Return the resolved directory of a request's path, which must lie below one of ``roots``.

    A relative path is looked up below each root in turn, never below the working directory. Symbolic links, of the
    directory and of the files that will be read, are followed and must also end below a root (the Hugging Face cache
    consists of links within itself). The check is safe as long as the requester cannot write below the roots.

    Raises:
        AdapterForbidden: The path is malformed, or it or a file in it lies outside the roots.
        AdapterNotFound: There is no such directory below the roots.
    """
    shown = path if len(path) <= 256 else path[:253] + "..."
    if not path or len(path) > MAX_PATH_CHARS or not path.isprintable() or path != path.strip():
        raise AdapterForbidden(shown, f"its path must be printable text of 1 to {MAX_PATH_CHARS} characters")
    pure = PurePosixPath(path)
    if ".." in pure.parts or path.startswith("~"):
        raise AdapterForbidden(shown, "its path may not contain '..' or begin with '~'")
    real_roots = [os.path.realpath(root) for root in roots]
    candidates = [
        root / pure for root, real in zip(roots, real_roots, strict=True) if _is_below(root / pure, root, real)
    ]
    if not candidates:
        raise AdapterForbidden(shown, "its path lies outside the directories adapters may be loaded from")
    for candidate in candidates:
        resolved = Path(os.path.realpath(candidate))
        if not lies_in(str(resolved), real_roots):
            raise AdapterForbidden(shown, "its path leads outside the directories adapters may be loaded from")
        if not os.path.isdir(resolved):
            continue
        for file in (CONFIG_FILE, *WEIGHT_FILES):
            if not lies_in(os.path.realpath(resolved / file), real_roots):
                raise AdapterForbidden(shown, f"{file} leads outside the directories adapters may be loaded from")
        return resolved
    if pure.is_absolute():
        raise AdapterNotFound(shown, "there is no directory at its path")
    raise AdapterNotFound(shown, "it is in none of the directories adapters may be loaded from")


def _is_below(candidate: Path, root: Path, real_root: str) -> bool:
    # By text alone: nothing outside the roots is ever looked up.
    return candidate.is_relative_to(root) or candidate.is_relative_to(real_root)
