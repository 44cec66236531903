"""Open a base checkpoint of any supported precision, and read its weights one at a time from mapped files.

::

    model -> configuration -> skeleton (a model without weights: names and shapes)
          -> files' headers -> which tensor, or which codes, are each parameter -> Checkpoint
    linear(name) -> a view of the file, or Codes, of one weight

The names are those of transformers' model class.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.core_model_loading import WeightConverter

from manylora.core.errors import ConfigError, ManyloraError
from manylora.execution.checkpoint.bitsandbytes import BitsAndBytes
from manylora.execution.checkpoint.codes import Codes
from manylora.execution.checkpoint.compressed import CompressedTensors
from manylora.execution.checkpoint.elements import Float8, TorchAo
from manylora.execution.checkpoint.files import CheckpointFiles, check_checkpoint, find_gguf, is_gguf
from manylora.execution.checkpoint.gguf import GgufFile, GgufWeights
from manylora.execution.checkpoint.grouped import Awq, Gptq
from manylora.execution.checkpoint.matched import StoredWeights
from manylora.execution.checkpoint.mxfp4 import mxfp4_converters
from manylora.execution.checkpoint.stored import Method, QuantisationConfig, StoredTensors, one_line

__all__ = ["Checkpoint", "open_checkpoint", "read_config"]

METHODS: Mapping[str, type[Method]] = {
    "awq": Awq,
    "bitsandbytes": BitsAndBytes,
    "compressed-tensors": CompressedTensors,
    "fbgemm_fp8": Float8,
    "fp8": Float8,
    "gptq": Gptq,
    "torchao": TorchAo,
}
"""Readers by ``quant_method``, of methods whose codes may be kept."""

CONVERTERS: Mapping[str, Callable[[], Sequence[WeightConverter]]] = {"mxfp4": mxfp4_converters}
"""Conversions to numbers by ``quant_method``, of methods whose codes are widened while they are read."""

_WORDS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float64"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """An open checkpoint, whose headers were checked against the model."""

    model: str  # folder, file or hub name
    format: str  # method and precision in a few words, for logs
    config: Any  # transformers' configuration, without its quantisation
    names: Collection[str]  # the model's parameters and buffers that the files hold
    is_quantised: bool  # whether some weights are codes
    skeleton: Any  # the model without weights
    weights: StoredWeights | GgufWeights  # where they are read from: views of the mapped files

    def linear(self, name: str) -> Codes | torch.Tensor:
        """Return a weight as it is stored: codes, or a view of the mapped file; numbers, if it is made of several.

        ``ConfigError`` if the files lack it, or hold it in tensors of another type or shape than announced, or one of
        its numbers would be infinite or none.
        """
        if name not in self.names:
            raise ConfigError(f"Got model = {self.model!r}: its files lack {name!r}")
        return self.weights.read(name)

    def drop(self) -> None:
        """Give back memory of the files that was read; views of them stay valid."""
        _drop_pages(self.weights.paths)


def open_checkpoint(
    model: str,
    revision: str | None = None,
    *,
    trust_remote_code: bool = False,
    build: Callable[[Any], Any] | None = None,
) -> Checkpoint:
    """Open a folder of safetensors files, a model at the hub, or a ``.gguf`` file (at the hub too); read headers alone.

    ``build`` makes the model of transformers, without weights, from its configuration; by default the one of its
    architecture. ``ConfigError`` if the checkpoint does not exist, is damaged, or is of a format or architecture that
    is not supported.
    """
    make = build or partial(_build, trust_remote_code=trust_remote_code)
    got = f"Got model = {model!r}"
    if is_gguf(model):
        return _open_gguf(model, revision, make)
    config, fields = read_config(model, revision, trust_remote_code=trust_remote_code)
    files = CheckpointFiles.read(model, revision, getattr(config, "transformers_weights", None))
    skeleton = _build_skeleton(got, config, len(files.files), make)
    stored = StoredTensors(files, revision)
    try:
        settings = QuantisationConfig(got, {} if fields is None else fields)
        name = "" if fields is None else _find_method(settings)
        method = METHODS[name](settings, stored) if name in METHODS else None
        converters = CONVERTERS[name]() if name in CONVERTERS else []
        weights = StoredWeights(stored, method, skeleton, converters)
    except BaseException:
        stored.close()
        raise
    dtypes = Counter(files.dtypes.values()).most_common()
    words = ", ".join(_WORDS.get(dtype, dtype) for dtype, _ in dtypes)
    return Checkpoint(
        model=model,
        format=name or words if method is None else method.format,
        config=config,
        names=weights.names,
        is_quantised=method is not None,
        skeleton=skeleton,
        weights=weights,
    )


def read_config(model: str, revision: str | None, *, trust_remote_code: bool = False) -> tuple[Any, Any]:
    """Return transformers' configuration of a folder, hub name or ``.gguf`` file, without its quantisation, and that.

    ``ConfigError`` if there is none, or it cannot be read.
    """
    if is_gguf(model):
        opened, config = _read_gguf(model, revision)
        opened.close()
        return config, None
    check_checkpoint(model, revision)
    got = f"Got model = {model!r}"
    config = _read_config(got, model, "config.json", revision=revision, trust_remote_code=trust_remote_code)
    return config, _take_quantisation(config)


def _read_gguf(model: str, revision: str | None) -> tuple[GgufFile, Any]:
    """Return a file and its configuration, which has all that transformers leaves out of it."""
    got, path = f"Got model = {model!r}", find_gguf(model, revision)
    opened = GgufFile.read(model, path)
    config = _read_config(got, str(path.parent), path.name, gguf_file=path.name)
    try:
        opened.settle(config)
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:  # so do wrong types of fields
        raise ConfigError(f"{got}: {path.name} has fields of wrong types or values: {one_line(error)}") from error
    return opened, config


def _open_gguf(model: str, revision: str | None, make: Callable[[Any], Any]) -> Checkpoint:
    opened, config = _read_gguf(model, revision)
    skeleton = _build_skeleton(f"Got model = {model!r}", config, len(opened.tensors), make)
    weights = GgufWeights(opened, skeleton)
    return Checkpoint(
        model=model,
        format=f"gguf {', '.join(opened.kinds())}",
        config=config,
        names=weights.names,
        is_quantised=True,
        skeleton=skeleton,
        weights=weights,
    )


def _read_config(got: str, model: str, file: str, **options: Any) -> Any:
    try:
        return AutoConfig.from_pretrained(model, **options)
    except Exception as error:  # broken configurations raise many kinds
        raise ConfigError(f"{got}: {file} cannot be read: {one_line(error)}") from error


def _take_quantisation(config: Any) -> Any:
    """Remove and return what a configuration says about quantisation; ``None`` if it says nothing."""
    found = None
    for part in (config, config.get_text_config()):
        for field in ("quantization_config", "compression_config"):
            if hasattr(part, field):
                found = found or getattr(part, field)
                delattr(part, field)
    return found


def _build(config: Any, **options: Any) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, **options)


def _build_skeleton(got: str, config: Any, num_tensors: int, make: Callable[[Any], Any]) -> Any:
    """Return the model without weights, from ``make``.

    ``ConfigError`` if transformers has no such model, or the files cannot hold as many layers as it would have.
    """
    layers = getattr(config.get_text_config(), "num_hidden_layers", 0)
    if not isinstance(layers, int) or layers > num_tensors:
        raise ConfigError(f"{got} of {layers!r} layers by its configuration, and its files hold {num_tensors} tensors")
    try:
        return make(config)
    except ManyloraError:
        raise
    except Exception as error:  # so do wrong numbers in them
        raise ConfigError(f"{got}, which cannot be built: {one_line(error)}") from error


def _find_method(settings: QuantisationConfig) -> str:
    default = "bitsandbytes" if "load_in_8bit" in settings or "load_in_4bit" in settings else None
    known = sorted({*METHODS, *CONVERTERS})
    name: str | None = settings.get("quant_method", default, among=known)
    if name is None:
        raise settings.refuse("quant_method", f"one of {', '.join(known)}")
    return name


def _drop_pages(paths: Iterable[Path]) -> None:
    """Drop the pages of private mappings of these files; do nothing where the system shows no mappings.

    Pages that were read stay in memory until the system is short of it, and count as the process's, for which a
    container may be ended. A page that is read again comes from the system's cache; one that was written to has the
    file's content afterwards: weights are only read.
    """
    wanted = {os.path.realpath(path) for path in paths}
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    for line in lines:
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[1] in ("r--p", "rw-p") and fields[5] in wanted:
            begin, end = (int(place, 16) for place in fields[0].split("-"))
            libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_DONTNEED)
