"""Load a tokenizer of Hugging Face's library, for the most common kind without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

__all__ = ["load_hugging_face"]

GENERIC = ("TokenizersBackend", "PreTrainedTokenizerFast")
"""Names of the class that is made of ``tokenizer.json`` alone, in transformers 5 and 4."""

KEPT_GENERIC = ("llama", "granite", "olmo2")
"""Types of models for which ``AutoTokenizer`` keeps the generic class if a folder names it; others may override it."""


def load_hugging_face(name: str, revision: str | None = None) -> Any:
    """Return the tokenizer that ``AutoTokenizer`` returns.

    That class looks at the model's configuration, whose code imports torch: a second of processor time and 200 MB that
    a process without a model does not need. A folder that names the generic class needs no choice.
    """
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
