"""Open a base checkpoint of any supported precision, and read its weights one at a time from mapped files.

::

    model -> configuration -> skeleton (a model without weights: names and shapes)
          -> files' headers -> which tensor, or which codes, are each parameter -> Checkpoint
    linear(name) -> a view of the file, or Codes, of one weight

The names are those of transformers' model class. What transformers merges or splits while it loads (experts, mostly)
is not read here; ``is_plain`` says so.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.base import HfQuantizer

from manylora.core.errors import ConfigError, ManyloraError
from manylora.execution.checkpoint.bitsandbytes import BitsAndBytes
from manylora.execution.checkpoint.codes import Codes, find_problem
from manylora.execution.checkpoint.compressed import CompressedTensors
from manylora.execution.checkpoint.elements import Float8, TorchAo
from manylora.execution.checkpoint.files import CheckpointFiles, check_checkpoint, find_gguf, is_gguf
from manylora.execution.checkpoint.gguf import GgufFile, GgufWeights
from manylora.execution.checkpoint.grouped import Awq, Gptq
from manylora.execution.checkpoint.mapped import drop_pages
from manylora.execution.checkpoint.stored import FLOATS, Method, QuantisationConfig, StoredTensors, check_names

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
"""Readers by ``quant_method``."""

_WORDS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float64"}

MAX_REASON_CHARS = 200  # most characters of a library's own error in a message


class Weights(Protocol):
    """Where a checkpoint's weights are read from: views of the mapped files at ``paths``."""

    @property
    def paths(self) -> Sequence[Path]:
        """The files."""
        ...

    def read(self, name: str) -> Codes | torch.Tensor:
        """Return a parameter or buffer, by the model's name of it."""
        ...

    def place(self, name: str) -> str:
        """Return the name of the file that holds it."""
        ...

    def close(self) -> None:
        """Drop the files."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """An open checkpoint, whose headers were checked against the model."""

    model: str  # folder, file or hub name
    format: str  # method and precision in a few words, for logs
    config: Any  # transformers' configuration, without its quantisation
    names: Collection[str]  # the model's parameters and buffers that the files hold as they are, or as codes
    # Whether those are all; if not, transformers merges or splits tensors of this architecture while it loads them
    # (``transformers.conversion_mapping``), and ``from_pretrained`` must load the model.
    is_plain: bool
    is_quantised: bool  # whether some weights are codes
    skeleton: Any  # the model without weights
    weights: Weights  # the files

    def linear(self, name: str) -> Codes | torch.Tensor:
        """Return a weight as it is stored: codes, or a view of the mapped file.

        Raises:
            ConfigError: The files lack it, or hold it in tensors of another type or shape than announced, or one of
                its numbers would be infinite or none.
        """
        if name not in self.names:
            raise ConfigError(f"Got model = {self.model!r}: its files lack {name!r}")
        return self.weights.read(name)

    def place(self, name: str) -> str:
        """Return the name of the file that holds a weight."""
        return self.weights.place(name)

    def tensor(self, name: str) -> torch.Tensor:
        """Return a weight as numbers: as stored, or float32 if it is stored as codes. Raises as ``linear``."""
        weight = self.linear(name)
        return weight.dequantise() if isinstance(weight, Codes) else weight

    def drop(self) -> None:
        """Give back memory of the files that was read; views of them stay valid."""
        drop_pages(self.weights.paths)

    def close(self) -> None:
        """Drop the files; views of them that were returned stay valid."""
        self.weights.close()


def open_checkpoint(
    model: str,
    revision: str | None = None,
    *,
    trust_remote_code: bool = False,
    build: Callable[[Any], Any] | None = None,
) -> Checkpoint:
    """Open a folder of safetensors files, a model at the hub, or a ``.gguf`` file (at the hub too); read headers alone.

    ``build`` makes the model of transformers, without weights, from its configuration; by default the one of its
    architecture.

    Raises:
        ConfigError: The checkpoint does not exist, is damaged, or is of a format or architecture that is not supported.
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
        method = None if fields is None else _find_method(got, fields, stored)
        weights = _StoredWeights(stored, method, skeleton)
    except BaseException:
        stored.close()
        raise
    dtypes = Counter(files.dtypes.values()).most_common()
    return Checkpoint(
        model=model,
        format=", ".join(_WORDS.get(dtype, dtype) for dtype, _ in dtypes) if method is None else method.format,
        config=config,
        names=weights.names,
        is_plain=weights.is_plain,
        is_quantised=method is not None,
        skeleton=skeleton,
        weights=weights,
    )


