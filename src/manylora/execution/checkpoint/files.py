"""A base model's checkpoint: where it is, which tensors its weight files hold, and whether those are the model's.

A local folder, the cache of Hugging Face's library and its hub are searched. Without a network, that library retries
for half a minute, and its error names no folder. So ``check_checkpoint`` runs before a model is loaded: it asks the hub
once, with a timeout of seconds.

Transformers fills a parameter that no file holds with random numbers, and says so in a warning. Here every difference
between model and files is an error. Headers are read before the weights; names and shapes are compared in the terms of
transformers, which renames and merges tensors of some architectures while it loads them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from huggingface_hub import constants, get_hf_file_metadata, hf_hub_download, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    RepositoryNotFoundError,
)

from manylora.core.adapters.weight_file import parse_header
from manylora.core.errors import AdapterError, ConfigError

if TYPE_CHECKING:
    from torch import nn

__all__ = ["HUB_TIMEOUT_S", "CheckpointFiles", "check_checkpoint", "find_gguf", "is_gguf"]

HUB_TIMEOUT_S = 2.0  # timeout of the connection to the hub, and of its answer

_SMALL_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json")
"""If one of these is in the library's cache, the model or its tokenizer was fetched before."""

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"

MAX_HEADER_BYTES = 100_000_000  # largest header, as in the safetensors library

NUMBERS = ("F64", "F32", "F16", "BF16")
"""Types of a base's weights that are numbers by themselves, by safetensors' names; smaller ones have scales."""

_OBSOLETE = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$")
"""Buffers that old checkpoints of many architectures hold; transformers computes them."""


def is_gguf(name: str) -> bool:
    """Whether a model's name is that of a ``.gguf`` file, which holds weights, configuration and tokenizer."""
    return name.endswith(".gguf")


def find_gguf(name: str, revision: str | None = None) -> Path:
    """Return the path of a ``.gguf`` file, which may be at the hub (``owner/name/file.gguf``).

    ``ConfigError`` if there is none.
    """
    path = Path(name)
    owner, model, file = (*name.split("/", 2), "", "")[:3]
    if file and not path.is_file() and not name.startswith(("/", ".", "~")):
        check_checkpoint(f"{owner}/{model}", revision)
        try:
            path = Path(hf_hub_download(f"{owner}/{model}", file, revision=revision))
        except Exception as error:  # of the hub's library, or of its HTTP client
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise ConfigError(f"Got model = {name!r}: {file} cannot be fetched: {reason}") from error
    if not path.is_file():
        raise ConfigError(f"Got model = {name!r}, and there is no such file")
    return path


def check_checkpoint(name: str, revision: str | None = None) -> None:
    """Check that a model or a tokenizer of that name exists, without fetching it.

    A model that the hub has but does not deliver (gated, or a server error) passes; the loader reports it.

    ``name`` is a path of a folder or of a ``.gguf`` file, or a name at the hub. ``ConfigError`` if the model or
    tokenizer does not exist; the message names the places that were searched.
    """
    if is_gguf(name):
        find_gguf(name, revision)
        return
    if Path(name).is_dir():
        return
    if name.startswith(("/", ".", "~")) or name.count("/") > 1:
        raise ConfigError(f"Got {name!r}, and there is no such folder")
    try:
        if any(isinstance(try_to_load_from_cache(name, file, revision=revision), str) for file in _SMALL_FILES):
            return
        url = hf_hub_url(name, _SMALL_FILES[0], revision=revision)
    except HFValidationError:
        raise ConfigError(f"Got {name!r}: there is no such folder here, and no model can have that name") from None
    reason = _ask_hub(url)
    if reason is not None:
        raise ConfigError(f"Got {name!r}: there is no such folder here, and {reason}. Give a folder by its path")


