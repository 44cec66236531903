"""The size of a request: one number for its expected duration (the paper's WRS).

::

    degree-2   (A * prompt/max_prompt + B * output/max_output) * adapter/max_adapter        A = 0.4, B = 0.6
    degree-1   (A * prompt/max_prompt + B * output/max_output + adapter/max_adapter) / 2
    output      output/max_output

The largest values are taken from recent requests and change only when the queues do. A request without an adapter
counts as if it had the smallest adapter among them: a factor of 0 would put it ahead of everything, however long it is.

Source: Chameleon, section 4.3.1. It does not define the range of the maxima, the adapter factor of the base, or the
weights of degree 1, where our adapter weighs as much as the other two together, as in degree 2.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from manylora.core.options import CheckedOptions, option

__all__ = ["Demand", "RequestSizer", "SizeOptions"]

PROMPT_WEIGHT, OUTPUT_WEIGHT = 0.4, 0.6


@dataclass(frozen=True, slots=True)
class Demand:
    """The memory that a request needs, in tokens of KV."""

    prompt: int  # its prompt
    output: int  # its predicted answer
    adapter: int  # tokens that would fit in the pages of its adapter; 0 for the base

    @property
    def tokens(self) -> int:
        """The sum, which quotas count."""
        return self.prompt + self.output + self.adapter


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeOptions(CheckedOptions):
    """The measure of size."""

    request_size: str = option(
        "degree-2",
        panel="Scheduling",
        choices=("degree-2", "degree-1", "output"),
        help="Under boost and chameleon: the size of a request, as prompt and answer times the adapter, as their sum, "
        "or as the answer alone.",
    )


class RequestSizer:
    """Measures requests relative to recent requests, by a ``kind``: ``degree-2``, ``degree-1`` or ``output``."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._max_prompt = self._max_output = self._max_adapter = self._least_adapter = 1

    def fit(self, demands: Iterable[Demand]) -> None:
        """Take the largest values, and the smallest adapter, from recent requests."""
        demands = list(demands)
        adapters = [demand.adapter for demand in demands if demand.adapter]
        self._max_prompt = max((demand.prompt for demand in demands), default=1)
        self._max_output = max((demand.output for demand in demands), default=1)
        self._max_adapter = max(adapters, default=1)
        self._least_adapter = min(adapters, default=1)

    def size(self, demand: Demand) -> float:
        """Return a request's size; above 1 if it is larger than all that were fitted."""
        output = demand.output / self._max_output
        if self._kind == "output":
            return output
        length = PROMPT_WEIGHT * demand.prompt / self._max_prompt + OUTPUT_WEIGHT * output
        adapter = (demand.adapter or self._least_adapter) / self._max_adapter
        return length * adapter if self._kind == "degree-2" else (length + adapter) / 2
