"""Shape of the base model for adapters: its modules, their sizes, and the modules that share an input.

``execution/`` makes it from the loaded model. The adapter reader, the layout and the cost models read it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

__all__ = [
    "ELEMENT_BYTES",
    "INPUT",
    "SCALE_BYTES",
    "BaseShape",
    "ModuleKind",
    "ModuleShare",
    "PageShape",
    "TargetModule",
]

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}  # bytes per element, by dtype, of adapters
INPUT = ".input"  # behind the name of a linear, the name of its input
SCALE_BYTES = 4  # bytes of the scale behind a vector of KV in int8


class ModuleKind(Enum):
    """Kind of the part of the base that an adapter changes."""

    LINEAR = "linear"
    EMBEDDING = "embedding"
    NUMBERS = "numbers"
    """The output of a norm, or the input of a linear (``INPUT``): each number by itself, no products."""
    EXPERTS = "experts"
    """The linears of a mixture's experts as one parameter, of which a row uses those of the experts chosen for it."""
    ROUTER = "router"  # a product by a bare weight whose outputs choose a row's experts


@dataclass(frozen=True, slots=True)
class ModuleShare:
    """The part of a module's A and B that this one of several devices holds.

    Runs are (first, one past the last), in order; the last may reach beyond the matrix, whose numbers are zeros there.
    """

    columns: tuple[tuple[int, int], ...]  # runs of A's columns
    rows: tuple[tuple[int, int], ...]  # runs of B's rows


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetModule:
    """A module that an adapter may change.

    Modules of one ``group`` take the same input and are computed as one GEMM (q/k/v; gate/up); their outputs
    lie side by side in the group's output, this one's at ``[offset, offset + out_features)``.
    """

    # Path as PEFT writes it below ``base_model.model.`` (``model.layers.0.self_attn.q_proj``); of experts, the
    # parameter's (``model.layers.0.mlp.experts.down_proj``).
    name: str
    kind: ModuleKind
    in_features: int  # columns of A (the vocabulary for an embedding; the length of a norm's weight)
    out_features: int  # rows of B (a norm of each head has a multiple of its weight's length)
    layer: int | None  # index of the decoder layer; ``None`` outside the layers
    group: str  # name of the group, unique in the model
    offset: int  # first column of the module's output in the group's
    has_bias: bool = field(default=False, repr=False)  # whether the base adds one to its output; not in fingerprints
    is_transposed: bool = field(default=False, repr=False)  # whether its weight is stored as [in, out] (GPT-2)
    token_axis: int = field(default=1, repr=False)  # axis of the tokens in a norm's output
    # Experts, each with a pair of its own; the pairs lie one behind the other as one of their ranks together.
    num_experts: int = field(default=1, repr=False)
    # What this device holds of an adapter's weights, where several share them; ``None`` for all. ``in_features`` and
    # ``out_features`` are the module's own, ``offset`` is that in the output here.
    share: ModuleShare | None = field(default=None, repr=False)

    @property
    def num_columns(self) -> int:
        """Columns of A here."""
        return self.in_features if self.share is None else sum(stop - first for first, stop in self.share.columns)

    @property
    def num_rows(self) -> int:
        """Rows of B here."""
        return self.out_features if self.share is None else sum(stop - first for first, stop in self.share.rows)

    @property
    def turn(self) -> tuple[int, int]:
        """Order in which the model comes to the module, by layers: the embedding, the layers, then the rest."""
        if self.layer is not None:
            return 1, self.layer
        return (0, 0) if self.kind is ModuleKind.EMBEDDING else (2, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class PageShape:
    """A page: one KV block across all layers, or the same bytes as a flat array for adapters.

    For each layer ``[block_size, num_kv_heads]`` keys of ``head_dim`` elements, and behind them as many values of
    ``value_dim``. An element has ``element_bytes``: 4 for float32, 2 for bfloat16 and float16, 1 for int8, whose
    vectors each have a scale of 4 bytes behind them. ``block_size`` is in tokens.
    """

    block_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    element_bytes: int
    dtype: str
    value_dim: int | None = field(default=None, repr=False)  # ``None``: as keys; not in fingerprints by itself

    @property
    def key_elements(self) -> int:
        """Elements that the key of a token and a head takes."""
        return self.head_dim + (SCALE_BYTES if self.dtype == "int8" else 0)

    @property
    def value_elements(self) -> int:
        """Elements that the value of a token and a head takes."""
        return self.key_elements if self.value_dim is None else self.key_elements - self.head_dim + self.value_dim

    @property
    def adapter_dtype(self) -> str:
        """Type of an adapter's weights where nothing else is asked for: that of KV, or 16 bits beside KV in 8."""
        return "bfloat16" if self.dtype == "int8" else self.dtype

    @property
    def num_elements(self) -> int:
        """Elements in a page."""
        return self.num_layers * self.block_size * self.num_kv_heads * (self.key_elements + self.value_elements)

    @property
    def num_bytes(self) -> int:
        """Bytes in a page."""
        return self.num_elements * self.element_bytes

    def elements_of(self, dtype: str) -> int:
        """Return the number of elements of another dtype that fit in a page."""
        return self.num_bytes // ELEMENT_BYTES[dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseShape:
    """The base model, for packages without torch."""

    name: str  # the checkpoint's directory or hub name
    architecture: str  # ``model_type`` of its configuration
    fingerprint: str  # hash of the configuration and module shapes; adapters are packed for one fingerprint
    vocab_size: int  # rows of the embedding
    hidden_size: int  # width of the residual stream
    num_layers: int  # decoder layers
    max_model_len: int  # longest context in tokens
    page: PageShape  # shape of a page
    modules: tuple[TargetModule, ...]  # every module that LoRA may target, in model order
    all_linear: tuple[str, ...]  # names of the modules that PEFT's ``target_modules="all-linear"`` selects
    eos_token_ids: tuple[int, ...]  # tokens that end a sequence
    # Modules that adapters may not change, with the reason (MoE experts, routers, norms).
    unsupported: tuple[tuple[str, str], ...] = ()
    tied_head: str | None = None  # name of the output head if its weight is the embedding's
    # Bytes of the states that recurrent layers keep of a sequence, of any length. With them, prefixes are not shared:
    # the state behind a prefix is not kept.
    state_bytes: int = field(default=0, repr=False)

    @property
    def num_state_pages(self) -> int:
        """Pages of a sequence's states, in front of those of its KV."""
        return -(-self.state_bytes // self.page.num_bytes)

    def __hash__(self) -> int:
        """Hash only the fingerprint: the modules would each be hashed anew."""
        return hash(self.fingerprint)
