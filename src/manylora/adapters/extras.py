"""The files beside an adapter's weights that concern its requests: generation defaults, chat template, tokens.

A tenant may have written them: sizes are bounded, and a file that cannot be used is named with the reason.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from manylora.adapters.folder import CONFIG_FILE, open_regular
from manylora.adapters.urls import is_url
from manylora.errors import AdapterError, ConfigError
from manylora.generation import (
    GENERATION_FILE,
    MAX_FILE_BYTES,
    NO_DEFAULTS,
    GenerationDefaults,
    parse_generation_config,
)

__all__ = ["AdapterExtras", "read_extras"]

TEMPLATE_FILE = "chat_template.jinja"
MAX_TEMPLATE_BYTES = 256 * 1024
MAX_NAME_CHARS = 200
MAX_TOKENIZER_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterExtras:
    """The settings in an adapter's folder.

    Args:
        defaults: Its generation defaults.
        chat_template: Its chat template, if it has one.
        tokens: Tokens that its tokenizer adds to a vocabulary, with their ids. Those that the base's tokenizer lacks
            are not served.
        base_model: The base it was trained on, as its author called it.
        problems: Files, or settings in them, that have no effect, with the reason.
    """

    defaults: GenerationDefaults = NO_DEFAULTS
    chat_template: str | None = None
    tokens: tuple[tuple[str, int], ...] = ()
    base_model: str | None = None
    problems: tuple[str, ...] = ()


class _AdapterConfig(msgspec.Struct):
    base_model_name_or_path: str | None = None


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _TokenizerFile(msgspec.Struct):
    added_tokens: list[_AddedToken] = []


class _NamedTemplate(msgspec.Struct):
    name: str
    template: str


class _TokenizerConfig(msgspec.Struct):
    chat_template: str | list[_NamedTemplate] | None = None


def read_extras(name: str, path: str) -> AdapterExtras:
    """Read the settings in the folder of an adapter of that name; never raises. A folder in a registry has none."""
    if is_url(path):
        return AdapterExtras()
    directory = Path(path)
    problems: list[str] = []

    def read(file: str, max_bytes: int) -> bytes | None:
        if not os.path.lexists(directory / file):
            return None
        if not _stays_inside(directory, file):
            problems.append(f"{file}: it is a link that leads out of the folder")
            return None
        try:
            with open_regular(name, directory / file, max_bytes) as opened:
                return opened.read(max_bytes)
        except (AdapterError, OSError) as error:
            problems.append(f"{file}: {error.reason if isinstance(error, AdapterError) else error.strerror}")
            return None

    def decode(file: str, kind: Any) -> Any:
        content = read(file, MAX_TOKENIZER_BYTES)
        try:
            return None if content is None else msgspec.json.decode(content, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            problems.append(f"{file}: {error}")
            return None

    defaults = NO_DEFAULTS
    content = read(GENERATION_FILE, MAX_FILE_BYTES)
    if content is not None:
        try:
            defaults, without_effect = parse_generation_config(content, GENERATION_FILE)
        except ConfigError as error:
            problems.append(str(error))
        else:
            problems += [f"{GENERATION_FILE}: {key} has no effect" for key in without_effect]
    tokens = dict(decode("added_tokens.json", dict[str, int]) or {})
    if (file := decode("tokenizer.json", _TokenizerFile)) is not None:
        tokens |= {token.content: token.id for token in file.added_tokens}
    template = _template(read(TEMPLATE_FILE, MAX_TEMPLATE_BYTES), decode("tokenizer_config.json", _TokenizerConfig))
    if template is not None and len(template) > MAX_TEMPLATE_BYTES:
        problems.append(f"the chat template is larger than {MAX_TEMPLATE_BYTES} bytes")
        template = None
    config = decode(CONFIG_FILE, _AdapterConfig)
    base_model = None if config is None else config.base_model_name_or_path
    return AdapterExtras(
        defaults=defaults,
        chat_template=template,
        tokens=tuple(tokens.items()),
        base_model=None if not base_model else base_model[:MAX_NAME_CHARS],
        problems=tuple(problems),
    )


def _stays_inside(directory: Path, file: str) -> bool:
    """Return whether a file is in the folder, or among the files of a hub's cache that its snapshots link to."""
    real = Path(os.path.realpath(directory))
    blobs = real.parent.parent / "blobs"
    return any(Path(os.path.realpath(real / file)).is_relative_to(place) for place in (real, blobs))


def _template(content: bytes | None, config: _TokenizerConfig | None) -> str | None:
    """Return the chat template of a folder: its own file goes before the tokenizer's configuration."""
    if content is not None:
        return content.decode(errors="replace")
    template = None if config is None else config.chat_template
    if isinstance(template, list):
        return {one.name: one.template for one in template}.get("default")
    return template
