"""Adapters of registries as folders on disk, for programs that read them from there.

A folder's name is the identity of its files in the registry: it is complete or not there, and is never written again.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from manylora.core.adapters.folder import CONFIG_FILE, MAX_CONFIG_BYTES, WEIGHT_FILES
from manylora.core.adapters.remote import RemoteHead
from manylora.core.adapters.sources import is_moving
from manylora.core.errors import AdapterNotFound
from manylora.execution.storage.http_registry import HttpRegistry

__all__ = ["copy_adapter"]

MAX_BYTES = {CONFIG_FILE: MAX_CONFIG_BYTES, WEIGHT_FILES[0]: 16 << 30}


def copy_adapter(name: str, registries: Sequence[str], parent: Path) -> Path | None:
    """Return a folder below ``parent`` with the files of an adapter, from the first registry that has it, if any does.

    ``AdapterUnavailable`` if a registry does not answer; ``AdapterError`` if a file is refused.
    """
    with closing(HttpRegistry(registries)) as http:
        for registry in registries:
            place = f"{registry}/{name}"
            try:
                place = http.pin(name, place) if is_moving(place) else place
                heads = {file: http.open(name, f"{place}/{file}", most) for file, most in MAX_BYTES.items()}
            except AdapterNotFound:
                continue
            return _folder(http, name, place, heads, parent)
    return None


def _folder(http: HttpRegistry, name: str, place: str, heads: dict[str, RemoteHead], parent: Path) -> Path:
    identity = repr([(f"{place}/{file}", head.size, head.etag, head.modified) for file, head in heads.items()])
    target = parent / hashlib.blake2b(identity.encode(), digest_size=16).hexdigest()
    if target.is_dir():
        return target
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=parent, prefix=".") as made:
        (whole := Path(made) / "whole").mkdir()
        for file, head in heads.items():
            with (whole / file).open("wb") as copy:
                copy.writelines(http.parts(name, f"{place}/{file}", head, 0, head.size))
        try:
            whole.replace(target)
        except OSError:
            if not target.is_dir():  # else another process was first
                raise
    return target
