"""Where an adapter comes from: its name, and its path on disk or its URL in a registry, of which no text is trusted.

A name reaches logs, metrics and URLs; a path reaches the disk. Both are checked for form before any lookup, and a path
outside the allowed roots is refused without revealing whether it exists. A URL has a host, a path of plain characters,
at its end perhaps a checksum, and nothing else: percent signs, ``..``, user names and queries are refused, so that the
text that is compared with the prefixes of registries is the one that is requested.

::

    https://host/path    hf://org/name@revision/path    s3://bucket/path    gs://bucket/path    az://container/path
    ...#sha256=DIGEST    of the weight file
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from manylora.core.adapters.folder import CONFIG_FILE, WEIGHT_FILES, AdapterFolder, Folder, leads_outside, lies_in
from manylora.core.adapters.remote import Registry, RemoteFolder
from manylora.core.errors import AdapterError, AdapterForbidden, AdapterNotFound, ConfigError

__all__ = [
    "MAX_NAME_CHARS",
    "MAX_PATH_CHARS",
    "STORES",
    "HubPlace",
    "check_name",
    "check_registry",
    "host_of",
    "is_moving",
    "is_url",
    "open_folder",
    "pinned",
    "registry_of",
    "resolve_path",
    "resolve_url",
]

MAX_NAME_CHARS = 256
MAX_PATH_CHARS = 4096

_NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_ ./:@+=()\[\]-]*[A-Za-z0-9_)\]+])?")
MAX_URL_CHARS = 2048
NO_REGISTRY = "reading adapters from a registry is off; allow its URL with --lora-registry URL"
STORES = ("s3", "gs", "az")  # schemes of object stores

_SCHEMES = tuple(f"{scheme}://" for scheme in ("http", "https", "hf", *STORES))
_PORTS = {"http": "80", "https": "443"}
_URL = re.compile(
    r"(?:(?P<scheme>https?)://(?P<host>[A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\])(?::(?P<port>[0-9]{1,5}))?"
    r"|(?P<store>(?:hf|s3|gs|az)://[A-Za-z0-9][A-Za-z0-9._-]*))"
    r"(?P<path>(?:/[A-Za-z0-9_.~@+=:,-]+)*)/?(?P<digest>#sha256=[0-9a-f]{64})?"
)
_HUB = re.compile(r"hf://(?P<repo>[^/]+/[^/@]+)(?:@(?P<revision>[^/@]+))?(?:/(?P<path>.+))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")


class HubPlace(NamedTuple):
    """A folder or file of a repository on a hub."""

    repo: str  # ``org/name``
    revision: str  # a commit, or a branch or tag, which may move
    path: str  # below the repository, empty for its top

    @classmethod
    def of(cls, url: str) -> HubPlace | None:
        """Return the place of a URL in its normal form, without a checksum; ``None`` if it is none."""
        match = _HUB.fullmatch(url)
        return None if match is None else cls(match["repo"], match["revision"] or "main", match["path"] or "")

    @property
    def is_commit(self) -> bool:
        """Whether the revision is a commit, of which no file ever changes."""
        return _COMMIT.fullmatch(self.revision) is not None

    def at(self, commit: str) -> str:
        """Return the URL of the place in a commit."""
        return f"hf://{self.repo}@{commit}{self.path and '/'}{self.path}"


def check_name(name: str) -> str:
    """Return ``name`` if it is a valid adapter name.

    Allowed are letters, digits, ``_ . - / : @ + = ( ) [ ]`` and inner spaces, with a letter, digit or underscore first.
    ``AdapterError`` if the name is empty, too long, or has other characters.
    """
    if not 1 <= len(name) <= MAX_NAME_CHARS:
        shown = name if not name else name[:32] + "..."
        raise AdapterError(shown, f"its name has {len(name)} characters, expected 1 to {MAX_NAME_CHARS}")
    if not _NAME.fullmatch(name):
        raise AdapterError(
            name,
            "its name must begin with a letter or digit, end with no space or punctuation, "
            "and hold only letters, digits, inner spaces and _.-/:@+=()[]",
        )
    return name


def resolve_path(path: str, roots: Sequence[Path]) -> Path:
    """Return the resolved directory of a request's path, which must lie below one of ``roots``.

    A relative path is looked up below each root in turn, never below the working directory. Symbolic links, of the
    directory and of the files that will be read, are followed and must also end below a root (the Hugging Face cache
    consists of links within itself). The check is safe as long as the requester cannot write below the roots.
    ``AdapterForbidden`` if the path is malformed, or it or a file in it lies outside the roots; ``AdapterNotFound`` if
    there is no such directory below the roots.
    """
    shown = path if len(path) <= 256 else path[:253] + "..."
    if not path or len(path) > MAX_PATH_CHARS or not path.isprintable() or path != path.strip():
        raise AdapterForbidden(shown, f"its path must be printable text of 1 to {MAX_PATH_CHARS} characters")
    pure = PurePosixPath(path)
    if ".." in pure.parts or path.startswith("~"):
        raise AdapterForbidden(shown, "its path may not contain '..' or begin with '~'")
    real_roots = [os.path.realpath(root) for root in roots]
    candidates = [  # only by text: nothing outside the roots is ever looked up
        candidate
        for candidate, root, real in zip((root / pure for root in roots), roots, real_roots, strict=True)
        if candidate.is_relative_to(root) or candidate.is_relative_to(real)
    ]
    if not candidates:
        raise AdapterForbidden(shown, "its path lies outside the directories adapters may be loaded from")
    for candidate in candidates:
        resolved = Path(os.path.realpath(candidate))
        if not lies_in(str(resolved), real_roots):
            raise leads_outside(shown, "its path")
        if not os.path.isdir(resolved):
            continue
        for file in (CONFIG_FILE, *WEIGHT_FILES):
            if not lies_in(os.path.realpath(resolved / file), real_roots):
                raise leads_outside(shown, file)
        return resolved
    if pure.is_absolute():
        raise AdapterNotFound(shown, "there is no directory at its path")
    raise AdapterNotFound(shown, "it is in none of the directories adapters may be loaded from")


def is_url(path: str) -> bool:
    """Whether a path of an adapter is meant as a URL."""
    return path.startswith(_SCHEMES)


def is_moving(path: str) -> bool:
    """Whether a path is a URL of a hub without a commit: it names other files once its branch or tag has moved."""
    place = HubPlace.of(path.partition("#")[0]) if path.startswith("hf://") else None
    return place is not None and not place.is_commit


def pinned(path: str, source: str) -> str:
    """Return ``source`` if it is a URL of a hub, ``path``, in a commit; else ``path``."""
    (asked, _, digest), (found, _, same) = path.partition("#"), source.partition("#")
    place, there = HubPlace.of(asked), HubPlace.of(found)
    if place is None or there is None or not there.is_commit or digest != same:
        return path
    return source if (place.repo, place.path) == (there.repo, there.path) else path


def host_of(path: str) -> str | None:
    """Return the host and port, or the bucket, in the URL of an adapter; ``None`` for a path on disk."""
    if path.startswith("hf://"):
        return "hf"
    return path.split("/", 3)[2].lower() if is_url(path) else None


def check_registry(prefix: str) -> str:
    """Return the normal form of a value of ``--lora-registry``.

    ``ConfigError`` if it is no such URL; it has a checksum, or a revision: from that a commit could not be told.
    """
    normal = _normal(prefix)
    if normal is None or "#" in normal or (normal.startswith("hf://") and "@" in normal):
        raise ConfigError(
            f"Got the URL {prefix[:256]!r} for adapters, expected one such as https://host/adapters/, hf://org or "
            "s3://bucket/adapters, without a revision or a checksum"
        )
    return normal


def registry_of(url: str) -> str:
    """Return the least registry that has an adapter's URL, for a user who names the URL alone."""
    plain = url.partition("#")[0]
    return plain.partition("@")[0] if plain.startswith("hf://") else plain