def read_config(model: str, revision: str | None, *, trust_remote_code: bool = False) -> tuple[Any, Any]:
    """Return transformers' configuration of a folder or hub name, without its quantisation, and that.

    Raises:
        ConfigError: There is none, or it cannot be read.
    """
    check_checkpoint(model, revision)
    got = f"Got model = {model!r}"
    config = _read_config(got, model, "config.json", revision=revision, trust_remote_code=trust_remote_code)
    return config, _take_quantisation(config)


def _open_gguf(model: str, revision: str | None, make: Callable[[Any], Any]) -> Checkpoint:
    got, path = f"Got model = {model!r}", find_gguf(model, revision)
    opened = GgufFile.read(model, path)
    config = _read_config(got, str(path.parent), path.name, gguf_file=path.name)
    try:
        opened.settle(config)
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:  # so do wrong types of fields
        raise ConfigError(f"{got}: {path.name} has fields of wrong types or values: {_reason(error)}") from error
    skeleton = _build_skeleton(got, config, len(opened.tensors), make)
    weights = GgufWeights(opened, skeleton)
    return Checkpoint(
        model=model,
        format=f"gguf {', '.join(opened.kinds())}",
        config=config,
        names=weights.names,
        is_plain=True,
        is_quantised=True,
        skeleton=skeleton,
        weights=weights,
    )


