"""The files beside an adapter's weights that concern its requests: generation defaults, chat template, tokens, base.

A tenant may have written them, and the process that serves requests reads them. So they are small, all of them lie in
the folder, and a file that cannot be used is named with the reason. ``tokenizer.json``, which may have 20 MB, is not
read: ``tokenizer_config.json`` lists the tokens that were added.

Whether an adapter was trained on the base that is served shows only in names. Shapes are checked when it is read, and
a fine-tuned base has the shapes of its original: such an adapter loads and answers, badly. Names are no proof either
way, so a difference is a warning.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from manylora.core.adapters.folder import CONFIG_FILE, lies_in, open_regular
from manylora.core.adapters.sources import is_url
from manylora.core.errors import AdapterError, AdapterForbidden, ConfigError
from manylora.core.generation import (
    GENERATION_FILE,
    MAX_FILE_BYTES,
    NO_DEFAULTS,
    GenerationDefaults,
    parse_generation_config,
)

__all__ = ["AdapterRequestFiles", "is_same_base", "names_of_base", "read_request_files"]

TEMPLATE_FILE = "chat_template.jinja"
MAX_TEMPLATE_BYTES = 256 * 1024
MAX_NAME_CHARS = 200
MAX_JSON_BYTES = 2 * 1024 * 1024
"""The largest configurations of tokenizers list some thousands of added tokens, in a megabyte."""
MAX_TOKENS = 16_384

_HUB_CACHE = re.compile(r"models--[^/]+--([^/]+)")
_SEPARATORS = re.compile(r"[^a-z0-9]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterRequestFiles:
    """The settings in an adapter's folder."""

    defaults: GenerationDefaults = NO_DEFAULTS  # its generation defaults
    chat_template: str | None = None  # its chat template, if it has one
    # Tokens that its tokenizer adds to a vocabulary, with their ids. Those that the base's tokenizer lacks are not
    # served.
    tokens: tuple[tuple[str, int], ...] = ()
    base_model: str | None = None  # the base it was trained on, as its author called it
    problems: tuple[str, ...] = ()  # files, or settings in them, that have no effect, with the reason


class _AdapterConfig(msgspec.Struct):
    base_model_name_or_path: str | None = None


class _AddedToken(msgspec.Struct):
    content: str


class _NamedTemplate(msgspec.Struct):
    name: str
    template: str


class _TokenizerConfig(msgspec.Struct):
    chat_template: str | list[_NamedTemplate] | None = None
    added_tokens_decoder: dict[int, _AddedToken] = {}


class _Files:
    """The files of a resolved folder that lie below ``places``; those that cannot be read are ``problems``."""

    def __init__(self, name: str, directory: Path, places: Collection[str]) -> None:
        self._name, self._directory, self._places = name, directory, places
        self.problems: list[str] = []

    def read(self, file: str, max_bytes: int) -> bytes | None:
        """Return the content of a file; ``None`` if there is none or it cannot be read."""
        if not os.path.lexists(self._directory / file):
            return None
        try:
            with open_regular(self._name, self._directory / file, max_bytes, self._places) as opened:
                return opened.read(max_bytes)
        except AdapterForbidden:
            self.problems.append(f"{file}: it is a link that leads out of the folder")
        except (AdapterError, OSError) as error:
            self.problems.append(f"{file}: {error.reason if isinstance(error, AdapterError) else error.strerror}")
        return None

    def decode(self, file: str, kind: Any) -> Any:
        """Return a JSON file as a value of this type; ``None`` as for ``read``."""
        content = self.read(file, MAX_JSON_BYTES)
        try:
            return None if content is None else msgspec.json.decode(content, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            self.problems.append(f"{file}: {error}")
            return None


def read_request_files(name: str, path: str, roots: Collection[str] | None = None) -> AdapterRequestFiles:
    """Read the settings in the folder of an adapter of that name; never raises. A folder in a registry has none.

    It must lie below ``roots``, real paths, as in ``AdapterFolder``.
    """
    if is_url(path):
        return AdapterRequestFiles()
    # Where the folder is now: one that is replaced by a link while it is read leads to no other files.
    directory = Path(os.path.realpath(path))
    blobs = directory.parent.parent / "blobs"  # of a hub's cache, whose snapshots link to them
    places = [str(place) for place in (directory, blobs) if roots is None or lies_in(str(place), roots)]
    if str(directory) not in places:
        return AdapterRequestFiles(problems=("its path leads outside the directories adapters may be loaded from",))
    files = _Files(name, directory, places)
    problems = files.problems
    defaults = NO_DEFAULTS
    content = files.read(GENERATION_FILE, MAX_FILE_BYTES)
    if content is not None:
        try:
            defaults, without_effect = parse_generation_config(content, GENERATION_FILE)
        except ConfigError as error:
            problems.append(str(error))
        else:
            problems += [f"{GENERATION_FILE}: {key} has no effect" for key in without_effect]
    tokens = dict(files.decode("added_tokens.json", dict[str, int]) or {})
    if (tokenizer := files.decode("tokenizer_config.json", _TokenizerConfig)) is not None:
        tokens |= {token.content: number for number, token in tokenizer.added_tokens_decoder.items()}
    if len(tokens) > MAX_TOKENS:
        problems.append(f"its tokenizer adds more than {MAX_TOKENS} tokens")
        tokens = {}
    template = _template(files.read(TEMPLATE_FILE, MAX_TEMPLATE_BYTES), tokenizer)
    if template is not None and len(template) > MAX_TEMPLATE_BYTES:
        problems.append(f"the chat template is larger than {MAX_TEMPLATE_BYTES} bytes")
        template = None
    config = files.decode(CONFIG_FILE, _AdapterConfig)
    base_model = None if config is None else config.base_model_name_or_path
    return AdapterRequestFiles(
        defaults=defaults,
        chat_template=template,
        tokens=tuple(tokens.items()),
        base_model=None if not base_model else base_model[:MAX_NAME_CHARS],
        problems=tuple(problems),
    )


def _template(content: bytes | None, config: _TokenizerConfig | None) -> str | None:
    """Return the chat template of a folder: its own file goes before the tokenizer's configuration."""
    if content is not None:
        return content.decode(errors="replace")
    template = None if config is None else config.chat_template
    if isinstance(template, list):
        return {one.name: one.template for one in template}.get("default")
    return template


def names_of_base(model: str, *others: str) -> tuple[str, ...]:
    """Return the names of a base: its folder's or hub's, the name in its configuration, and ``others``."""
    names = [model, *others]
    try:
        content = (Path(model) / "config.json").read_bytes()[:MAX_JSON_BYTES]
        kept = json.loads(content).get("_name_or_path")
    except (OSError, ValueError, AttributeError):
        kept = None
    if isinstance(kept, str) and kept:
        names.append(kept)
    return tuple(names)


def is_same_base(trained_on: str, names: Iterable[str]) -> bool:
    """Return whether a base has the name that an adapter's author gave it, up to its owner, case and separators."""
    return _plain(trained_on) in {_plain(name) for name in names}


def _plain(name: str) -> str:
    """Return the last part of a path or a hub's name in lower case, with one separator."""
    cached = _HUB_CACHE.search(name)
    last = cached.group(1) if cached else name.rstrip("/").rpartition("/")[2]
    return _SEPARATORS.sub("-", last.lower()).strip("-")
