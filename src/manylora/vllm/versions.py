"""Versions of adapters: a folder that changed under a loaded name is another version.

vLLM goes on with the weights in a slot, and after a reload from the same path it still finds prefix blocks of the old
weights. Here the files are looked at when a request arrives, and a version has a slot, host memory and prefix blocks of
its own, and a number of its own: vLLM's stay the same when an adapter is replaced.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from manylora.core.adapters.folder import AdapterFolder, read_config
from manylora.core.adapters.read import ReadRules
from manylora.core.adapters.shape import BaseShape, PageShape
from manylora.core.types import AdapterKey, AdapterVersion

__all__ = ["SLOTS", "UNLIMITED", "AdapterRef", "file_key", "make_version"]

UNLIMITED = 1 << 62
"""Where vLLM has the limit, or none."""
MAX_RANK = 1 << 16
SLOTS = BaseShape(
    name="vllm",
    architecture="",
    fingerprint="",
    vocab_size=1,  # a request's tokens do not matter, their number does
    hidden_size=0,
    num_layers=1,
    max_model_len=UNLIMITED,
    page=PageShape(block_size=16, num_layers=1, num_kv_heads=1, head_dim=1, element_bytes=4, dtype="float32"),
    modules=(),
    all_linear=(),
    eos_token_ids=(),
)
"""The base model: its size and its tokens are vLLM's affair."""


class AdapterRef(NamedTuple):
    """A version of an adapter, as vLLM's workers know it.

    Args:
        number: Its ``lora_int_id`` in the engine, given by the gate.
        name: Its ``lora_name`` in the engine, of which the hashes of prefix blocks are made: the adapter's name, and
            with a suffix for a version that replaces another.
        path: Its ``lora_path``.
        file_key: Identity of the files; empty where vLLM fetches them from a hub, once.
    """

    number: int
    name: str
    path: str = ""
    file_key: str = ""

    @classmethod
    def of(cls, key: AdapterKey, path: str = "", file_key: str = "") -> AdapterRef:
        """Return the version of a key that ``make_version`` made."""
        number, _, name = key.partition(":")
        return cls(int(number), name, path, file_key)


def file_key(name: str, path: str) -> str:
    """Return the identity of an adapter's files; raises ``AdapterError`` if one is missing."""
    folder = AdapterFolder(name, Path(os.path.expanduser(path)))
    if not folder.path.is_dir() and not folder.path.is_absolute():
        return ""
    return ReadRules(base=SLOTS, max_bytes=UNLIMITED).file_key_of(folder)[0]


def make_version(ref: AdapterRef) -> AdapterVersion:
    """Return a version for the core, with one page, a slot."""
    folder, num_bytes, rank = AdapterFolder(ref.name, Path(os.path.expanduser(ref.path))), 0, 0
    if ref.file_key:
        num_bytes, rank = os.stat(folder.path / folder.find_weights()).st_size, read_config(folder).get("r", 0)
    is_rank = isinstance(rank, int) and 0 <= rank <= MAX_RANK  # vLLM has not looked at files that changed
    return AdapterVersion(
        key=AdapterKey(f"{ref.number}:{ref.name}"),
        source=ref.path,
        rank=rank if is_rank else 0,
        num_modules=0,
        target_modules=(),
        num_pages=1,
        weight_bytes=num_bytes,
        host_bytes=num_bytes,
        disk_bytes=num_bytes,
        file_key=ref.file_key,
    )