def _read_config(got: str, model: str, file: str, **options: Any) -> Any:
    try:
        return AutoConfig.from_pretrained(model, **options)
    except Exception as error:  # broken configurations raise many kinds
        raise ConfigError(f"{got}: {file} cannot be read: {_reason(error)}") from error


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

    Raises:
        ConfigError: transformers has no such model, or the files cannot hold as many layers as it would have.
    """
    layers = getattr(config.get_text_config(), "num_hidden_layers", 0)
    if not isinstance(layers, int) or layers > num_tensors:
        raise ConfigError(f"{got} of {layers!r} layers by its configuration, and its files hold {num_tensors} tensors")
    try:
        return make(config)
    except ManyloraError:
        raise
    except Exception as error:  # so do wrong numbers in them
        raise ConfigError(f"{got}, which cannot be built: {_reason(error)}") from error


def _find_method(got: str, fields: Any, stored: StoredTensors) -> Method:
    settings = QuantisationConfig(got, fields)
    default = "bitsandbytes" if "load_in_8bit" in settings or "load_in_4bit" in settings else None
    name = settings.get("quant_method", default, among=METHODS)
    if name is None:
        raise settings.refuse("quant_method", f"one of {', '.join(METHODS)}")
    return METHODS[name](settings, stored)


class _StoredWeights:
    """Weights in safetensors files, which were matched with the model.

    Attributes:
        names: The model's parameters and buffers that the files hold, in its order.
        plain: The tensor that is a parameter or buffer, by the model's name.
        coded: The module in the files whose tensors are the codes of a parameter, by the model's name.
        transposed: The parameters that the files hold as ``[in, out]`` (GPT-2), which the model has as linears.
        is_plain: Whether transformers converts no tensor while it loads them.
    """

    def __init__(self, stored: StoredTensors, method: Method | None, skeleton: Any) -> None:
        self.plain: dict[str, str] = {}
        self.coded: dict[str, str] = {}
        self.is_plain = True
        self.paths = stored.paths
        self._stored = stored
        self._method = method
        self._skeleton = skeleton
        self.transposed = {f"{name}.weight" for name, one in skeleton.named_modules() if isinstance(one, Conv1D)}
        own = skeleton.state_dict()
        unexpected = self._match(own)
        self.names = {name: None for name in own if name in self.plain or name in self.coded}.keys()
        if self.is_plain:
            numbers = {*self.plain.values(), *unexpected}
            dtypes = {tensor: dtype for tensor, dtype in stored.files.dtypes.items() if tensor in numbers}
            shapes = {name: stored.shape(tensor) for name, tensor in self.plain.items()}
            shapes |= {name: tuple(skeleton.get_parameter(name).shape) for name in self.coded}
            check_names(skeleton, replace(stored.files, dtypes=dtypes), shapes, unexpected)
        if method is not None:
            self._check_announced(method)

    def read(self, name: str) -> Codes | torch.Tensor:
        """Return a parameter or buffer, by the model's name of it."""
        if (coded := self.coded.get(name)) is None:
            tensor = self.plain[name]
            weight = self._stored.read(tensor, (self._stored.files.dtypes[tensor],))
            return weight.t() if name in self.transposed else weight
        module = self._skeleton.get_submodule(name.removesuffix(".weight"))
        num_out, num_in = self._skeleton.get_parameter(name).shape
        assert self._method is not None
        codes = self._method.read(self._stored, coded, module, (num_out, num_in))
        if (problem := find_problem(codes)) is not None:
            raise self._stored.refuse(self._mark(self._method, coded), f"of a weight with {problem}")
        return codes

    def place(self, name: str) -> str:
        """Return the name of the file that holds it."""
        return self._stored.files.place(self.plain.get(name, name))

    def close(self) -> None:
        """Drop the files."""
        self._stored.close()

    def _match(self, own: Mapping[str, Any]) -> list[str]:
        """Match tensors, under the names that transformers gives them while it loads; return those without a match."""
        transforms = get_model_conversion_mapping(self._skeleton)
        renamings = [entry for entry in transforms if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in transforms if isinstance(entry, WeightConverter)]
        prefix = self._skeleton.base_model_prefix

        def rename(tensor: str) -> tuple[str, bool]:
            name, pattern = rename_source_key(tensor, renamings, converters, prefix, own)
            if name not in own and tensor in own:
                name, pattern = rename_source_key(tensor, [], [], prefix, own)
            return name, pattern is not None

        method = self._method
        marks, parts, unused = ((), (), ()) if method is None else (method.marks, method.parts, method.unused)
        others = tuple(f".{leaf}" for leaf in unused)
        modules = {_owner(tensor, leaf) for tensor in self._stored.files.files for leaf in marks} - {None}
        unexpected: list[str] = []
        for tensor in sorted(self._stored.files.files, key=dot_natural_key):
            module = next((owner for leaf in (*marks, *parts) if (owner := _owner(tensor, leaf)) in modules), None)
            if module is None and tensor.endswith(others):
                continue
            name, is_converted = rename(tensor if module is None else f"{module}.weight")
            found, place = (self.plain, tensor) if module is None else (self.coded, module)
            if is_converted:
                self.is_plain = False
            elif name not in own:
                if _owner(tensor, "bias") not in modules or self._stored.read(tensor, FLOATS).any():
                    unexpected.append(tensor)  # AutoGPTQ stored biases of zeros where a model has none
            elif found.setdefault(name, place) != place or (name in self.plain and name in self.coded):
                raise self._stored.refuse(tensor, f"for {name!r}, which another tensor is as well")
        return unexpected

    def _check_announced(self, method: Method) -> None:
        """Refuse codes that the configuration does not announce, and numbers where it announces codes.

        The output layer, and others that quantisers leave out by default, may be either unless the configuration
        lists them.
        """
        loose = HfQuantizer.get_modules_to_not_convert(self._skeleton, None, self._skeleton._keep_in_fp32_modules)
        for path, module in self._skeleton.named_modules():
            name = f"{path}.weight"
            if (coded := self.coded.get(name)) is not None:
                if method.announces(coded, module) is False or module.weight.ndim != 2:
                    reason = "of codes, where quantization_config announces numbers"
                    raise self._stored.refuse(self._mark(method, coded), reason)
            elif (
                (tensor := self.plain.get(name)) is not None
                and path not in loose
                and method.announces(tensor.removesuffix(".weight"), module)
            ):
                marks = " or ".join(method.marks)
                raise self._stored.refuse(tensor, f"without {marks}, which quantization_config announces")

    def _mark(self, method: Method, module: str) -> str:
        """Return a tensor that shows that a module's weight is in codes."""
        return next(tensor for leaf in method.marks if (tensor := f"{module}.{leaf}") in self._stored)


def _owner(tensor: str, leaf: str) -> str | None:
    """Return the module that a tensor of such a name is of, ``None`` if it has another name."""
    return tensor.removesuffix(f".{leaf}") if tensor.endswith(f".{leaf}") else None


def _reason(error: Exception) -> str:
    """Return a library's message in one line, with its kind."""
    return textwrap.shorten(f"{type(error).__name__}: {error}", MAX_REASON_CHARS)