def _ask_hub(url: str) -> str | None:
    """Return the reason why the hub cannot deliver the file; ``None`` if it may."""
    if constants.is_offline_mode():
        return "it is not in the cache of the Hugging Face hub, which may not be asked (HF_HUB_OFFLINE is set)"
    try:
        get_hf_file_metadata(url, timeout=HUB_TIMEOUT_S)
    except GatedRepoError:  # a subclass of RepositoryNotFoundError
        return None
    except RepositoryNotFoundError:
        return f"{constants.ENDPOINT} has no such model, or none that may be seen without a token (HF_TOKEN)"
    except HfHubHTTPError:
        return None
    except Exception as error:  # of the HTTP client, which differs between versions of the library
        return f"{constants.ENDPOINT} cannot be reached ({str(error) or type(error).__name__})"
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFiles:
    """The tensors of a checkpoint's files, by their headers."""

    model: str  # folder or hub name, for messages
    source: str  # name of the weight file, or of the index of several
    files: Mapping[str, str]  # name of the file that holds a tensor, by the tensor's name
    dtypes: Mapping[str, str]  # safetensors' name of a tensor's type, by the tensor's name

    @classmethod
    def read(cls, model: str, revision: str | None, named: str | None = None) -> CheckpointFiles:
        """Read the headers of all weight files, or of the file ``named``; of a model at the hub, fetch the files first.

        ``ConfigError`` if a file is missing, cannot be read or is damaged, or the index does not match the files.
        """
        got = f"Got model = {model!r}"
        if _find(model, revision, "adapter_config.json") is not None:
            raise ConfigError(f"{got}, which holds adapter_config.json: it is an adapter, expected a base model")
        for source in (SINGLE, INDEX) if named is None else (named,):
            if (path := _find(model, revision, source)) is not None:
                break
        else:
            raise ConfigError(f"{got}, which lacks weights in safetensors: {_describe_others(model)}")
        if not source.endswith(".json"):
            tensors = _read_header(got, source, path)
            return cls(model=model, source=source, files=dict.fromkeys(tensors, source), dtypes=dict(_dtypes(tensors)))
        listed = _read_index(got, source, path)
        files: dict[str, str] = {}
        dtypes: dict[str, str] = {}
        for file in sorted(set(listed.values())):
            if (path := _find(model, revision, file)) is None:
                tensor = next(tensor for tensor, place in listed.items() if place == file)
                raise ConfigError(f"{got}: {file} is missing, which {source} names for tensor {tensor!r}")
            tensors = _read_header(got, file, path)
            for tensor in tensors:
                if tensor in files:
                    raise ConfigError(f"{got}: tensor {tensor!r} is in {files[tensor]} and in {file}")
                files[tensor] = file
            dtypes.update(_dtypes(tensors))
        for tensor, file in listed.items():
            if files.get(tensor) != file:
                raise ConfigError(f"{got}: {file} lacks tensor {tensor!r}, which {source} places there")
        return cls(model=model, source=source, files=files, dtypes=dtypes)

    def place(self, tensor: str) -> str:
        """Return the file of a tensor; of a tensor that transformers renamed or merged, the index or the only file."""
        return self.files.get(tensor, self.source)

    def check_loaded(self, model: nn.Module, differences: Mapping[str, Collection[Any]]) -> None:
        """Refuse a model that differs from the files, as transformers found (``output_loading_info``).

        Tied weights, non-persistent buffers, and the names that the architecture's own class ignores may differ.
        ``ConfigError`` if a tensor is missing, left over, or has another shape or type than the model's.
        """
        got = f"Got model = {self.model!r}"
        for name, stored, expected in sorted(differences["mismatched_keys"]):
            raise ConfigError(
                f"{got}: {self.place(name)} has tensor {name!r} of shape {list(stored)}, "
                f"expected {list(expected)} by config.json"
            )
        if missing := sorted(differences["missing_keys"]):
            raise ConfigError(f"{got}: {self.source} lacks tensor {_first(missing)}")
        if unexpected := sorted(differences["unexpected_keys"]):
            raise ConfigError(
                f"{got}: {self.place(unexpected[0])} has tensor {_first(unexpected)}, which no part of "
                f"{type(model).__name__} takes by config.json"
            )
        own = model.state_dict()
        ignored = (*(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()), *_OBSOLETE)
        for name, dtype in self.dtypes.items():
            is_number = name not in own or own[name].is_floating_point()
            if is_number and dtype not in NUMBERS and not any(re.search(pattern, name) for pattern in ignored):
                raise ConfigError(
                    f"{got}: {self.place(name)} has tensor {name!r} of type {dtype}, "
                    f"expected one of {', '.join(NUMBERS)}"
                )


def _find(model: str, revision: str | None, file: str) -> Path | None:
    """Return the path of a checkpoint's file, ``None`` if there is none."""
    if Path(model).is_dir():
        path = Path(model) / file
        return path if path.exists() or path.is_symlink() else None
    try:
        return Path(hf_hub_download(model, file, revision=revision))
    except EntryNotFoundError:
        return None


def _describe_others(model: str) -> str:
    others = sorted(path.name for path in Path(model).glob("*") if path.suffix in (".bin", ".pt", ".pth", ".gguf"))
    if not others:
        return f"there is no {SINGLE} and no {INDEX}"
    return f"{others[0]} is of another format. Convert it with save_pretrained"


def _read_index(got: str, source: str, path: Path) -> dict[str, str]:
    """Return the file of each tensor by an index; refuse names of files outside the folder."""
    try:
        index = json.loads(path.read_bytes())
        listed = index["weight_map"]
        is_valid = isinstance(index["metadata"], dict) and bool(listed)
        is_valid = is_valid and all(isinstance(file, str) for file in listed.values())
    except OSError as error:
        raise ConfigError(f"{got}: {source} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        is_valid = False
    if not is_valid:
        raise ConfigError(f"{got}: {source} is damaged, expected an object with metadata and weight_map")
    for tensor, file in listed.items():
        place = PurePosixPath(file)
        if place.is_absolute() or ".." in place.parts or "\\" in file or "\0" in file or place.suffix != ".safetensors":
            raise ConfigError(
                f"{got}: {source} places tensor {tensor!r} in {file!r}, expected a .safetensors file of that folder"
            )
    return dict(listed)


def _read_header(got: str, file: str, path: Path) -> Mapping[str, Any]:
    """Return the tensors of a weight file by its header."""
    try:
        with path.open("rb") as opened:
            num_bytes = opened.seek(0, 2)
            opened.seek(0)
            length = int.from_bytes(opened.read(8), "little")
            most = min(MAX_HEADER_BYTES, num_bytes - 8)
            if length > most or num_bytes < 8:
                raise ConfigError(
                    f"{got}: {file} is damaged or is no safetensors file: "
                    f"a header of {length} bytes in a file of {num_bytes}, expected at most {max(0, most)}"
                )
            return parse_header(got, opened.read(length), num_bytes, file=file)
    except OSError as error:
        raise ConfigError(f"{got}: {file} cannot be read: {error.strerror}") from error
    except AdapterError as error:
        raise ConfigError(f"{got}: {error.reason}") from error


def _dtypes(tensors: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    return ((name, tensor.dtype) for name, tensor in tensors.items())


def _first(names: list[str]) -> str:
    return repr(names[0]) if len(names) == 1 else f"{names[0]!r} and {len(names) - 1} more"
