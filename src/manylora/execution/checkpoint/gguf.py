"""GGUF files: a header of metadata and tensors, and weights in blocks of codes beside their scales.

The configuration, the names of tensors and the changes that llama.cpp made to their values are those of transformers
(``modeling_gguf_pytorch_utils``): rows that it reordered are put back as rows of codes.

::

    block   weights   bytes                                     read as
    Q8_0    32        d, 32 x int8                              int8, group 32
    Q4_0    32        d, 16 x 2 codes                           int4, group 32
    Q4_K    256       d, m, 8 scales and minima, codes          int4, group 32, shifts
    Q5_K    256       the same with high bits before codes      int8, group 32, shifts
    Q6_K    256       low bits, high bits, 16 scales, d         int8, group 16

Source: ggml (``ggml-common.h``, ``dequantize_row_*``); the specification of GGUF; llama.cpp (``load_arch_hparams``).
"""

from __future__ import annotations

import mmap
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from manylora.core.errors import ConfigError
from manylora.execution.checkpoint.codes import Codes, find_problem
from manylora.execution.checkpoint.files import CheckpointFiles
from manylora.execution.checkpoint.gguf_header import GgufHeader, GgufTensor
from manylora.execution.checkpoint.stored import check_names

__all__ = ["GgufFile", "GgufWeights"]

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "starcoder2", "stablelm", "nemotron")
"""Architectures of which llama.cpp renames tensors, moves whole rows or changes vectors; Mistral's files say llama."""

_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

_FIELDS = {
    "context_length": ("max_position_embeddings",),
    "embedding_length": ("hidden_size",),
    "block_count": ("num_hidden_layers",),
    "feed_forward_length": ("intermediate_size",),
    "vocab_size": ("vocab_size",),
    "attention.head_count": ("num_attention_heads",),
    "attention.head_count_kv": ("num_key_value_heads",),
    "attention.key_length": ("head_dim",),
    "attention.value_length": ("head_dim",),
    "attention.sliding_window": ("sliding_window",),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", "norm_eps"),
    "attention.layer_norm_epsilon": ("layer_norm_eps", "norm_epsilon", "norm_eps"),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "use_parallel_residual": ("use_parallel_residual",),
}
"""Names that a configuration may have for a field of the header; transformers leaves some at their defaults."""

_ROPE_FIELDS = {
    "rope.freq_base": "rope_theta",
    "rope.scaling.type": "rope_type",
    "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.yarn_attn_factor": "attention_factor",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}
"""Parameters of the rotary embedding, by the field of the header."""

_LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LLAMA3_LENGTH = 8192
_DIVISORS = "rope_freqs.weight"

_LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}
"""Layers of the models that divide scores by the root of the hidden size per head, where others of their architecture
take the size of a head. No field tells it; llama.cpp knows them so."""


