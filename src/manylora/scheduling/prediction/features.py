"""What a trained predictor looks at: a handful of numbers known on arrival, the same in training and in service."""

from __future__ import annotations

from collections import OrderedDict
from math import log, log1p

__all__ = ["FEATURES", "AdapterMeans", "request_features"]

FEATURES = ("log_prompt", "log_cap", "has_cap", "is_greedy", "has_schema", "adapter_mean", "adapter_count")

PRIOR_COUNT = 5.0
MAX_ADAPTERS = 20_000


class AdapterMeans:
    """Mean logarithm of each adapter's answers so far, drawn towards the mean of all where there are few.

    Args:
        mean: Of all answers, to begin with.
        count: How many answers that stands for.
        by_name: Sum and count per adapter, to begin with.
    """

    def __init__(
        self, mean: float = 5.0, count: float = 1.0, by_name: dict[str, tuple[float, int]] | None = None
    ) -> None:
        self.total = mean * count
        self.count = count
        self.by_name: OrderedDict[str, tuple[float, int]] = OrderedDict(by_name or {})

    def of(self, name: str) -> tuple[float, int]:
        """Return an adapter's mean, and the number of answers behind it."""
        total, count = self.by_name.get(name, (0.0, 0))
        return (total + PRIOR_COUNT * self.total / self.count) / (count + PRIOR_COUNT), count

    def add(self, name: str, num_tokens: int) -> None:
        """Take in an answer."""
        value = log(max(1, num_tokens))
        self.total += value
        self.count += 1
        total, count = self.by_name.get(name, (0.0, 0))
        self.by_name[name] = (total + value, count + 1)
        self.by_name.move_to_end(name)
        if len(self.by_name) > MAX_ADAPTERS:
            self.by_name.popitem(last=False)


def request_features(
    *,
    prompt_tokens: int,
    max_tokens: int | None,
    temperature: float,
    has_schema: bool,
    adapter: str,
    means: AdapterMeans,
) -> list[float]:
    """Return the features of a request, in the order of ``FEATURES``."""
    mean, count = means.of(adapter)
    return [
        log1p(prompt_tokens),
        log1p(max_tokens or 0),
        float(max_tokens is not None),
        float(temperature == 0.0),
        float(has_schema),
        mean,
        log1p(count),
    ]
