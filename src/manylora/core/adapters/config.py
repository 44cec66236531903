"""The untrusted ``adapter_config.json``: refused unless small and valid. The adapter's method interprets it."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from manylora.core.adapters.folder import CONFIG_FILE, Folder
from manylora.core.errors import AdapterError

__all__ = ["parse_config", "read_config", "read_config_file", "unique_pairs"]

MAX_CONFIG_BYTES = 1024 * 1024


def read_config(folder: Folder) -> dict[str, Any]:
    """Read the configuration in an adapter's folder; errors as of the two functions below."""
    return parse_config(folder.name, read_config_file(folder))


def read_config_file(folder: Folder) -> bytes:
    """Return the content of the configuration in an adapter's folder.

    Raises:
        AdapterError: It is missing or too large.
    """
    return folder.read(CONFIG_FILE, MAX_CONFIG_BYTES)


def parse_config(name: str, content: bytes) -> dict[str, Any]:
    """Return the configuration in the content of its file.

    Raises:
        AdapterError: It is malformed; names the adapter ``name``.
    """

    def constant(word: str) -> NoReturn:
        raise ValueError(f"{word} is no number")

    try:
        value = json.loads(content, parse_constant=constant, object_pairs_hook=unique_pairs)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise AdapterError(name, f"{CONFIG_FILE} is not valid JSON: {reason}") from error
    if not isinstance(value, dict):
        raise AdapterError(name, f"{CONFIG_FILE} holds a {type(value).__name__}, expected an object")
    return value


def unique_pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object's members, for ``json.loads``; of two with one name a reader could take either.

    Raises:
        ValueError: A name appears twice.
    """
    unique = dict(items)
    if len(unique) != len(items):
        raise ValueError("a key appears twice")
    return unique
