"""Find out how a model behaves, by one small forward pass at load time.

There is no list of supported architectures. The pass checks that every layer calls our attention function once, causal,
with as many heads of K as of V, without a mask and without unknown arguments, or keeps states in a known form
(``recurrent.py``). It also records which linears get every token and which share one input. A model that does anything
else is refused by name before it serves a request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from manylora.core.errors import ConfigError
from manylora.execution.attention.call import AttentionCall, attending
from manylora.execution.model.experts import ProductWatch, expert_sizes, is_bare_product, is_expert_call
from manylora.execution.model.head import RecordedPass
from manylora.execution.model.recurrent import Mixer, MixerWatch

__all__ = ["ModelProbe", "measure_activations", "probe_model", "stand_ins"]

NUM_TOKENS = 5
NUM_SAMPLED = 2

# Keyword arguments of attention without effect here: positions are in q and k already, the rest concerns caches and
# outputs that we do not use.
_HARMLESS = frozenset(
    {
        "cache_position",
        "is_causal",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)

_LACKING = {
    "position_ids": "it counts positions by itself, and sequences of one batch have their own",
    "logits_to_keep": "it cannot compute logits of chosen rows only",
}
"""The assumption that fails, by the argument that Python's error names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelProbe:
    """Findings of the pass."""

    num_layers: int
    num_kv_heads: int  # heads of K and V, the same in every layer, as are their sizes
    head_dim: int  # of K
    value_dim: int
    # Number of the input tensor, per module that was called exactly once on every token; modules with equal numbers
    # share their input.
    inputs: dict[str, int]
    head: str | None  # name of the output head, called once on the sampled rows
    # Numbers that a norm returns for a token, and the axis of tokens, per norm that was called once on every token.
    norms: dict[str, tuple[int, int]]
    experts: tuple[str, ...] = ()  # modules of experts (``expert_sizes``) that were called once, on every token
    routers: tuple[str, ...] = ()  # modules that multiply every token once by a weight of their own
    kv_layers: tuple[int, ...] = ()  # layers with attention, in order
    mixers: tuple[Mixer, ...] = ()  # modules that keep a state of each sequence, by layers


@dataclass(slots=True)
class _ProbeSink:
    """Takes the place of the paged batch and records the calls."""

    architecture: str
    layers: dict[int, tuple[int, int, int]] = field(default_factory=dict)  # heads of K and V, and their sizes

    def attend(self, call: AttentionCall) -> torch.Tensor:
        layer = getattr(call.module, "layer_idx", None)
        if not isinstance(layer, int) or layer in self.layers:
            raise self.refusal(f"layer {layer!r} calls attention more than once or has no number")
        if call.mask is not None:
            raise self.refusal(f"layer {layer} brings an attention mask of its own")
        if getattr(call.module, "is_causal", True) is False or call.extra.get("is_causal") is False:
            raise self.refusal(f"layer {layer} is not causal")
        unknown = sorted(k for k, v in call.extra.items() if v is not None and k not in _HARMLESS)
        if unknown:
            raise self.refusal(f"layer {layer} passes {', '.join(unknown)} to attention, which is not implemented")
        if call.key.shape[:2] != call.value.shape[:2]:
            raise self.refusal(f"layer {layer} has keys {tuple(call.key.shape)} and values {tuple(call.value.shape)}")
        self.layers[layer] = (call.key.shape[0], call.key.shape[2], call.value.shape[2])
        return _nothing(call)

    def refusal(self, why: str) -> ConfigError:
        return ConfigError(f"Got a model of type {self.architecture!r}, which is not supported: {why}")


@contextmanager
def stand_ins(model: nn.Module) -> Iterator[None]:
    """Let a model whose weights are on the ``meta`` device run on a few tokens inside, without any weight.

    A linear returns numbers of its input in another order, an embedding those of a small table; other weights are
    ones. So the pass shows which modules are called, with which inputs, and not what a trained model would compute.
    """
    generator = torch.Generator().manual_seed(0)
    undo: list[Callable[[], object]] = []

    def put(module: nn.Module, name: str, tensor: torch.Tensor) -> None:
        undo.append(partial(module._parameters.__setitem__, name, module._parameters[name]))
        module._parameters[name] = nn.Parameter(tensor, requires_grad=False)

    for module in model.modules():
        is_plain = type(module).forward is nn.Linear.forward  # routers of some families are linears that do more
        if isinstance(module, nn.Linear) and is_plain and module.weight.is_meta:
            vars(module)["forward"] = partial(_mixed, torch.arange(module.out_features) % module.in_features)
            undo.append(partial(vars(module).pop, "forward"))
            continue
        if isinstance(module, nn.Embedding) and module.weight.is_meta:
            dtype, dim = module.weight.dtype, module.embedding_dim
            put(module, "weight", torch.randn(min(module.num_embeddings, 64), dim, generator=generator).to(dtype))
            undo.append(partial(setattr, module, "padding_idx", module.padding_idx))
            module.padding_idx = None
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.is_meta:
                own = parameter.shape[1:] if parameter.ndim == 3 else ()  # an expert's: products ask for its strides
                put(module, name, torch.ones(own, dtype=parameter.dtype).expand(parameter.shape))
    try:
        yield
    finally:
        for step in undo:
            step()


