"""Layers that keep a state of fixed size for each sequence: short convolutions, Mamba 2, gated delta nets.

Transformers writes them in one form, a *mixer*: linears, a causal convolution, perhaps a recurrence, a last linear. It
reads and writes its states through methods of a cache. Here its own code runs with a cache that has the states of some
sequences, while its linears see all rows of the step at once, as the LoRA of mixed batches needs it::

    linears before   all rows   | seq 1: chunk of 5 | seq 2 | seq 3 | seq 4 |      the mixer's code, up to its states
    states, code     by group     [1, 5, ...]         [3, 1, ...] in one call      a prompt's chunk; all that decode
    last linear      all rows   | seq 1: chunk of 5 | seq 2 | seq 3 | seq 4 |

A sequence's states lie in pages of the pool, in front of the pages of its KV. They are claimed with these and released
with them: a sequence that was pre-empted starts again from zeros. Of the tokens before, nothing but the last states is
left, so prefixes are not shared (``BaseShape.state_bytes``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from inspect import unwrap
from math import prod
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace
from torch import nn

from manylora.core.adapters.shape import BaseShape
from manylora.core.errors import ConfigError
from manylora.core.plan import PlannedSequence
from manylora.execution.attention.call import AttentionKernel, StepAttention
from manylora.execution.storage.page_tensor import PageTensor

__all__ = ["Mixer", "MixerWatch", "StatefulAttention", "adapt_mixers", "has_mixers", "is_mixer"]

logger = logging.getLogger(__name__)

STATE_BYTES = 4  # bytes of a number of a state: float32, whatever the type of KV, since errors of a recurrence add up
StateKey = tuple[str, int]  # ``conv`` or ``recurrent``, and transformers' number of the state


@dataclass(frozen=True, slots=True)
class Mixer:
    """A mixer, as one forward pass showed it."""

    name: str  # of the module
    inputs: tuple[str, ...]  # names of its linears before its states
    output: str  # name of its last linear, whose output is the mixer's
    states: Mapping[StateKey, tuple[int, ...]]  # shapes of a sequence's states

    @property
    def num_bytes(self) -> int:
        """Bytes of a sequence's states."""
        return STATE_BYTES * sum(prod(shape) for shape in self.states.values())


def is_mixer(module: nn.Module) -> bool:
    """Return whether a module keeps states by the methods of transformers' caches."""
    code = getattr(unwrap(type(module).forward), "__code__", None)
    return code is not None and "update_conv_state" in code.co_names


def has_mixers(model: nn.Module) -> bool:
    """Return whether a model has layers with a state."""
    return any(is_mixer(module) for module in model.modules())


