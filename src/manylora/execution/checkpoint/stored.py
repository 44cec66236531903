"""What a checkpoint's folder says: the tensors of its mapped files, and its ``quantization_config``.

Both are checked where they are read; every error names the file and tensor, or the field, and what was expected.
"""

from __future__ import annotations

import textwrap
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from huggingface_hub import hf_hub_download
from safetensors import SafetensorError, safe_open
from torch import nn

from manylora.core.adapters.lora.targeting import Budget, Pattern, PatternError, is_plain
from manylora.core.errors import ConfigError
from manylora.execution.checkpoint.codes import Codes
from manylora.execution.checkpoint.files import CheckpointFiles

__all__ = ["FLOATS", "Method", "QuantisationConfig", "StoredTensors", "check_names", "one_line"]

FLOATS = ("F32", "F16", "BF16")  # types of scales, by safetensors' names; kernels take them as they are

MAX_REASON_CHARS = 200  # most characters of a library's own error in a message

MATCH_SECONDS = 10.0  # most processor time for the expressions of a ``quantization_config``, over all modules


class StoredTensors:
    """The tensors of a checkpoint's safetensors files, by name; each is a view of its mapped file, not a copy."""

    def __init__(self, files: CheckpointFiles, revision: str | None) -> None:
        self.files = files
        self.got = f"Got model = {files.model!r}"
        self.paths: list[Path] = []
        self._opened = {file: self._open(file, revision) for file in sorted(set(files.files.values()))}

    def __contains__(self, name: str) -> bool:
        return name in self.files.files

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the sizes of a tensor, by its file's header."""
        return tuple(self._opened[self.files.files[name]].get_slice(name).get_shape())

    def metadata(self) -> dict[str, str]:
        """Return the texts that the files' headers hold beside tensors."""
        return {key: text for file in self._opened.values() for key, text in (file.metadata() or {}).items()}

    def read(self, name: str, dtypes: Collection[str], shape: Sequence[int] | None = None) -> torch.Tensor:
        """Return a tensor of one of ``dtypes`` (safetensors' names) and of ``shape``, if it is given.

        ``ConfigError`` if the tensor is missing, or of another type or shape.
        """
        if name not in self:
            raise ConfigError(f"{self.got}: {self.files.source} lacks tensor {name!r}")
        if (dtype := self.files.dtypes[name]) not in dtypes:
            raise self.refuse(name, f"of type {dtype}, expected {_any_of(dtypes)}")
        if shape is not None and self.shape(name) != tuple(shape):
            raise self.refuse(name, f"of shape {list(self.shape(name))}, expected {list(shape)}")
        tensor: torch.Tensor = self._opened[self.files.files[name]].get_tensor(name)
        return tensor

    def refuse(self, name: str, reason: str) -> ConfigError:
        """Return the error for a tensor: ``reason`` goes on after its name."""
        return ConfigError(f"{self.got}: {self.files.place(name)} has tensor {name!r} {reason}")

    def close(self) -> None:
        """Drop the files; a tensor that was read keeps its own mapped."""
        for file in self._opened.values():
            file.__exit__(None, None, None)
        self._opened.clear()

    def _open(self, file: str, revision: str | None) -> Any:
        folder = Path(self.files.model)
        path = folder / file if folder.is_dir() else hf_hub_download(self.files.model, file, revision=revision)
        self.paths.append(Path(path))
        try:
            opened: Any = safe_open(path, framework="pt")
            return opened.__enter__()
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{self.got}: {file} cannot be read: {error}") from error


def check_names(
    skeleton: Any, files: CheckpointFiles, shapes: Mapping[str, tuple[int, ...]], unexpected: Iterable[str]
) -> None:
    """Refuse files that lack a tensor of the model, hold it in another shape or type, or hold further tensors.

    ``shapes`` has the sizes of each parameter and buffer that the files hold, by the model's name; ``unexpected``
    tensors are no part of the model. ``ConfigError`` if the files differ from the model; the error names the tensor.
    """
    own, tied = skeleton.state_dict(), skeleton.all_tied_weights_keys
    ties = {target for target, source in tied.items() if source in shapes}
    ties |= {source for target, source in tied.items() if target in shapes}
    found = SimpleNamespace(missing_keys=own.keys() - shapes.keys() - ties, unexpected_keys=set(unexpected))
    skeleton._adjust_missing_and_unexpected_keys(found)
    expected = {name: tuple(own[name].shape) for name in shapes}
    files.check_loaded(
        skeleton,
        {
            "mismatched_keys": [
                (name, shapes[name], expected[name]) for name in shapes if shapes[name] != expected[name]
            ],
            "missing_keys": found.missing_keys,
            "unexpected_keys": found.unexpected_keys,
        },
    )


