"""The base model as adapters see it: which modules exist, how large they are, which share an input.

Pure data, made by the torch executor from the real model (``execution/``), read by the checkpoint reader
(does this adapter fit?), the layout (how many pages?) and the cost models (how many bytes and operations?).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

__all__ = ["ELEMENT_BYTES", "BaseShape", "ModuleKind", "PageShape", "TargetModule"]

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of a number, by the names that types have here."""


class ModuleKind(Enum):
    """What kind of weight a LoRA pair sits beside."""

    LINEAR = "linear"
    EMBEDDING = "embedding"


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetModule:
    """A module that an adapter may change.

    Modules of one ``group`` take the same input and are computed as one GEMM (q/k/v; gate/up); their outputs
    lie side by side in the group's output, this one's at ``[offset, offset + out_features)``.

    Args:
        name: Path as PEFT writes it below ``base_model.model.`` (``model.layers.0.self_attn.q_proj``).
        kind: Linear or embedding.
        in_features: Columns of A (the vocabulary for an embedding).
        out_features: Rows of B.
        layer: Index of its decoder layer; ``None`` outside them.
        group: Name of its group, unique in the model.
        offset: First column of its output in the group's.
    """

    name: str
    kind: ModuleKind
    in_features: int
    out_features: int
    layer: int | None
    group: str
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PageShape:
    """A page: one KV block across all layers, or the same bytes seen flat for adapters.

    ``[num_layers, 2, block_size, num_kv_heads, head_dim]`` elements of ``element_bytes``.

    Args:
        block_size: Tokens.
        num_layers: Layers that hold KV.
        num_kv_heads: Heads of K and V.
        head_dim: Width of a head.
        element_bytes: 4 for float32, 2 for 16-bit types.
        dtype: ``float32``, ``bfloat16`` or ``float16``.
    """

    block_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    element_bytes: int
    dtype: str

    @property
    def num_elements(self) -> int:
        """Elements in a page."""
        return self.num_layers * 2 * self.block_size * self.num_kv_heads * self.head_dim

    @property
    def num_bytes(self) -> int:
        """Bytes in a page."""
        return self.num_elements * self.element_bytes

    def elements_of(self, dtype: str) -> int:
        """Numbers of another type that fit in a page."""
        return self.num_bytes // ELEMENT_BYTES[dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseShape:
    """Everything about the base model that a torch-free part may ask.

    Args:
        name: Name for people (the checkpoint's directory or hub name).
        architecture: ``model_type`` of its configuration.
        fingerprint: Hash of the configuration and module shapes: adapters are packed for one fingerprint.
        vocab_size: Rows of the embedding.
        hidden_size: Width of the residual stream.
        num_layers: Decoder layers.
        max_model_len: Longest context in tokens.
        page: The page.
        modules: Every module LoRA may target, in model order.
        all_linear: Names of modules that PEFT's ``target_modules="all-linear"`` would pick.
        eos_token_ids: Tokens that end a sequence.
        unsupported: Modules that exist but that we cannot adapt, with the reason (MoE experts, routers, norms).
    """

    name: str
    architecture: str
    fingerprint: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    max_model_len: int
    page: PageShape
    modules: tuple[TargetModule, ...]
    all_linear: tuple[str, ...]
    eos_token_ids: tuple[int, ...]
    unsupported: tuple[tuple[str, str], ...] = ()
