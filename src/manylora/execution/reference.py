"""Answers of transformers and PEFT, one sequence at a time: the reference that a server's answers are compared with.

A server's tokens are given to the reference, so that each is judged after the same tokens before it: one difference
does not make all that follow it look wrong.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

__all__ = ["ComparedAnswer", "Difference", "GivenAnswer", "Reference", "compare"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenAnswer:
    """A server's greedy answer."""

    prompt: tuple[int, ...]  # token ids of its prompt
    tokens: tuple[int, ...]  # its own token ids
    logprobs: tuple[float, ...] | None  # their log-probabilities, ``None`` if the server gave none


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A token on which server and reference differ."""

    position: int  # its place in the answer, from 0
    token: int  # the server's token
    expected: int  # the reference's most likely one
    logprob: float | None  # log-probability of ``token`` by the server, ``None`` if it gave none
    reference: float  # the same by the reference
    best: float  # log-probability of ``expected`` by the reference


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedAnswer:
    """An answer beside the reference."""

    num_tokens: int  # tokens of the answer
    num_equal: int  # those that are the reference's most likely one
    largest_error: float | None  # largest difference of a token's log-probabilities, ``None`` without the server's
    first: Difference | None  # the first difference beyond the tolerance, if there is one


def compare(answer: GivenAnswer, reference: NDArray[np.float32], tolerance: float) -> ComparedAnswer:
    """Compare an answer with the reference's log-probabilities after the same tokens, ``[tokens, vocabulary]``.

    A token differs if its log-probabilities do by more than ``tolerance``, or if it is by more than that less likely
    than the reference's best: of two tokens that are nearly as likely, rounding decides.
    """
    rows = np.arange(len(answer.tokens))
    best = reference.argmax(axis=-1)
    own, most = reference[rows, list(answer.tokens)], reference[rows, best]
    errors = np.zeros_like(own) if answer.logprobs is None else np.abs(np.asarray(answer.logprobs) - own)
    wrong = np.flatnonzero((most - own > tolerance) | (errors > tolerance))
    first = None
    if len(wrong):
        at = int(wrong[0])
        first = Difference(
            position=at,
            token=answer.tokens[at],
            expected=int(best[at]),
            logprob=None if answer.logprobs is None else answer.logprobs[at],
            reference=float(own[at]),
            best=float(most[at]),
        )
    return ComparedAnswer(
        num_tokens=len(rows),
        num_equal=int((best == np.asarray(answer.tokens, dtype=best.dtype)).sum()),
        largest_error=None if answer.logprobs is None else float(errors.max(initial=0.0)),
        first=first,
    )


class Reference:
    """A base with one adapter, by transformers and PEFT, in float32 on the CPU.

    ``ModuleNotFoundError`` if PEFT is not installed.
    """

    def __init__(self, base: str, adapter: str) -> None:
        from peft import PeftModel
        from transformers import AutoConfig

        from manylora.execution.model.load import auto_class

        loaded: Any = auto_class(AutoConfig.from_pretrained(base)).from_pretrained(base, dtype=torch.float32)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # PEFT asks transformers by older names
            self._model: Any = PeftModel.from_pretrained(loaded, adapter).eval()

    @property
    def invocation(self) -> tuple[int, ...]:
        """Tokens that activate the adapter; empty if it is always active."""
        return tuple(getattr(self._model.active_peft_config, "alora_invocation_tokens", None) or ())

    @torch.inference_mode()
    def logprobs(self, answer: GivenAnswer) -> NDArray[np.float32]:
        """Return the log-probabilities of all tokens at each position of an answer, ``[tokens, vocabulary]``."""
        tokens, options = torch.tensor([[*answer.prompt, *answer.tokens]]), {}
        if self.invocation:  # PEFT would look for it in the answer as well, and counts from the end
            from peft.tuners.lora.variants import calculate_alora_offsets

            config, name, prompt = self._model.peft_config, self._model.active_adapter, torch.tensor([answer.prompt])
            [offset] = calculate_alora_offsets(config, name, prompt)
            options["alora_offsets"] = [None if offset is None else offset + len(answer.tokens)]
        logits = self._model(tokens, **options).logits[0, len(answer.prompt) - 1 : -1]
        found: NDArray[np.float32] = logits.float().log_softmax(-1).numpy()
        return found

    def mistakes(self) -> Mapping[str, Callable[[], AbstractContextManager[None]]]:
        """Return mistakes that servers make, and for each a context in which the reference makes it too."""
        found: dict[str, Callable[[], AbstractContextManager[None]]] = {
            "the base without the adapter": self._model.disable_adapter
        }
        layers = [one for one in self._model.modules() if isinstance(getattr(one, "scaling", None), dict)]
        if layers:
            changes: dict[str, Callable[[float, int], float]] = {
                "the adapter with its scale applied twice": lambda scale, rank: scale * scale,
                "the adapter with its scale over the root of its rank, as rsLoRA without that": (
                    lambda scale, rank: scale / math.sqrt(rank)
                ),
                "the adapter with its scale times the root of its rank, as plain LoRA with rsLoRA's": (
                    lambda scale, rank: scale * math.sqrt(rank)
                ),
            }
            found |= {name: partial(_scaled, layers, change) for name, change in changes.items()}
        return found

    def explain(self, answers: Sequence[GivenAnswer], tolerance: float) -> str | None:
        """Return the mistake with which all answers are as the server gave them, if there is one."""
        for name, made in self.mistakes().items():
            with made():
                if all(compare(one, self.logprobs(one), tolerance).first is None for one in answers):
                    return name
        return None


@contextmanager
def _scaled(layers: Sequence[Any], change: Callable[[float, int], float]) -> Iterator[None]:
    kept = [dict(layer.scaling) for layer in layers]
    try:
        for layer in layers:
            layer.scaling.update({name: change(scale, layer.r[name]) for name, scale in layer.scaling.items()})
        yield
    finally:
        for layer, scaling in zip(layers, kept, strict=True):
            layer.scaling.update(scaling)
