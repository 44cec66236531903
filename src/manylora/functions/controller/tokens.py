"""The controller's token, in a file of its own."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from manylora.core.errors import ConfigError

__all__ = ["TOKEN", "own_token", "read_token"]

TOKEN = "token"
"""Name of the file in a folder of state."""


def read_token(path: Path) -> str:
    """Return the token in a file.

    Raises:
        ConfigError: The file cannot be read, or is empty: every caller knows an empty token.
    """
    try:
        token = path.read_text(encoding="ascii").strip()
    except OSError as error:
        raise ConfigError(f"Got token_file = {str(path)!r}, which cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"Got token_file = {str(path)!r}, which is not ASCII") from None
    if not token:
        raise ConfigError(f"Got token_file = {str(path)!r}, which is empty, expected a token")
    return token


def own_token(folder: Path) -> str:
    """Return the token in a folder of state; a new one if there is none.

    The file is whole or not there: a kill between its creation and its contents would leave an empty token.
    """
    path = folder / TOKEN
    if path.exists() and path.stat().st_size:
        return read_token(path)
    fresh = folder / f"{TOKEN}.new"
    fresh.unlink(missing_ok=True)
    with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secrets.token_urlsafe(32) + "\n")
    fresh.replace(path)
    return read_token(path)