class QuantisationConfig:
    """A checkpoint's ``quantization_config``, or the part at ``path``, whose fields are checked as they are read.

    ``budget`` covers the expressions of all parts.
    """

    def __init__(self, got: str, fields: Any, path: str = "quantization_config", budget: Budget | None = None) -> None:
        if not isinstance(fields, dict):
            raise ConfigError(f"{got}: {path} is {fields!r}, expected an object")
        self._got = got
        self._fields = fields
        self._path = path
        self._budget = budget or Budget(MATCH_SECONDS)
        self._patterns: dict[str, Pattern] = {}

    def __contains__(self, field: str) -> bool:
        return self._fields.get(field) is not None

    def get(self, field: str, default: Any = None, *, among: Collection[Any] = (), kind: type = object) -> Any:
        """Return a field of a type, ``among`` the values that it may have; the default where it is missing or null.

        ``ConfigError`` if the value is of another type, or not among the allowed values.
        """
        value = self._fields.get(field)
        if value is None:
            return default
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise self.refuse(field, f"a value of type {kind.__name__}")
        if among and value not in list(among):  # of a type that may have no hash
            raise self.refuse(field, _any_of(among))
        return value

    def sizes(self, field: str) -> tuple[int, int] | None:
        """Return two positive numbers; ``None`` if the field is missing or null."""
        value = self.get(field, kind=list)
        if value is None:
            return None
        if len(value) != 2 or not all(type(size) is int and size > 0 for size in value):
            raise self.refuse(field, "two positive numbers")
        return value[0], value[1]

    def names(self, *fields: str) -> list[str]:
        """Return the texts of the first of these fields that is there."""
        field = next((field for field in fields if field in self), fields[0])
        listed: list[str] = self.get(field, [], kind=list)
        if not all(isinstance(name, str) for name in listed):
            raise self.refuse(field, "a list of names")
        return listed

    def part(self, field: str) -> QuantisationConfig:
        """Return the fields of an object inside; of an empty one where it is missing."""
        return QuantisationConfig(self._got, self._fields.get(field) or {}, f"{self._path}.{field}", self._budget)

    def parts(self) -> list[QuantisationConfig]:
        """Return each field as an object."""
        return [self.part(field) for field in self._fields]

    def refuse(self, field: str, expected: str) -> ConfigError:
        """Return the error for a field."""
        shown = repr(self._fields.get(field))
        shown = shown if len(shown) <= 160 else shown[:157] + "..."
        return ConfigError(f"{self._got}: {self._path} has {field} = {shown}, expected {expected}")

    def matches(self, expression: str, text: str) -> bool:
        """Return whether an expression matches the beginning of a text, as ``re.match`` does, in bounded time."""
        try:
            if expression not in self._patterns:
                self._patterns[expression] = Pattern(f"(?:{expression})(?s:.*)", self._budget)
            return self._patterns[expression].fullmatch(text)
        except PatternError as error:
            raise ConfigError(f"{self._got}: {self._path} has an expression that cannot be used: {error}") from error

    def lists(self, listed: Iterable[str], module: str) -> bool:
        """Return whether a module is in a list of modules, by the rules of transformers.

        An entry is an expression that matches whole parts from the beginning of the name, or the name's end.

        Source: transformers, ``quantizers_utils.should_convert_module``.
        """
        return any(
            module.endswith(entry)
            or (
                module.startswith(f"{entry.rstrip('.')}.")
                if is_plain(entry)
                else self.matches(rf"(?:{entry})(?:(?<=\.)|(?=\.|$))", module)
            )
            for entry in listed
        )


class Method(ABC):
    """How a quantisation method stores the weight of a module, in tensors named after it."""

    marks: tuple[str, ...]  # names of tensors beside a module's, any of which shows that its weight is in codes
    parts: tuple[str, ...] = ("weight",)  # names of tensors that belong to such a weight as well
    unused: tuple[str, ...] = ()  # names of tensors that do not concern weights, such as scales of activations
    unlisted: tuple[str, ...] = ("modules_to_not_convert",)  # fields of the settings that list modules without codes
    format: str  # name and precision, for logs

    def __init__(self, settings: QuantisationConfig, stored: StoredTensors) -> None:
        self.settings = settings
        self._unlisted = settings.names(*self.unlisted)

    def announces(self, name: str, module: nn.Module) -> bool | None:
        """Return whether the configuration announces codes for a module; ``None`` if it may be either."""
        return isinstance(module, nn.Linear) and not self.settings.lists(self._unlisted, name)

    @abstractmethod
    def read(self, stored: StoredTensors, name: str, module: nn.Module, shape: tuple[int, int]) -> Codes:
        """Return the weight of a module, by its name in the files, of outputs and inputs ``shape``.

        ``ConfigError`` if a tensor is missing, or of another type or shape.
        """


def _any_of(values: Collection[Any]) -> str:
    shown = [value if isinstance(value, str) else repr(value) for value in values]
    return shown[0] if len(shown) == 1 else f"one of {', '.join(shown)}"


def one_line(error: Exception) -> str:
    """Return a library's message in one line, with its kind."""
    return textwrap.shorten(f"{type(error).__name__}: {error}", MAX_REASON_CHARS)
