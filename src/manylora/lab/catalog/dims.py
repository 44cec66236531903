"""Dimensions of a model, and the counts that cost models derive from them.

These are the weights that a step reads, the operations of a token and the bytes of KV that it writes. Norms and biases
are counted too, so that parameter counts agree with model cards.
"""

from __future__ import annotations

from dataclasses import dataclass

from manylora.core.adapters.shape import ELEMENT_BYTES, PageShape
from manylora.core.errors import ConfigError
from manylora.core.options import check_options, option

__all__ = ["ATTENTION_TARGETS", "LatentAttention", "ModelDims"]

ATTENTION_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Narrow vectors that keys and values, and mostly queries, are products of (MLA, DeepSeek).

    KV in pages are the whole keys and values, as transformers computes them, and not the vectors.
    """

    kv_rank: int  # width of the vector of keys and values
    rope_dim: int  # dimensions of each key head that are rotated; they are the same in all heads
    query_rank: int | None = None  # width of the vector of queries; ``None`` where queries have none


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDims:
    """The dimensions of a decoder, dense or a mixture of experts."""

    name: str
    hidden_size: int  # width of the residual stream
    num_layers: int
    num_heads: int
    num_kv_heads: int  # key and value heads
    head_dim: int  # size of a query or key head
    intermediate_size: int  # width of the MLP; of one expert in a mixture
    vocab_size: int  # rows of the embedding
    max_model_len: int  # longest context in tokens
    num_experts: int = 0  # experts per layer; 0 for a dense model
    experts_per_token: int = 0  # experts that a token is routed to
    value_dim: int | None = None  # size of a value head; ``None``: as of a key head
    latent: LatentAttention | None = None  # of latent attention, the vectors between
    num_shared_experts: int = 0  # experts that every token uses, beside those that it is routed to
    num_dense_layers: int = 0  # layers of a mixture that have an MLP of ``dense_size`` in place of experts
    dense_size: int = 0
    has_gate: bool = True  # whether a dense MLP has a gate beside the half that it is multiplied with
    # Layers with attention; ``None``: all. The others keep a state; their linears count as those of attention.
    num_kv_layers: int | None = None
    state_bytes: int = 0  # bytes of the states of a sequence in these layers
    tie_embeddings: bool = False  # whether the head is the embedding
    has_attention_bias: bool = False  # whether q, k and v have biases
    dtype: str = option(
        "bfloat16", choices=tuple(ELEMENT_BYTES), help="Precision of adapters and activations, and by default of KV."
    )
    # Bits per weight of the layers' matrices in a quantised base, whose embedding and head stay in ``dtype``; ``None``
    # for an unquantised base.
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
        """Width of all key heads together."""
        return self.num_kv_heads * self.head_dim

    @property
    def value_size(self) -> int:
        """Size of a value head."""
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def attention_modules(self) -> dict[str, tuple[int, int]]:
        """Inputs and outputs of a layer's linears of attention, by name."""
        hidden, out = self.hidden_size, {"o_proj": (self.num_heads * self.value_size, self.hidden_size)}
        queries = {"q_proj": (hidden, self.q_size)}
        latent = self.latent
        if latent is None:
            values = self.num_kv_heads * self.value_size
            return {**queries, "k_proj": (hidden, self.kv_size), "v_proj": (hidden, values), **out}
        if latent.query_rank is not None:
            queries = {"q_a_proj": (hidden, latent.query_rank), "q_b_proj": (latent.query_rank, self.q_size)}
        expanded = self.num_kv_heads * (self.head_dim - latent.rope_dim + self.value_size)
        narrow = {"kv_a_proj_with_mqa": (hidden, latent.kv_rank + latent.rope_dim)}
        return {**queries, **narrow, "kv_b_proj": (latent.kv_rank, expanded), **out}

    @property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        """Modules of a layer that are computed as one product."""
        mlp = (("gate_proj", "up_proj") if self.has_gate else ("up_proj",), ("gate_up_proj",), ("down_proj",))
        if self.latent is not None:
            return (*((name,) for name in self.attention_modules), *mlp)
        return (("q_proj", "k_proj", "v_proj"), ("o_proj",), *mlp)

    @property
    def score_operations(self) -> int:
        """Operations of all layers to attend a token to a position."""
        return 2 * self._num_attending * self.num_heads * (self.head_dim + self.value_size)

    @property
    def _num_attending(self) -> int:
        return self.num_layers if self.num_kv_layers is None else self.num_kv_layers

    @property
    def expert_weights(self) -> int:
        """Weights of one layer's MLP; of one expert in a mixture."""
        return (3 if self.has_gate else 2) * self.hidden_size * self.intermediate_size

    @property
    def shared_weights(self) -> int:
        """Weights of all layers that every token uses: all weights of a dense model's layers."""
        router = self.hidden_size * self.num_experts
        mlp = router + self.num_shared_experts * self.expert_weights if self.num_experts else self.expert_weights
        dense = 3 * self.hidden_size * self.dense_size
        attention = sum(inputs * outputs for inputs, outputs in self.attention_modules.values())
        sparse = self.num_layers - self.num_dense_layers
        return self.num_layers * attention + sparse * mlp + self.num_dense_layers * dense

    @property
    def routed_weights(self) -> int:
        """Weights of the experts of all layers that tokens are routed to."""
        return (self.num_layers - self.num_dense_layers) * self.num_experts * self.expert_weights

    @property
    def active_weights(self) -> int:
        """Weights of all layers that one token uses."""
        sparse = self.num_layers - self.num_dense_layers
        return self.shared_weights + sparse * self.experts_per_token * self.expert_weights

    @property
    def head_weights(self) -> int:
        """Weights of the head, which may be the embedding."""
        return self.hidden_size * self.vocab_size

    @property
    def num_parameters(self) -> int:
        """All parameters, as model cards count them."""
        layers = self.shared_weights + self.routed_weights
        biases = self.num_layers * (self.q_size + 2 * self.kv_size) if self.has_attention_bias else 0
        return layers + self.norm_weights + biases + self.head_weights * (1 if self.tie_embeddings else 2)

    @property
    def norm_weights(self) -> int:
        """Weights of all norms."""
        latent = self.latent
        narrow = 0 if latent is None else self.num_layers * (latent.kv_rank + (latent.query_rank or 0))
        return (2 * self.num_layers + 1) * self.hidden_size + narrow

    @property
    def layer_element_bytes(self) -> float:
        """Bytes per weight of the layers' matrices: fewer than ``element_bytes`` if quantised."""
        return self.element_bytes if self.weight_bits is None else self.weight_bits / 8

    @property
    def weight_bytes(self) -> int:
        """Bytes of the base model in device memory."""
        layers = self.shared_weights + self.routed_weights
        return int(layers * self.layer_element_bytes) + (self.num_parameters - layers) * self.element_bytes

    def kv_copies(self, num_devices: int) -> int:
        """Return how many of the devices that share each layer hold the same head of keys."""
        return max(1, num_devices // self.num_kv_heads)

    def repeated_weights(self, num_devices: int) -> int:
        """Return the weights of all layers' matrices that devices which share each layer hold beyond one copy.

        Routers and the first linears of latent attention are whole on each device, and keys and values of one head are
        where there are fewer heads than devices.
        """
        modules = self.attention_modules
        routers = (self.num_layers - self.num_dense_layers) * self.hidden_size * self.num_experts
        narrow = sum(inputs * outputs for name, (inputs, outputs) in modules.items() if "_a_" in name)
        keys = sum(inputs * outputs for inputs, outputs in (modules.get(name, (0, 0)) for name in ("k_proj", "v_proj")))
        more_keys = (self.kv_copies(num_devices) - 1) * self.num_layers * keys
        return (num_devices - 1) * (routers + self.num_layers * narrow) + more_keys

    def weight_bytes_on(self, num_devices: int) -> int:
        """Return the bytes of the base in the memory of all devices that share each layer; norms are on each."""
        norms = (num_devices - 1) * self.norm_weights * self.element_bytes
        return self.weight_bytes + int(self.repeated_weights(num_devices) * self.layer_element_bytes) + norms

    def check_divides(self, num_devices: int) -> None:
        """Refuse a number of devices that cannot share each layer, as loading does (``execution.model.share``).

        ``ConfigError`` if a size is not a multiple of it.
        """
        got = f"Got tensor_parallel_size = {num_devices}, expected"
        if num_devices < 1:
            raise ConfigError(f"{got} at least 1")
        for field in ("hidden_size", "num_heads", "intermediate_size", "dense_size"):
            if (value := getattr(self, field)) % num_devices:
                raise ConfigError(f"{got} a divisor of {field} = {value} of {self.name}")
        if (heads := self.num_kv_heads) % num_devices and num_devices % heads:
            raise ConfigError(f"{got} a divisor or a multiple of num_kv_heads = {heads} of {self.name}")

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of KV per token."""
        return self.page_shape(1).num_bytes

    def page_shape(self, block_size: int) -> PageShape:
        """Return the shape of a page of ``block_size`` tokens."""
        dtype = self.kv_dtype or self.dtype
        return PageShape(
            block_size=block_size,
            num_layers=self._num_attending,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            value_dim=self.value_dim,
            element_bytes=ELEMENT_BYTES.get(dtype, 1),
            dtype=dtype,
        )

    def adapter_elements(self, targets: tuple[str, ...] = ATTENTION_TARGETS, *, num_experts: int | None = None) -> int:
        """Return the weights per unit of rank of an adapter on these modules (by last name) of every layer.

        ``num_experts`` counts the weights of so many experts of a layer, in place of all. ``ConfigError`` if this model
        has no such module.
        """
        dense, sparse = self.num_layers, self.num_layers - self.num_dense_layers
        sparse *= self.num_experts if num_experts is None else num_experts
        return sum(
            sum(self.module_shape(target)) * (sparse if self.is_of_experts(target) else dense) for target in targets
        )

    def is_of_experts(self, target: str) -> bool:
        """Return whether every expert has a module of this name of its own."""
        return self.num_experts > 0 and target in ("gate_up_proj", "down_proj")

    def module_shape(self, target: str) -> tuple[int, int]:
        """Return the numbers of inputs and outputs of a module that adapters may change, of one expert in a mixture.

        ``ConfigError`` if this model has no such module.
        """
        hidden, inner = self.hidden_size, self.intermediate_size
        shapes = self.attention_modules
        if self.num_experts:  # gate and up are one weight
            shapes |= {"gate_up_proj": (hidden, 2 * inner), "down_proj": (inner, hidden)}
        else:
            gate = {"gate_proj": (hidden, inner)} if self.has_gate else {}
            shapes |= {**gate, "up_proj": (hidden, inner), "down_proj": (inner, hidden)}
        if target not in shapes:
            raise ConfigError(f"Got {target = }, expected one of {', '.join(shapes)} for {self.name}")
        return shapes[target]
