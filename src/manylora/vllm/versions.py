"""Versions of adapters: a folder that changed under a loaded name is another version.

vLLM knows an adapter by its name. If the files change, it goes on with the weights in its slot, and after a reload from
the same path it still finds prefix blocks of the old weights. Here the files are looked at when a request arrives (two
``stat`` calls), and a version has a slot, host memory and prefix blocks of its own. Its number is given here: vLLM's
are counted in each of its API processes, and stay the same when an adapter is replaced.
"""

from __future__ import annotations

import hashlib
import os
from collections import OrderedDict
from pathlib import Path
from typing import NamedTuple

from manylora.core.adapters.folder import CONFIG_FILE, AdapterFolder, read_config
from manylora.core.types import AdapterKey, AdapterVersion
from manylora.vllm.messages import AdapterRef

__all__ = ["KnownVersion", "Versions", "identify"]

MOST_KNOWN = 10_000
"""Folders that are remembered; beyond that the least recently used one is forgotten, with its history."""
MAX_BYTES = 1 << 50
"""Size of a weight file: it bounds no work in the process that asks."""


class KnownVersion(NamedTuple):
    """A version of an adapter: its name in vLLM's API, as workers know it, and for the core, with one page, a slot."""

    name: str
    ref: AdapterRef
    weights: AdapterVersion


def identify(name: str, path: str) -> tuple[str, int]:
    """Return the identity of an adapter's files, as hexadecimal digits, and the bytes of its weights.

    Both are empty for the name of a folder on a hub, which vLLM fetches once.

    Raises:
        AdapterError: A file is missing.
    """
    folder = AdapterFolder(name, Path(os.path.expanduser(path)))
    if not folder.path.is_dir() and not folder.path.is_absolute():
        return "", 0
    config = folder.identify(CONFIG_FILE, MAX_BYTES)
    weights = folder.identify(folder.find_weights(), MAX_BYTES)
    key = hashlib.blake2b(repr((config, weights)).encode(), digest_size=12).hexdigest()
    return key, os.stat(weights.place).st_size


class Versions:
    """Finds the version of a request's adapter."""

    def __init__(self) -> None:
        self.by_key: dict[AdapterKey, KnownVersion] = {}
        self._current: OrderedDict[tuple[str, str], KnownVersion] = OrderedDict()  # by name and path
        self._plain: dict[str, tuple[str, str]] = {}  # by name: path and files of the version without a suffix
        self._num_versions = 0

    def find(self, name: str, path: str) -> tuple[KnownVersion, list[KnownVersion]]:
        """Return the version of an adapter, and those that no request will name again.

        Raises:
            AdapterError: Its folder or a file in it is missing.
        """
        file_key, num_bytes = identify(name, path)
        known, gone = self._current.get((name, path)), []
        if known is None or known.ref.file_key != file_key:
            gone = [] if known is None else [known]
            known = self._current[name, path] = self._make(name, path, file_key, num_bytes)
        self._current.move_to_end((name, path))
        if len(self._current) > MOST_KNOWN:
            gone.append(self._current.popitem(last=False)[1])
        return known, gone

    def _make(self, name: str, path: str, file_key: str, num_bytes: int) -> KnownVersion:
        self._num_versions += 1
        is_plain = self._plain.setdefault(name, (path, file_key)) == (path, file_key)
        ref = AdapterRef(self._num_versions, name if is_plain else f"{name}@{file_key}", path, file_key)
        config = read_config(AdapterFolder(name, Path(os.path.expanduser(path)))) if file_key else {}
        weights = AdapterVersion(
            key=AdapterKey(f"{ref.number}:{ref.name}"),
            source=path,
            rank=config.get("r", 0),
            num_modules=0,
            target_modules=(),
            num_pages=1,
            weight_bytes=num_bytes,
            host_bytes=num_bytes,
            disk_bytes=num_bytes,
        )
        made = self.by_key[weights.key] = KnownVersion(name, ref, weights)
        return made