def resolve_url(name: str, url: str, prefixes: Iterable[str]) -> str:
    """Return the normal form of a URL of a folder or file, without a slash at its end.

    It must lie below one of ``prefixes``, values of ``--lora-registry``; messages name the adapter ``name``.
    ``AdapterForbidden`` if the URL is malformed, or below none of them.
    """
    allowed = [check_registry(prefix) for prefix in prefixes]
    if not allowed:
        raise AdapterForbidden(name, NO_REGISTRY)
    normal = _normal(url)
    if normal is None:
        raise AdapterForbidden(
            name,
            "its URL may hold a host, a port, a path of letters, digits and _.~@+=:,- without '..', and a checksum "
            "#sha256=DIGEST alone",
        )
    below = normal.partition("#")[0]
    marks = ("/", "@") if below.startswith("hf://") else ("/",)  # a repository is one at all revisions
    if not any(below == prefix or below.startswith(tuple(prefix + mark for mark in marks)) for prefix in allowed):
        raise AdapterForbidden(name, "its URL lies in no registry that --lora-registry allows")
    return normal


def _normal(url: str) -> str | None:
    match = _URL.fullmatch(url) if len(url) <= MAX_URL_CHARS else None
    if match is None or any(part in (".", "..") for part in match["path"].split("/")):
        return None
    if match["store"] is not None:
        return f"{match['store']}{match['path']}{match['digest'] or ''}"
    port = "" if match["port"] in (None, _PORTS[match["scheme"]]) else f":{match['port']}"
    return f"{match['scheme']}://{match['host'].lower()}{port}{match['path']}{match['digest'] or ''}"


def open_folder(
    name: str, path: str | Path, roots: Collection[str] | None = None, registry: Registry | None = None
) -> Folder:
    """Return the folder at a path, or at a URL if there is a ``registry`` to ask.

    ``AdapterNotFound`` if there is no folder; ``AdapterForbidden`` if the path lies outside the roots, or no registry
    is allowed.
    """
    if isinstance(path, str) and is_url(path):
        if registry is None:
            raise AdapterForbidden(name, NO_REGISTRY)
        return RemoteFolder(name, path.rstrip("/"), registry)
    folder = Path(path)
    try:
        is_folder = folder.is_dir()
        is_allowed = roots is None or lies_in(os.path.realpath(folder), roots)
    except (OSError, ValueError) as error:
        raise AdapterNotFound(name, "its path cannot be looked up") from error
    if not is_allowed:
        raise leads_outside(name, "its path")
    if not is_folder:
        raise AdapterNotFound(name, "there is no directory at its path")
    return AdapterFolder(name, folder, roots)
