"""Dimensions of a model, and the counts that cost models derive from them.

These are the weights that a step reads, the operations of a token and the bytes of KV that it writes. Norms and biases
are counted too, so that parameter counts agree with model cards.
"""

from __future__ import annotations

from dataclasses import dataclass

from manylora.core.adapters.shape import ELEMENT_BYTES, PageShape
from manylora.core.errors import ConfigError
from manylora.core.options import check_options, option

__all__ = ["ATTENTION_TARGETS", "ModelDims"]

ATTENTION_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDims:
    """The dimensions of a decoder with a gated MLP, dense or a mixture of experts.

    Args:
        hidden_size: Width of the residual stream.
        num_kv_heads: Key and value heads.
        intermediate_size: Width of the MLP; of one expert in a mixture.
        vocab_size: Rows of the embedding.
        max_model_len: Longest context in tokens.
        num_experts: Experts per layer; 0 for a dense model.
        experts_per_token: Experts that a token is routed to.
        tie_embeddings: Whether the head is the embedding.
        has_attention_bias: Whether q, k and v have biases.
        weight_bits: Bits per weight of the layers' matrices in a quantised base, whose embedding and head stay in
            ``dtype``; ``None`` for an unquantised base.
    """

    name: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_model_len: int
    num_experts: int = 0
    experts_per_token: int = 0
    tie_embeddings: bool = False
    has_attention_bias: bool = False
    dtype: str = option(
        "bfloat16",
        choices=tuple(ELEMENT_BYTES),
        help="Precision of adapters and activations, and by default of KV.",
    )
    weight_bits: int | None = None
    kv_dtype: str | None = option(
        None, choices=("int8", *ELEMENT_BYTES), help="Precision of KV; int8 has a scale for each vector."
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.num_experts and not 1 <= self.experts_per_token <= self.num_experts:
            raise ConfigError(f"Got experts_per_token = {self.experts_per_token}, expected 1 to {self.num_experts}")

    @property
    def element_bytes(self) -> int:
        """Bytes of an activation or an adapter weight."""
        return ELEMENT_BYTES[self.dtype]

    @property
    def q_size(self) -> int:
        """Width of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key (or value) heads together."""
        return self.num_kv_heads * self.head_dim

    @property
    def expert_weights(self) -> int:
        """Weights of one layer's MLP; of one expert in a mixture."""
        return 3 * self.hidden_size * self.intermediate_size

    @property
    def shared_weights(self) -> int:
        """Weights of all layers that every token uses: all weights of a dense model's layers."""
        mlp = self.hidden_size * self.num_experts if self.num_experts else self.expert_weights
        attention = 2 * self.hidden_size * (self.q_size + self.kv_size)  # q and o, k and v
        return self.num_layers * (attention + mlp)

    @property
    def active_weights(self) -> int:
        """Weights of all layers that one token uses."""
        return self.shared_weights + self.num_layers * self.experts_per_token * self.expert_weights

    @property
    def head_weights(self) -> int:
        """Weights of the head, which may be the embedding."""
        return self.hidden_size * self.vocab_size

    @property
    def num_parameters(self) -> int:
        """All parameters, as model cards count them."""
        layers = self.shared_weights + self.num_layers * self.num_experts * self.expert_weights
        norms = (2 * self.num_layers + 1) * self.hidden_size
        biases = self.num_layers * (self.q_size + 2 * self.kv_size) if self.has_attention_bias else 0
        return layers + norms + biases + self.head_weights * (1 if self.tie_embeddings else 2)

    @property
    def layer_element_bytes(self) -> float:
        """Bytes per weight of the layers' matrices: fewer than ``element_bytes`` if quantised."""
        return self.element_bytes if self.weight_bits is None else self.weight_bits / 8

    @property
    def weight_bytes(self) -> int:
        """Bytes of the base model in device memory."""
        layers = self.shared_weights + self.num_layers * self.num_experts * self.expert_weights
        return int(layers * self.layer_element_bytes) + (self.num_parameters - layers) * self.element_bytes

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of KV per token."""
        return self.page_shape(1).num_bytes

    def page_shape(self, block_size: int) -> PageShape:
        """Return the shape of a page of ``block_size`` tokens."""
        dtype = self.kv_dtype or self.dtype
        return PageShape(
            block_size=block_size,
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            element_bytes=ELEMENT_BYTES.get(dtype, 1),
            dtype=dtype,
        )

    def adapter_elements(self, targets: tuple[str, ...] = ATTENTION_TARGETS) -> int:
        """Return the weights per unit of rank of an adapter on these modules (by last name) of every layer.

        Raises:
            ConfigError: This model has no such module.
        """
        return self.num_layers * sum(sum(self.module_shape(target)) for target in targets)

    def module_shape(self, target: str) -> tuple[int, int]:
        """Return the numbers of inputs and outputs of a module that adapters may change.

        Raises:
            ConfigError: This model has no such module (MLPs of experts take no adapter).
        """
        hidden, inner = self.hidden_size, self.intermediate_size
        shapes = {
            "q_proj": (hidden, self.q_size),
            "k_proj": (hidden, self.kv_size),
            "v_proj": (hidden, self.kv_size),
            "o_proj": (self.q_size, hidden),
        }
        if not self.num_experts:
            shapes |= {"gate_proj": (hidden, inner), "up_proj": (hidden, inner), "down_proj": (inner, hidden)}
        if target not in shapes:
            raise ConfigError(f"Got {target = }, expected one of {', '.join(shapes)} for {self.name}")
        return shapes[target]
