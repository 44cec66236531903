"""Find a base model: in a local folder, in the cache of Hugging Face's library, or at its hub; fail fast otherwise.

Without a network that library retries for half a minute, and its error names no folder. So this check runs before a
model is loaded: it asks the hub once, with a timeout of seconds.
"""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, HFValidationError, RepositoryNotFoundError

from manylora.errors import ConfigError

__all__ = ["PATIENCE_S", "check_checkpoint"]

PATIENCE_S = 2.0
"""Longest wait for a connection to the hub, and for its answer."""

_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json")
"""Any of them in the library's cache says that a model, or a tokenizer by itself, was fetched before."""


def check_checkpoint(name: str, revision: str | None = None) -> None:
    """Make sure that there is a model or a tokenizer by that name; nothing is fetched.

    A model that the hub has but does not give (gated, or a server error) passes; the loader reports it.

    Args:
        name: A folder's path, or a name at the hub.
        revision: Revision at the hub; by default the newest.

    Raises:
        ConfigError: There is none; the message says where it was looked for, and how to name a folder.
    """
    if Path(name).is_dir():
        return
    if name.startswith(("/", ".", "~")) or name.count("/") > 1:
        raise ConfigError(f"Got {name!r}, and there is no such folder")
    try:
        if any(isinstance(try_to_load_from_cache(name, file, revision=revision), str) for file in _FILES):
            return
        url = hf_hub_url(name, _FILES[0], revision=revision)
    except HFValidationError:
        raise ConfigError(f"Got {name!r}: there is no such folder here, and no model can have that name") from None
    why_not = _ask_hub(url)
    if why_not is not None:
        raise ConfigError(f"Got {name!r}: there is no such folder here, and {why_not}. Give a folder by its path")


def _ask_hub(url: str) -> str | None:
    """Return why the file cannot be had from the hub; ``None`` if it may be."""
    if constants.is_offline_mode():
        return "it is not in the cache of the Hugging Face hub, which may not be asked (HF_HUB_OFFLINE is set)"
    try:
        get_hf_file_metadata(url, timeout=PATIENCE_S)
    except GatedRepoError:  # a kind of repository that is not found
        return None
    except RepositoryNotFoundError:
        return f"{constants.ENDPOINT} has no such model, or none that may be seen without a token (HF_TOKEN)"
    except HfHubHTTPError:
        return None
    except Exception as error:  # of the HTTP client, another one from version to version of the library
        return f"{constants.ENDPOINT} cannot be reached ({str(error) or type(error).__name__})"
    return None
