"""Adapters in the folders of a command line: every folder below a `--lora-dir`, under its path in it.

Tenants make these folders. One that cannot be served is skipped with a line in the log, and the others are served.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterable
from pathlib import Path

from manylora.cli.options.values import parse_adapter
from manylora.core.adapters.folder import CONFIG_FILE, WEIGHT_FILES, lies_in
from manylora.core.adapters.sources import MAX_NAME_CHARS, check_registry, is_url, resolve_url
from manylora.core.errors import ConfigError

__all__ = ["adapters_below", "collect_adapters"]

logger = logging.getLogger(__name__)

MAX_FOLDER_DEPTH = 4  # levels below a `--lora-dir` that are searched, so that a link to a folder above ends


def collect_adapters(
    modules: Iterable[str],
    folders: Iterable[str],
    roots: Collection[str] | None = None,
    registries: Collection[str] = (),
) -> dict[str, str]:
    """Return paths by name of `--lora-modules` and of every `--lora-dir`.

    Of two folders with one name the first is taken; `--lora-modules` goes before both. Links may lead below ``roots``,
    which are real paths; ``None`` for anywhere.

    ``AdapterForbidden`` if a URL lies below none of the registries; ``ConfigError`` if two `--lora-modules` have one
    name and two paths, a folder does not exist, or a registry is no URL.
    """
    allowed = [check_registry(prefix) for prefix in registries]
    adapters: dict[str, str] = {}
    for name, path in map(parse_adapter, modules):
        if is_url(path):
            path = resolve_url(name, path, allowed)
        other = adapters.setdefault(name, path)
        if not _is_same(other, path):
            raise ConfigError(f"Got two adapters named {name!r}: {other} and {path}")
    for folder in folders:
        for name, path in adapters_below(folder, roots).items():
            other = adapters.setdefault(name, path)
            if not _is_same(other, path):
                _skip(path, f"{other} has the name {name}")
    return adapters


def adapters_below(folder: str, roots: Collection[str] | None = None) -> dict[str, str]:
    """Return the adapters below a folder, which have an `adapter_config.json`, named by their paths in it.

    Folders within adapters are not searched: trainers put checkpoints there. Skipped, with a line in the log, are
    folders with weights and no configuration, with names that cannot be shown, and links that lead outside the
    ``roots``. ``ConfigError`` if there is no such folder, or it is an adapter itself.
    """
    root = Path(folder).expanduser()
    if not root.is_dir():
        raise ConfigError(f"Got --lora-dir {folder!r}, expected a folder that exists")
    if (root / CONFIG_FILE).exists():
        raise ConfigError(
            f"Got --lora-dir {folder!r}, which is an adapter: expected the folder it is in, "
            f"or --lora-modules {root.resolve().name}={folder}"
        )
    found: dict[str, str] = {}
    _search(str(root), "", found, MAX_FOLDER_DEPTH, roots)
    return dict(sorted(found.items()))


def _search(folder: str, prefix: str, found: dict[str, str], depth: int, roots: Collection[str] | None) -> None:
    try:
        with os.scandir(folder) as entries:
            below = [(entry.name, entry.path, entry.is_symlink()) for entry in entries if _is_folder(entry)]
    except OSError as error:
        logger.warning("folder_skipped path=%a reason=%r", folder, error.strerror)
        return
    for name, path, is_link in below:
        if fault := _fault_of_name(prefix + name):
            _skip(path, fault)
        elif is_link and roots is not None and not lies_in(os.path.realpath(path), roots):
            _skip(path, "it is a link that leads outside the directories adapters may be loaded from")
        elif os.path.exists(os.path.join(path, CONFIG_FILE)):
            found[prefix + name] = path
        elif any(os.path.exists(os.path.join(path, file)) for file in WEIGHT_FILES):
            _skip(path, f"it has weights and no {CONFIG_FILE}")
        elif depth > 1 and not name.startswith("."):
            _search(path, f"{prefix}{name}/", found, depth - 1, roots)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def _fault_of_name(name: str) -> str:
    """Return the reason why an adapter cannot have a name, empty if it can."""
    if len(name) > MAX_NAME_CHARS:
        return f"its name has more than {MAX_NAME_CHARS} characters"
    try:
        name.encode()
    except UnicodeEncodeError:
        return "its name is not UTF-8"
    return "" if name.isprintable() and name == name.strip() else "its name holds characters that cannot be shown"


def _is_same(path: str, other: str) -> bool:
    return path == other or Path(path).resolve() == Path(other).resolve()


def _skip(path: str, reason: str) -> None:
    logger.warning("adapter_skipped path=%a reason=%a", path, reason)
