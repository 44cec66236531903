"""Files of the base model that the text side reads: its tokenizer and its generation defaults."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from manylora.core.config import ModelConfig
from manylora.core.errors import ConfigError
from manylora.core.generation import GENERATION_FILE, GenerationDefaults, read_generation_config
from manylora.execution.checkpoint.files import find_gguf, is_gguf

__all__ = ["load_generation_defaults", "load_hugging_face"]

GENERIC = ("TokenizersBackend", "PreTrainedTokenizerFast")
"""Names of the class that is made of ``tokenizer.json`` alone, in transformers 5 and 4."""

KEPT_GENERIC = ("llama", "granite", "olmo2")
"""Types of models for which ``AutoTokenizer`` keeps the generic class if a folder names it; others may override it."""

logger = logging.getLogger(__name__)


def load_hugging_face(name: str, revision: str | None = None) -> Any:
    """Return the tokenizer that ``AutoTokenizer`` returns.

    That class looks at the model's configuration, whose code imports torch: a second of processor time and 200 MB that
    a process without a model does not need. A folder that names the generic class needs no choice.
    """
    if is_gguf(name):
        from transformers import AutoTokenizer

        file = find_gguf(name, revision)
        return AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    if _is_generic(Path(name)):
        from transformers.tokenization_utils_tokenizers import TokenizersBackend

        return TokenizersBackend.from_pretrained(name)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=False)


def _is_generic(folder: Path) -> bool:
    """Return whether ``AutoTokenizer`` returns the generic class for a folder."""
    if not (folder / "tokenizer.json").is_file():
        return False
    model, tokenizer = (_read(folder / file) for file in ("config.json", "tokenizer_config.json"))
    is_named = tokenizer.get("tokenizer_class") in GENERIC and "auto_map" not in tokenizer
    return is_named and "auto_map" not in model and model.get("model_type") in KEPT_GENERIC


def _read(file: Path) -> dict[str, Any]:
    """Return a JSON object; an empty one if there is none, of which the loader complains."""
    try:
        read = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return {}
    return read if isinstance(read, dict) else {}


def load_generation_defaults(model: ModelConfig) -> GenerationDefaults | None:
    """Return the defaults of a model, ``None`` if they are off; logs them.

    A model without the file has none. ``ConfigError`` if a folder that the option names has none, or the file cannot be
    used.
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
    is_file = is_gguf(model.model)
    folder = find_gguf(model.model, model.revision).parent if is_file else Path(model.model)
    if folder.is_dir():
        file = folder / GENERATION_FILE
        return file if file.exists() else None
    from transformers.utils import cached_file

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
