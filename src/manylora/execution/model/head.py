"""The model's head on any rows of the last forward pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn

__all__ = ["RecordedPass"]


class RecordedPass:
    """Records the output of a model's decoder, and computes logits of more of its rows.

    Transformers' causal models call their decoder, choose rows, call the head on them, and may scale or cap the
    logits. Here the decoder is replaced, for the length of a call, by one that returns its recorded output. So the
    model's own code makes the logits of a few rows at a time: those of all rows of a long prompt would take gigabytes.
    The probe checks each model that both ways give the same logits.

    Args:
        model: A causal language model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._decoder = cast(nn.Module, model.base_model)
        self._output: Any = None

    @property
    def has_output(self) -> bool:
        """Whether a forward pass was recorded."""
        return self._output is not None

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the forward pass inside."""
        hook = self._decoder.register_forward_hook(self._record)
        try:
            yield
        finally:
            hook.remove()

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the logits ``[n, vocab]`` of the recorded rows ``rows`` ``[n]`` int64."""
        assert self._output is not None, "no forward pass was recorded"
        attributes = vars(self._decoder)
        before = attributes.get("forward")
        attributes["forward"] = lambda *args, **kwargs: self._output
        try:
            output = self._model(input_ids=rows[None, :1], use_cache=False, logits_to_keep=rows)
        finally:
            if before is None:
                del attributes["forward"]
            else:
                attributes["forward"] = before
        logits: torch.Tensor = output.logits
        return logits[0]

    def forget(self) -> None:
        """Let go of the recorded output."""
        self._output = None

    def _record(self, module: nn.Module, args: tuple[Any, ...], output: object) -> None:
        self._output = output