class _States:
    """Transformers' cache as one call of a mixer sees it; zeros where nothing is given."""

    def __init__(self, states: dict[StateKey, torch.Tensor] | None = None) -> None:
        self.states = {} if states is None else states

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self.states.get(("conv", state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self.states.get(("recurrent", state_idx))

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def update_conv_state(
        self, x: torch.Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None, **_: object
    ) -> torch.Tensor:
        """Return the last columns and the new ones ``[n, channels, kernel + tokens]``."""
        before = self.states["conv", state_idx]
        columns = torch.cat((before, x), dim=-1)
        self.states["conv", state_idx] = columns[..., -before.shape[-1] :]
        return columns

    def update_recurrent_state(
        self, state: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: object
    ) -> torch.Tensor:
        self.states["recurrent", state_idx] = state
        return state


class _AtStates(Exception):
    """A mixer has come to its states."""


class _Stop(_States):
    """Ends a mixer's code at its states."""

    def update_conv_state(self, *_: object, **__: object) -> torch.Tensor:
        raise _AtStates


class _Recorder(_States):
    """Has no states, and notes the shapes of those that a mixer keeps."""

    def __init__(self, note: Callable[[StateKey, tuple[int, ...]], None]) -> None:
        super().__init__()
        self._note = note

    def update_conv_state(
        self, x: torch.Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None, **_: object
    ) -> torch.Tensor:
        if conv_kernel_size is None:
            raise ConfigError("its convolution does not say how many columns it keeps")
        self._note(("conv", state_idx), (x.shape[1], conv_kernel_size))
        return x

    def update_recurrent_state(
        self, state: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: object
    ) -> torch.Tensor:
        self._note(("recurrent", state_idx), tuple(state.shape[1:]))
        return state


@dataclass(slots=True)
class MixerWatch:
    """Finds the mixers of a model in a forward pass; ``found`` has those that ran, by their layers."""

    found: dict[int, Mixer] = field(default_factory=dict)

    def has(self, name: str) -> bool:
        """Return whether a module is part of a mixer: it is called group by group, not on the rows of a step."""
        return any(name.startswith(f"{mixer.name}.") for mixer in self.found.values())

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Record the calls inside."""
        with ExitStack() as undo:
            for name, module in model.named_modules():
                if is_mixer(module):
                    vars(module)["forward"] = partial(self._run, name, module, module.forward)
                    undo.callback(vars(module).pop, "forward")
            yield

    def _run(
        self, name: str, mixer: nn.Module, forward: Callable[..., Any], hidden_states: torch.Tensor, *_: Any, **__: Any
    ) -> torch.Tensor:
        """Run a mixer, and note its states and the linears before and behind them.

        ``ConfigError`` if it is of another form.
        """
        states: dict[StateKey, tuple[int, ...]] = {}
        calls: list[tuple[str, bool, torch.Tensor]] = []  # name, whether before the states, output

        def note(leaf: str) -> Callable[..., None]:
            return lambda module, args, out: calls.append((f"{name}.{leaf}", not states, out))

        with ExitStack() as undo:
            for leaf, module in mixer.named_modules():
                if isinstance(module, nn.Linear):
                    undo.callback(module.register_forward_hook(note(leaf)).remove)
            out: torch.Tensor = forward(hidden_states, cache=_Recorder(states.__setitem__))
        inputs = [leaf for leaf, is_before, _ in calls if is_before]
        after = [(leaf, own) for leaf, is_before, own in calls if not is_before]
        layer = getattr(mixer, "layer_idx", None)
        form = "linears, a convolution, perhaps a recurrence, and one linear whose output is the layer's"
        if len(after) != 1 or after[0][1] is not out or not inputs or len(set(inputs)) != len(inputs):
            raise ConfigError(f"{name} keeps a state in another form than this: {form}")
        if not isinstance(layer, int) or layer in self.found:
            raise ConfigError(f"layer {layer!r} keeps the states of more than one module, or has no number")
        self.found[layer] = Mixer(name, tuple(inputs), after[0][0], states)
        return out


@dataclass(frozen=True, slots=True)
class _Group:
    """Sequences whose rows are one call of a mixer: a prompt's chunk, or all that have one row in the step."""

    rows: torch.Tensor | slice  # of the step
    is_decode: bool
    pages: torch.Tensor  # of their states ``[n, pages]``, int64
    fresh: torch.Tensor | None  # those that begin with this step ``[n]``, bool; ``None`` for none

    def take(self, x: torch.Tensor) -> torch.Tensor:
        """Return the group's rows of ``x`` ``[1, rows, size]``: ``[n, 1, size]`` or ``[1, tokens, size]``."""
        return x[0, self.rows].unsqueeze(1) if self.is_decode else x[:, self.rows]


class StatefulAttention:
    """Attention beside mixers: it attends over the pages of KV, and mixers find the groups of the running step here.

    The first ``num_pages`` of a sequence are those of its states.
    """

    def __init__(self, attention: AttentionKernel, num_pages: int) -> None:
        self.groups: list[_Group] = []
        self._attention = attention
        self._num_pages = num_pages

    def prepare(self, sequences: Sequence[PlannedSequence]) -> StepAttention:
        """Return the attention of a step, and keep its groups."""
        self.groups = []
        decoding: list[tuple[int, PlannedSequence]] = []
        row = 0
        for sequence in sequences:
            if sequence.num_tokens == 1:
                decoding.append((row, sequence))
            else:
                self._add(slice(row, row + sequence.num_tokens), [sequence], is_decode=False)
            row += sequence.num_tokens
        if decoding:
            rows = torch.tensor([row for row, _ in decoding])
            self._add(rows, [sequence for _, sequence in decoding], is_decode=True)
        return self._attention.prepare([replace(one, pages=one.pages[self._num_pages :]) for one in sequences])

    def release(self, seq_ids: Sequence[int]) -> None:
        """Drop the state that attention keeps of sequences; those of mixers go with the pages."""
        self._attention.release(seq_ids)

    def _add(self, rows: torch.Tensor | slice, sequences: Sequence[PlannedSequence], *, is_decode: bool) -> None:
        pages = np.asarray([sequence.pages[: self._num_pages] for sequence in sequences], dtype=np.int64)
        fresh = torch.tensor([sequence.start == 0 for sequence in sequences])
        self.groups.append(_Group(rows, is_decode, torch.from_numpy(pages), fresh if bool(fresh.any()) else None))


class _StatePages:
    """States of one mixer in the pages of sequences.

    ::

        pages of a sequence   |        0        |        1        |  ...  in float32
        states                | conv | recurrent ......... | conv | ...   of the mixers, one behind the other
    """

    def __init__(self, pages: PageTensor, first: int, states: Mapping[StateKey, tuple[int, ...]]) -> None:
        self._pool = pages.flat.view(torch.uint8).view(torch.float32)  # [num_pages, numbers]
        size = self._pool.shape[1]
        self._parts: dict[StateKey, tuple[tuple[int, ...], list[tuple[int, int, int]]]] = {}
        for key, shape in states.items():
            last, pieces = first + prod(shape), []
            while first < last:
                page, start = divmod(first, size)
                stop = min(size, start + last - first)
                pieces.append((page, start, stop))
                first += stop - start
            self._parts[key] = shape, pieces
        self.end = first

    def read(self, group: _Group) -> dict[StateKey, torch.Tensor]:
        """Return copies of the states of a group's sequences, each ``[n, ...]``."""
        found: dict[StateKey, torch.Tensor] = {}
        for key, (shape, pieces) in self._parts.items():
            parts = [self._pool[:, start:stop].index_select(0, group.pages[:, page]) for page, start, stop in pieces]
            state = torch.cat(parts, dim=1).view(-1, *shape)
            if group.fresh is not None:
                state[group.fresh] = 0  # whatever the pages held before
            found[key] = state
        return found

    def write(self, group: _Group, states: Mapping[StateKey, torch.Tensor]) -> None:
        """Keep the states of a group's sequences."""
        for key, (_, pieces) in self._parts.items():
            numbers, first = states[key].reshape(len(group.pages), -1).float(), 0
            for page, start, stop in pieces:
                part = numbers[:, first : first + stop - start]
                self._pool[:, start:stop].index_copy_(0, group.pages[:, page], part)
                first += stop - start


class _AdaptedMixer:
    """Runs a mixer's own code group by group, and its linears on all rows at once.

    The model's linears are replaced already; it is changed in place.
    """

    def __init__(self, model: nn.Module, mixer: Mixer, pages: _StatePages, step: StatefulAttention) -> None:
        module, last = model.get_submodule(mixer.name), model.get_submodule(mixer.output)
        self._forward, self._last = module.forward, last.forward
        self._pages = pages
        self._step = step
        self._group: _Group | None = None  # whose rows are run; ``None`` while linears see all rows
        self._projected: dict[str, torch.Tensor] = {}
        vars(module)["forward"] = self.run
        vars(last)["forward"] = lambda x: x  # ``run`` calls it, on all rows
        for name in mixer.inputs:
            linear = model.get_submodule(name)
            vars(linear)["forward"] = partial(self._project, name, linear.forward)

    def run(self, hidden_states: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        """Return the mixer's output for the step's rows ``[1, rows, size]``."""
        groups = self._step.groups
        with suppress(_AtStates):
            self._forward(hidden_states, cache=_Stop())
        outs: list[torch.Tensor] = []
        try:
            for self._group in groups:
                cache = _States(self._pages.read(self._group))
                outs.append(self._forward(self._group.take(hidden_states), cache=cache))
                self._pages.write(self._group, cache.states)
        finally:
            self._group = None
            self._projected.clear()
        mixed = outs[0].new_empty(1, hidden_states.shape[1], outs[0].shape[-1])
        for group, out in zip(groups, outs, strict=True):
            mixed[0, group.rows] = out.flatten(0, 1)
        result: torch.Tensor = self._last(mixed)
        return result

    def _project(self, name: str, forward: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        """Return a linear's output for all rows, or the part of it that a group has."""
        if self._group is not None:
            return self._group.take(self._projected[name])
        out = self._projected[name] = forward(x)
        return out


def adapt_mixers(
    model: nn.Module,
    mixers: Sequence[Mixer],
    kv_layers: Sequence[int],
    pages: PageTensor,
    base: BaseShape,
    attention: AttentionKernel,
) -> StatefulAttention:
    """Let the mixers of a model, whose linears are replaced already, keep their states in pages; in place.

    Attention layers are numbered by their order among ``kv_layers``: pages have room for theirs alone.

    Returns:
        The attention to run steps with.

    Raises:
        ConfigError: The pages are on a GPU.
    """
    if pages.flat.device.type != "cpu":
        raise ConfigError(
            f"Got a model of type {base.architecture!r} on {pages.flat.device}: layers with a state of each sequence "
            "are served on CPUs only"
        )
    logger.warning("prefix_caching_off model=%s reason=%r", base.name, "states behind a prefix are not kept")
    step, end = StatefulAttention(attention, base.num_state_pages), 0
    for mixer in mixers:
        own = _StatePages(pages, end, mixer.states)
        end = own.end
        _AdaptedMixer(model, mixer, own, step)
    places = {layer: place for place, layer in enumerate(kv_layers)}
    for module in model.modules():
        layer = getattr(module, "layer_idx", None)
        if isinstance(layer, int) and layer in places and not is_mixer(module):
            module.layer_idx = places[layer]  # type: ignore[assignment]
    return step