class GgufFile:
    """A mapped file, whose header is sound: its fields, numbers and texts, are ``None`` for lists."""

    def __init__(self, model: str, path: Path, fields: Mapping[str, Any], tensors: Mapping[str, GgufTensor]) -> None:
        self.model = model
        self.path = path
        self.architecture: str = fields["general.architecture"]
        self.tensors = tensors
        self._fields = fields
        storage = torch.UntypedStorage.from_file(str(path), shared=False, nbytes=path.stat().st_size)
        self._octets: torch.Tensor | None = torch.empty(0, dtype=torch.uint8).set_(storage)  # type: ignore[arg-type]

    @classmethod
    def read(cls, model: str, path: Path) -> GgufFile:
        """Read a header.

        ``ConfigError`` if the file is damaged, or of an architecture or a kind of blocks that is not supported.
        """
        got = f"Got model = {model!r}"
        try:
            import gguf  # an extra
        except ImportError:
            raise ConfigError(f"{got}: reading it needs the gguf library: pip install manylora[gguf]") from None
        try:
            with path.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
                fields, tensors = GgufHeader(f"{got}: {path.name}", content, gguf).walk()
        except (OSError, ValueError) as error:  # an empty file cannot be mapped
            raise ConfigError(f"{got}: {path.name} cannot be read: {error}") from error
        file = cls(model, path, fields, tensors)
        if file.architecture not in ARCHITECTURES:
            known = ", ".join(ARCHITECTURES)
            raise ConfigError(f"{got}: {path.name} is of architecture {file.architecture!r}, expected one of {known}")
        for name, tensor in tensors.items():
            known_kinds = _FLOATS if len(tensor.shape) == 1 else {**_FLOATS, **_BLOCKS}
            if tensor.kind not in known_kinds:
                raise file.refuse(name, f"of type {tensor.kind}, expected one of {', '.join(known_kinds)}")
        return file

    def kinds(self) -> list[str]:
        """Return the kinds of blocks, those of most tensors first; F32 is left out where there are others."""
        counts = Counter(tensor.kind for tensor in self.tensors.values())
        return [kind for kind, _ in counts.most_common() if kind != "F32"] or ["F32"]

    def rows(self, name: str) -> torch.Tensor:
        """Return a tensor's bytes, ``[rows, row_bytes]``, a view of the file."""
        tensor = self.tensors[name]
        assert self._octets is not None
        return self._octets[tensor.begin : tensor.end].view(-1, tensor.row_bytes)

    def refuse(self, name: str, reason: str) -> ConfigError:
        """Return the error for a tensor: ``reason`` goes on after its name."""
        return ConfigError(f"Got model = {self.model!r}: {self.path.name} has tensor {name!r} {reason}")

    def close(self) -> None:
        """Drop the file; a tensor that was read keeps its own mapped."""
        self._octets = None

    def settle(self, config: Any) -> None:
        """Set what transformers leaves out when it makes a configuration of a header.

        ``ConfigError`` if a field asks for what the model of transformers cannot do.
        """
        rope = config.rope_parameters.get("full_attention", config.rope_parameters)
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        prefix = f"{self.architecture}."
        given = {field.removeprefix(prefix): value for field, value in self._fields.items() if field.startswith(prefix)}
        head_dim = given.get("attention.key_length", head_dim)
        has_scaling = given.get("rope.scaling.type", "none") != "none"
        rotated = int(head_dim * rope.get("partial_rotary_factor", 1.0))
        known = {
            "rope.scaling.finetuned": None,
            "rope.dimension_count": rotated,
            "expert_count": 0,
            "expert_used_count": 0,
        }
        for field, value in given.items():
            names = [name for name in _FIELDS.get(field, ()) if hasattr(config, name) or name == "head_dim"]
            if names and value is not None:
                setattr(config, names[0], value)
            elif field == "rope.freq_base_swa" and rope is not config.rope_parameters:
                config.rope_parameters["sliding_attention"]["rope_theta"] = value
            elif field.startswith("rope.scaling.") and not has_scaling:
                continue
            elif field in _ROPE_FIELDS and (field != "rope.scaling.type" or value in ("linear", "yarn")):
                rope[_ROPE_FIELDS[field]] = value
            elif field not in known or known[field] not in (None, value):
                reason = f"has {prefix}{field} = {'a list' if value is None else repr(value)}, which is not supported"
                raise ConfigError(f"Got model = {self.model!r}: {self.path.name} {reason}")
        if config.model_type == "mistral" and "attention.sliding_window" not in given:
            config.sliding_window = None  # as llama.cpp runs it
        if (layers := _LAYERS_OF_27B.get(self.architecture)) is not None:
            is_27b = config.num_hidden_layers == layers
            config.query_pre_attn_scalar = config.hidden_size // config.num_attention_heads if is_27b else head_dim
        if _DIVISORS in self.tensors:
            self._settle_llama3(config, head_dim)

    def _settle_llama3(self, config: Any, head_dim: int) -> None:
        """Set the parameters that Llama 3 scales frequencies with, if the stored divisors are those."""
        tensor = self.tensors[_DIVISORS]
        if tensor.kind != "F32" or tensor.shape != (head_dim // 2,):
            raise self.refuse(
                _DIVISORS, f"of type {tensor.kind} and shape {list(tensor.shape)}, expected F32 [{head_dim // 2}]"
            )
        divisors, theta = self.rows(_DIVISORS).view(torch.float32).flatten(), config.rope_parameters["rope_theta"]
        config.rope_parameters = {
            **_LLAMA3,
            "rope_theta": theta,
            "factor": float(divisors.max()),
            "original_max_position_embeddings": _LLAMA3_LENGTH,
        }
        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
        plain = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
        if not torch.allclose(plain / divisors, scaled, rtol=1e-4, atol=0.0):
            raise self.refuse(_DIVISORS, "of frequencies that are not scaled as Llama 3's, which is not supported")


class GgufWeights:
    """The weights of a file, by the names of transformers' model."""

    def __init__(self, file: GgufFile, skeleton: Any) -> None:
        self.paths = [file.path]
        self._file = file
        config = skeleton.config.get_text_config()
        self._processor = TENSOR_PROCESSORS.get(file.architecture, TensorProcessor)(config=config.to_dict())
        known = get_gguf_hf_weights_map(skeleton, self._processor, model_type=file.architecture)
        own = skeleton.state_dict()
        stored = {known[tensor]: tensor for tensor in file.tensors if known.get(tensor) in own}
        self._sources = {name: stored[name] for name in own if name in stored}
        self.names = self._sources.keys()
        unexpected = file.tensors.keys() - stored.values() - {_DIVISORS}
        name = file.path.name
        files = CheckpointFiles(model=file.model, source=name, files=dict.fromkeys(file.tensors, name), dtypes={})
        shapes = {name: file.tensors[tensor].shape for name, tensor in stored.items()}
        check_names(skeleton, files, shapes, unexpected)

    def read(self, name: str) -> Codes | torch.Tensor:
        """Return a parameter or buffer, by the model's name of it."""
        source = self._sources[name]
        tensor, rows = self._file.tensors[source], self._file.rows(source)
        if len(tensor.shape) == 1:
            vector = rows.view(_FLOATS[tensor.kind]).flatten()
            given = vector.float().numpy()
            changed = self._processor.process(weights=given, name=source).weights
            return vector if changed is given else torch.from_numpy(np.ascontiguousarray(changed))
        order = np.arange(len(rows))
        changed = self._processor.process(weights=order, name=source).weights
        if changed is not order:
            rows = rows[torch.from_numpy(np.ascontiguousarray(changed))]
        if tensor.kind in _FLOATS:
            return rows.view(_FLOATS[tensor.kind]).view(tensor.shape)
        block_bytes, decode = _BLOCKS[tensor.kind]
        codes = decode(rows.view(len(rows), -1, block_bytes))
        if (problem := find_problem(codes)) is not None:
            raise self._file.refuse(source, f"of a weight with {problem}")
        return codes

    def place(self, name: str) -> str:
        """Return the name of the file."""
        return self._file.path.name

    def close(self) -> None:
        """Drop the file."""
        self._file.close()


def _halves(blocks: torch.Tensor, begin: int, end: int) -> torch.Tensor:
    """Return the float16 numbers of each block, ``[rows, blocks, numbers]``."""
    return blocks[..., begin:end].contiguous().view(torch.float16)


def _decode_q4_0(blocks: torch.Tensor) -> Codes:
    octets = blocks[..., 2:]  # codes of 4 bits: those in low bits of all bytes, then those in high bits
    return _codes("int4", 32, torch.cat((octets & 15, octets >> 4), dim=-1), _halves(blocks, 0, 2), None)


def _codes(numbers: str, group: int, codes: torch.Tensor, scales: torch.Tensor, shifts: torch.Tensor | None) -> Codes:
    """Return codes ``[rows, blocks, weights]`` as those of a weight."""
    return Codes(
        numbers=numbers,
        codes=codes.flatten(1),
        group=group,
        scales=scales.flatten(1),
        shifts=None if shifts is None else shifts.flatten(1),
    )


def _six_bits(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scales and minima of the 8 groups of a block, ``[rows, blocks, 8]``, from its first 16 bytes.

    6 bits each are packed in 12 bytes: those of the first four groups in low bits, of the others in parts.
    """
    low, high, rest = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scales = torch.cat((low & 63, (rest & 15) | (low >> 6 << 4)), dim=-1)
    minima = torch.cat((high & 63, (rest >> 4) | (high >> 6 << 4)), dim=-1)
    return scales * _halves(blocks, 0, 2).float(), minima * _halves(blocks, 2, 4).float()


def _nibbles_of_groups(octets: torch.Tensor) -> torch.Tensor:
    """Return codes of groups of 32, ``[..., 8, 32]``: low bits of 32 bytes are one group, high bits the next."""
    pairs = octets.unflatten(-1, (4, 32))
    return torch.stack((pairs & 15, pairs >> 4), dim=-2).flatten(-3, -2)


def _decode_q4_k(blocks: torch.Tensor) -> Codes:
    scales, minima = _six_bits(blocks)
    return _codes("int4", 32, _nibbles_of_groups(blocks[..., 16:]).flatten(-2), scales, 8 * scales - minima)


def _decode_q5_k(blocks: torch.Tensor) -> Codes:
    scales, minima = _six_bits(blocks)
    bits = blocks[..., 16:48].unsqueeze(-2) >> torch.arange(8, dtype=torch.uint8).unsqueeze(-1)  # (..., 8, 32)
    codes = _nibbles_of_groups(blocks[..., 48:]) | (bits & 1) << 4
    return _codes("int8", 32, (codes + 128).flatten(-2), scales, -minima)


def _decode_q6_k(blocks: torch.Tensor) -> Codes:
    halves = blocks[..., :128].unflatten(-1, (2, 64))
    low = torch.stack((halves & 15, halves >> 4), dim=-2).flatten(-3)  # 64 low bits, then their high bits
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8).unsqueeze(-1)
    high = (blocks[..., 128:192].unflatten(-1, (2, 1, 32)) >> shifts & 3).flatten(-3)
    scales = blocks[..., 192:208].view(torch.int8) * _halves(blocks, 208, 210).float()
    return _codes("int8", 16, (low | high << 4) + 96, scales, None)  # the code 32 is the number 0


_BLOCKS: Mapping[str, tuple[int, Callable[[torch.Tensor], Codes]]] = {
    "Q8_0": (34, lambda blocks: _codes("int8", 32, blocks[..., 2:] ^ 128, _halves(blocks, 0, 2), None)),
    "Q4_0": (18, _decode_q4_0),
    "Q4_K": (144, _decode_q4_k),
    "Q5_K": (176, _decode_q5_k),
    "Q6_K": (210, _decode_q6_k),
}
"""Bytes of a block and its reader, by ggml's names."""