def _mixed(places: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` ``[..., in]`` at ``places`` ``[out]``, each number with another factor."""
    return x[..., places] * torch.linspace(0.5, 1.5, len(places), dtype=x.dtype)


def probe_model(model: nn.Module, *, architecture: str, num_layers: int) -> ModelProbe:
    """Run the model, with our attention, once on a few tokens and report its behaviour; it is not changed.

    Without weights, it is run within ``stand_ins``. ``ConfigError`` if its behaviour is not supported.
    """
    sink, calls, mixers = _ProbeSink(architecture), _ModuleCalls(), MixerWatch()
    if model.base_model is model:
        raise sink.refusal("its decoder is no module of its own")
    recorded = RecordedPass(model)
    with torch.inference_mode(), recorded.recording(), calls.watching(model), mixers.watching(model):
        device = next(model.parameters()).device
        tokens = torch.arange(NUM_TOKENS, device=device)[None]
        keep = torch.arange(NUM_TOKENS - NUM_SAMPLED, NUM_TOKENS, device=device)
        try:
            with attending(sink):
                logits = model(input_ids=tokens, position_ids=tokens, use_cache=False, logits_to_keep=keep).logits
        except ConfigError as error:
            raise error if str(error).startswith("Got ") else sink.refusal(str(error)) from error
        except Exception as error:  # of code that was written for other attention
            why = next(
                (why for name, why in _LACKING.items() if isinstance(error, TypeError) and f"'{name}'" in str(error)),
                None,
            )
            raise sink.refusal(why or f"its forward pass fails: {type(error).__name__}: {error}") from error
    if not recorded.has_output:
        raise sink.refusal(
            f"{type(model).__name__} calls parts of its {type(model.base_model).__name__}, not all of it, so the "
            "output of its decoder cannot be kept for log-probabilities of prompts"
        )
    kv_shape = _kv_shape(sink, mixers, num_layers)
    if logits.shape[:2] != (1, NUM_SAMPLED):
        raise sink.refusal("it cannot compute logits of chosen rows only")
    with torch.inference_mode():
        if not torch.allclose(recorded.logits(keep), logits[0], equal_nan=True):
            raise sink.refusal("its logits depend on more than its decoder's output")
    return _summary(model, calls, sink, mixers, num_layers, kv_shape)


def _kv_shape(sink: _ProbeSink, mixers: MixerWatch, num_layers: int) -> tuple[int, int, int]:
    """Return the heads of K and V of the layers with attention, and their sizes.

    ``ConfigError`` if they differ, there are none, or a layer has neither attention nor a known state.
    """
    kept = sink.layers.keys() | mixers.found.keys()
    missing = [layer for layer in range(num_layers) if layer not in kept]
    if missing or len(kept) != num_layers:
        raise sink.refusal(
            f"layers {missing} keep another state than keys and values"
            if missing
            else f"it has {len(kept)} attention layers where its configuration says {num_layers}"
        )
    shapes = sorted(set(sink.layers.values()))
    if not shapes:
        raise sink.refusal("no layer has keys and values, whose pages all else is counted in")
    if len(shapes) != 1:
        raise sink.refusal(f"its layers have keys of different shapes: {shapes} (heads, size of keys, of values)")
    return shapes[0]


@dataclass(slots=True)
class _ModuleCalls:
    """The calls of modules in the pass, by name."""

    # Inputs of linears, embeddings and norms; live references keep the tensors' identities unique.
    inputs: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    experts: dict[str, list[bool]] = field(default_factory=dict)  # of experts, whether each call got every token
    routers: dict[str, list[bool]] = field(default_factory=dict)  # of modules with a bare weight, likewise

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Record the calls inside."""
        with ExitStack() as undo:
            for name, module in model.named_modules():
                if expert_sizes(module) is not None:
                    calls = self.experts.setdefault(name, [])
                    hook = module.register_forward_pre_hook(
                        lambda _, args, calls=calls: calls.append(is_expert_call(args, NUM_TOKENS))
                    )
                    undo.callback(hook.remove)
                elif is_bare_product(module):
                    calls = self.routers.setdefault(name, [])
                    vars(module)["forward"] = partial(self._run, module.forward, module.weight.shape, calls)
                    undo.callback(vars(module).pop, "forward")
                elif isinstance(module, nn.Linear | nn.Embedding) or _is_norm(module):
                    undo.callback(module.register_forward_pre_hook(partial(self._note, name)).remove)
            yield

    def _note(self, name: str, module: nn.Module, args: tuple[Any, ...]) -> None:
        if args and isinstance(args[0], torch.Tensor):
            self.inputs.setdefault(name, []).append(args[0])

    @staticmethod
    def _run(
        forward: Callable[..., object], shape: torch.Size, calls: list[bool], *args: object, **kwargs: object
    ) -> object:
        def note(x: torch.Tensor, out: torch.Tensor) -> None:
            calls.append(x.shape[:-1].numel() == NUM_TOKENS)

        with ProductWatch(shape, note):
            return forward(*args, **kwargs)


def _once(calls: dict[str, list[bool]]) -> tuple[str, ...]:
    return tuple(name for name, all_tokens in calls.items() if all_tokens == [True])


def _summary(
    model: nn.Module,
    calls: _ModuleCalls,
    sink: _ProbeSink,
    mixers: MixerWatch,
    num_layers: int,
    kv_shape: tuple[int, int, int],
) -> ModelProbe:
    head_module = model.get_output_embeddings()  # type: ignore[operator]
    head = None
    inputs: dict[str, int] = {}
    norms: dict[str, tuple[int, int]] = {}
    numbers: dict[int, int] = {}
    for name, tensors in calls.inputs.items():
        if len(tensors) != 1:
            continue
        num_rows = tensors[0].shape[:-1].numel() if tensors[0].is_floating_point() else tensors[0].numel()
        if model.get_submodule(name) is head_module:
            head = name if num_rows == NUM_SAMPLED else None
        elif _is_norm(model.get_submodule(name)):
            axes = [axis for axis, size in enumerate(tensors[0].shape[1:-1], 1) if size == NUM_TOKENS]
            if len(axes) == 1 and len(tensors[0]) == 1 and not mixers.has(name):
                norms[name] = tensors[0].numel() // NUM_TOKENS, axes[0]
        elif num_rows == NUM_TOKENS:
            inputs[name] = numbers.setdefault(id(tensors[0]), len(numbers))
    heads, head_dim, value_dim = kv_shape
    return ModelProbe(
        num_layers=num_layers,
        num_kv_heads=heads,
        head_dim=head_dim,
        value_dim=value_dim,
        inputs=inputs,
        head=head,
        norms=norms,
        experts=_once(calls.experts),
        routers=_once(calls.routers),
        kv_layers=tuple(sorted(sink.layers)),
        mixers=tuple(mixers.found[layer] for layer in sorted(mixers.found)),
    )


def _is_norm(module: nn.Module) -> bool:
    """Return whether a module is a norm with a weight, and perhaps a bias, over its last dimension."""
    parameters = dict(module.named_parameters())
    is_vector = all(parameter.ndim == 1 for parameter in parameters.values())
    return "norm" in type(module).__name__.lower() and "weight" in parameters and is_vector


def _nothing(call: AttentionCall) -> torch.Tensor:
    """Return zeros of the shape of a call's result."""
    num_heads, num_rows, _ = call.query.shape
    return call.query.new_zeros(num_rows, num_heads, call.value.shape[2])


class _ZeroAttention:
    """Attention that returns zeros, to measure everything else."""

    def attend(self, call: AttentionCall) -> torch.Tensor:
        return _nothing(call)


@torch.inference_mode()
def measure_activations(model: nn.Module, *, num_tokens: int, num_sampled: int) -> int:
    """Return the peak bytes of a step of ``num_tokens`` on a GPU beside weights and pages.

    These are hidden states, and the logits with the copies that sampling makes of them.
    """
    device = next(model.parameters()).device
    tokens = torch.zeros(1, num_tokens, dtype=torch.int64, device=device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    with attending(_ZeroAttention()):
        logits = model(
            input_ids=tokens,
            position_ids=torch.arange(num_tokens, device=device)[None],
            use_cache=False,
            logits_to_keep=torch.arange(num_sampled, device=device),
        ).logits
    peak = torch.cuda.max_memory_allocated(device) - before
    return int(peak + 4 * logits.numel() * torch.float32.itemsize)
