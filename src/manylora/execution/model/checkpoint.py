"""Find a base model in a local folder, in the cache of Hugging Face's library, or at its hub; fail fast otherwise.

Without a network, that library retries for half a minute, and its error names no folder. This check runs before a model
is loaded: it asks the hub once, with a timeout of seconds.
"""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, HFValidationError, RepositoryNotFoundError

from manylora.core.errors import ConfigError

__all__ = ["PATIENCE_S", "check_checkpoint"]

PATIENCE_S = 2.0
"""Timeout of the connection to the hub, and of its answer."""

_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json")
"""Any of them in the library's cache shows that the model, or a tokenizer by itself, was fetched before."""


def check_checkpoint(name: str, revision: str | None = None) -> None:
    """Check that a model or a tokenizer of that name exists, without fetching it.

    A model that the hub has but does not deliver (gated, or a server error) passes; the loader reports it.

    ``name`` is a folder's path, or a name at the hub.

    Raises:
        ConfigError: It does not exist; the message names the places that were searched.
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
    reason = _ask_hub(url)
    if reason is not None:
        raise ConfigError(f"Got {name!r}: there is no such folder here, and {reason}. Give a folder by its path")


def _ask_hub(url: str) -> str | None:
    """Return the reason why the hub cannot deliver the file; ``None`` if it may."""
    if constants.is_offline_mode():
        return "it is not in the cache of the Hugging Face hub, which may not be asked (HF_HUB_OFFLINE is set)"
    try:
        get_hf_file_metadata(url, timeout=PATIENCE_S)
    except GatedRepoError:  # a subclass of RepositoryNotFoundError
        return None
    except RepositoryNotFoundError:
        return f"{constants.ENDPOINT} has no such model, or none that may be seen without a token (HF_TOKEN)"
    except HfHubHTTPError:
        return None
    except Exception as error:  # of the HTTP client, which differs between versions of the library
        return f"{constants.ENDPOINT} cannot be reached ({str(error) or type(error).__name__})"
    return None
