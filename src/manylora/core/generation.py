"""Sampling defaults that a model's author recommends: ``generation_config.json``, as vLLM reads it.

A request that leaves a field out gets the author's value. ``max_new_tokens`` also limits requests that set a larger
one. ``do_sample`` has no effect, as in vLLM: the temperature decides.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from manylora.core.errors import ConfigError, RequestError
from manylora.core.types import SamplingParams

__all__ = [
    "GENERATION_FILE",
    "MAX_FILE_BYTES",
    "NO_DEFAULTS",
    "GenerationDefaults",
    "parse_generation_config",
    "read_generation_config",
]

GENERATION_FILE = "generation_config.json"
MAX_FILE_BYTES = 1024 * 1024

_HARMLESS = """
    _from_model_config bos_token_id cache_implementation chat_format decoder_start_token_id do_sample eos_token_id
    max_length max_window_size pad_token_id transformers_version trust_remote_code use_cache
"""
HARMLESS = frozenset(_HARMLESS.split())  # settings that change nothing here, or that are read elsewhere


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults:
    """Values for requests that do not set them; ``None`` leaves the default of the API."""

    temperature: float | None = None  # as in ``SamplingParams``, like the next four
    top_p: float | None = None  # nucleus mass
    top_k: int | None = None  # number of candidates; 0 means all
    min_p: float | None = None  # least relative probability
    repetition_penalty: float | None = None  # penalty of seen tokens
    max_new_tokens: int | None = None  # most tokens of any answer

    def over(self, base: GenerationDefaults) -> GenerationDefaults:
        """Return these values, with the values of ``base`` for fields that are ``None``."""
        return GenerationDefaults(**{**base.given(), **self.given()})

    def given(self) -> dict[str, Any]:
        """Return the values that are set, by name."""
        return {one.name: value for one in fields(self) if (value := getattr(self, one.name)) is not None}

    def sampling(self) -> SamplingParams:
        """Return the sampling parameters of a request that sets none; they leave the length to the engine."""
        given = self.given()
        given.pop("max_new_tokens", None)
        return SamplingParams(**given)

    def cap(self, max_tokens: int | None) -> int | None:
        """Return the limit of an answer whose request asks for ``max_tokens``, which is kept if ``None``."""
        if max_tokens is None or self.max_new_tokens is None:
            return max_tokens
        return min(max_tokens, self.max_new_tokens)


NO_DEFAULTS = GenerationDefaults()


def parse_generation_config(content: bytes, place: str) -> tuple[GenerationDefaults, tuple[str, ...]]:
    """Return the defaults in the content of a file, ``place``, and the names of its settings that have no effect here.

    ``ConfigError`` if the content is no JSON object, or a value is of a wrong type or out of range.
    """
    try:
        values = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{place} is not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{place} holds a {type(values).__name__}, expected an object")
    given: dict[str, Any] = {}
    for one in fields(GenerationDefaults):
        value = values.pop(one.name, None)
        is_whole = one.name in ("top_k", "max_new_tokens")
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int if is_whole else int | float):
            raise ConfigError(f"{place}: got {one.name} = {str(value)[:50]!r}, expected a number")
        given[one.name] = value if is_whole else float(value)
    if given.get("top_k") == -1:
        given["top_k"] = 0
    defaults = GenerationDefaults(**given)
    try:
        defaults.sampling()
        SamplingParams(max_tokens=defaults.max_new_tokens)
    except RequestError as error:
        raise ConfigError(f"{place}: {error}") from None
    without_effect = (str(key)[:50] for key, value in values.items() if value and key not in HARMLESS)
    return defaults, tuple(sorted(without_effect))[:20]


def read_generation_config(file: Path) -> tuple[GenerationDefaults, tuple[str, ...]]:
    """Return the same of a file.

    ``ConfigError`` as ``parse_generation_config``, or it cannot be read, or is larger than a mebibyte.
    """
    try:
        with open(file, "rb") as opened:
            content = opened.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from None
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(f"{file} is larger than {MAX_FILE_BYTES} bytes")
    return parse_generation_config(content, str(file))
