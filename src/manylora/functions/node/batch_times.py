"""The times of a function's batches, learned while it serves, and the window that follows from them."""

from __future__ import annotations

from manylora.functions.decisions.batching import BatchWindow, FirstTokenFit, FirstTokenTime
from manylora.functions.deployment import FunctionSpec

__all__ = ["BatchTimes"]

FIRST_GUESS = FirstTokenTime(alone_s=0.1, each_s=0.02)


class BatchTimes:
    """Times batches from their leaving to the last of their first tokens, one at a time.

    Args:
        spec: The function.
    """

    def __init__(self, spec: FunctionSpec) -> None:
        self._spec = spec
        self._fit = FirstTokenFit(FIRST_GUESS)
        self._batch: tuple[float, int, int, int] | None = None  # begun at, size, first tokens to come, batches
        self._is_first = True

    @property
    def window(self) -> BatchWindow:
        """The rule by which waiting requests leave."""
        return BatchWindow(self._fit.time, self._spec.slo_s, self._spec.max_batch)

    def begin(self, now: float, size: int, num_batches: int) -> None:
        """Note that a batch leaves for an engine that works on no other request."""
        self._batch = now, size, size, num_batches

    def note(self, now: float, num_first_tokens: int) -> float | None:
        """Note first tokens; return the time of the batch if it has them all now and is the first of a process."""
        if self._batch is None:
            return None
        begun_at, size, left, num_batches = self._batch
        if left > num_first_tokens:
            self._batch = begun_at, size, left - num_first_tokens, num_batches
            return None
        self._batch = None
        took_s = now - begun_at
        if self._is_first:  # it reads the adapter's weights as well, and says little of the next
            self._is_first = False
            return took_s
        self._fit.observe(size, took_s / num_batches)
        return None

    def restart(self) -> None:
        """Note that the process has ended."""
        self._batch, self._is_first = None, True
