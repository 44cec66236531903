"""The calls of attention: the hook that transformers' models call, and the implementations' common interface.

The model is called on one flat row of tokens ``[1, T]`` of many sequences. No mask function is registered under our
name, so the model builds no mask and passes every layer's q, k, v to us. The step's attention is that of the thread
(``attending``): not every model hands keywords of its own down to its layers.

Transformers rotates queries and keys (RoPE) in ten small operations before it calls attention. Kernels that read q and
k can rotate them as well, given the angles. An unrotated tensor carries its angles::

    q, k  ->  fusion.layers      ->  Unrotated(q), Unrotated(k)  ->  AttentionCall.rotation  ->  kernels

Any operation on such a tensor returns a plain one. So a model that changes q after rotating it is detected: its
attention gets a query without a rotation.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, Self

import torch
from torch import nn
from transformers import AttentionInterface

from manylora.core.errors import ConfigError
from manylora.core.plan import PlannedSequence
from manylora.execution.kernels.triton.support import find_triton

__all__ = [
    "ATTENTION_NAME",
    "AttentionCall",
    "AttentionKernel",
    "AttentionSink",
    "Rotation",
    "StepAttention",
    "Unrotated",
    "attending",
    "call_attention",
    "choose_attention",
    "register_attention",
    "rotate",
]

ATTENTION_NAME = "manylora_paged"


@dataclass(frozen=True, slots=True)
class Rotation:
    """Angles of every row: dimension ``d`` is rotated with ``d + rotary_dim / 2``; later dimensions stay."""

    cos: torch.Tensor  # ``[rows, rotary_dim]``, contiguous in the last dimension; so is ``sin``
    sin: torch.Tensor

    @property
    def rotary_dim(self) -> int:
        """The number of dimensions that are rotated."""
        return self.cos.shape[1]


class Unrotated(torch.Tensor):
    """A query or key that is not rotated yet."""

    rotation: Rotation

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def of(cls, x: torch.Tensor, rotation: Rotation) -> Self:
        """Return ``x`` itself, with the rotation that is still to be applied."""
        unrotated = x.as_subclass(cls)
        unrotated.rotation = rotation
        return unrotated


def rotate(x: torch.Tensor, rotation: Rotation | None) -> torch.Tensor:
    """Return ``x`` ``[heads, rows, head_dim]`` rotated; the reference of the kernels."""
    if rotation is None:
        return x
    turning = x[..., : rotation.rotary_dim].float()
    first, second = turning.chunk(2, dim=-1)
    turned = turning * rotation.cos.float() + torch.cat((-second, first), dim=-1) * rotation.sin.float()
    return torch.cat((turned.to(x.dtype), x[..., rotation.rotary_dim :]), dim=-1)


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """A layer's call of attention."""

    module: nn.Module
    query: torch.Tensor  # ``[heads, T, head_dim]``
    key: torch.Tensor  # ``[kv_heads, T, head_dim]``
    value: torch.Tensor  # ``[kv_heads, T, value_dim]``
    scaling: float
    window: int | None  # positions that a token sees, itself included; ``None`` for all before it
    softcap: float | None  # bound of the scores (``softcap * tanh(score / softcap)``), or ``None``
    mask: object  # the model's mask; must be ``None``
    extra: dict[str, Any]
    rotation: Rotation | None = None  # RoPE that query and key still need; ``None`` if they are rotated
    # Score of each head ``[heads]`` that takes a share of the weights and brings no value (gpt-oss), or ``None``.
    sinks: torch.Tensor | None = None


class AttentionSink(Protocol):
    """Computes a layer's attention: a step's, or a recorder of calls."""

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Store the layer's K and V, then attend every row to its own sequence; ``[T, heads, value_dim]``."""


class StepAttention(AttentionSink, Protocol):
    """A step's attention, for every layer."""

    @property
    def positions(self) -> torch.Tensor:
        """Position of each row in its sequence ``[rows]``, int64."""


class AttentionKernel(Protocol):
    """Prepares a step's attention."""

    def prepare(self, sequences: Sequence[PlannedSequence]) -> StepAttention:
        """Return the attention of a step; its rows are the tokens of ``sequences``, in their order."""

    def release(self, seq_ids: Sequence[int]) -> None:
        """Drop the state of sequences that have left the engine."""


def choose_attention(name: str, device: torch.device) -> str:
    """Return the implementation, ``torch`` or ``triton``, of ``name`` on ``device``; refuse one that cannot run."""
    reason = find_triton(device)
    if name == "auto":
        return "triton" if device.type == "cuda" and reason is None else "torch"
    if name == "triton" and reason is not None:
        raise ConfigError(f"Got attention_kernel = {name!r}, which cannot run here: {reason}")
    return name


def register_attention() -> None:
    """Register the attention with transformers under ``ATTENTION_NAME``; may be repeated."""
    AttentionInterface.register(ATTENTION_NAME, call_attention)


_running = threading.local()


@contextmanager
def attending(sink: AttentionSink) -> Iterator[None]:
    """Let models that this thread calls inside attend by ``sink``."""
    before = getattr(_running, "sink", None)
    _running.sink = sink
    try:
        yield
    finally:
        _running.sink = before


def call_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend as transformers asks it of an attention function: tensors ``[1, heads, T, size]``, no weights returned."""
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    rotation = query.rotation if isinstance(query, Unrotated) else None
    assert isinstance(key, Unrotated) == (rotation is not None), "queries and keys are rotated together"
    call = AttentionCall(
        *(module, query[0], key[0], value[0], scaling, sliding_window, softcap, attention_mask, kwargs, rotation),
        sinks=s_aux,
    )
    sink: AttentionSink = _running.sink
    return sink.attend(call).unsqueeze(0), None
