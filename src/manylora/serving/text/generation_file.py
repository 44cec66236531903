"""Find the generation defaults of the base model, by the option ``generation_config``."""

from __future__ import annotations

import logging
from pathlib import Path

from transformers.utils import cached_file

from manylora.core.config import ModelConfig
from manylora.core.errors import ConfigError
from manylora.core.generation import GENERATION_FILE, GenerationDefaults, read_generation_config

__all__ = ["load_generation_defaults"]

logger = logging.getLogger(__name__)


def load_generation_defaults(model: ModelConfig) -> GenerationDefaults | None:
    """Return the defaults of a model, ``None`` if they are off; logs them.

    A model without the file has none. A folder that the option names must have it.

    Raises:
        ConfigError: The file is missing there, or cannot be used.
    """
    chosen = model.generation_config
    if chosen == "vllm":
        return None
    file = _find(model) if chosen == "auto" else Path(chosen) / GENERATION_FILE
    if file is None:
        return GenerationDefaults()
    defaults, without_effect = read_generation_config(file)
    if given := defaults.given():
        logger.info("generation_defaults from=%s %s", file, " ".join(f"{key}={given[key]}" for key in given))
    if without_effect:
        logger.warning("generation_settings_ignored from=%s: %s", file, ", ".join(without_effect))
    return defaults


def _find(model: ModelConfig) -> Path | None:
    """Return the model's own file, from its folder, the hub's cache, or the hub."""
    if Path(model.model).is_dir():
        file = Path(model.model) / GENERATION_FILE
        return file if file.exists() else None
    try:
        found = cached_file(
            model.model,
            GENERATION_FILE,
            revision=model.revision,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
    except OSError as error:
        raise ConfigError(f"Got no {GENERATION_FILE} of {model.model!r}: {str(error).splitlines()[0]}") from error
    return None if found is None else Path(found)
