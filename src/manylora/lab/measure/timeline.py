"""Gauges, steps and loads of a replica as columns over time, small enough to keep for hours."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from manylora.core.engine.status import EngineStats
from manylora.core.types import Tier

__all__ = ["GAUGES", "Loads", "Steps", "Timeline"]

GAUGES = (
    "num_running",
    "num_waiting",
    "num_free_pages",
    "num_kv_pages",
    "num_prefix_pages",
    "num_adapter_pages",
    "num_resident",
    "num_active",
)
"""The gauges of ``EngineStats`` that are sampled."""


def _column() -> array[float]:
    return array("d")


@dataclass(slots=True)
class Steps:
    """Every step; the columns are equally long.

    Args:
        at: Time of its results, in seconds.
        took_s: Seconds since its launch.
    """

    at: array[float] = field(default_factory=_column)
    took_s: array[float] = field(default_factory=_column)
    num_sequences: array[float] = field(default_factory=_column)
    num_tokens: array[float] = field(default_factory=_column)


@dataclass(slots=True)
class Loads:
    """Every load into one tier that succeeded; the columns are equally long.

    Args:
        at: When it ended, in seconds.
        busy_s: Seconds that the link worked on it, without the time in the link's queue (first in, first out).
        num_evictions: Adapters that left the tier meanwhile.
    """

    at: array[float] = field(default_factory=_column)
    busy_s: array[float] = field(default_factory=_column)
    num_bytes: array[float] = field(default_factory=_column)
    num_evictions: int = 0


@dataclass(slots=True)
class Timeline:
    """One replica over time.

    Args:
        at: When the gauges were sampled, in seconds.
        gauges: A column for each of ``GAUGES``.
        queues: Requests waiting in each of the policy's queues, a row for each sample; the number of queues may change.
        loads: By target tier.
    """

    at: array[float] = field(default_factory=_column)
    gauges: dict[str, array[float]] = field(default_factory=lambda: {name: array("d") for name in GAUGES})
    queues: list[tuple[int, ...]] = field(default_factory=list)
    steps: Steps = field(default_factory=Steps)
    loads: dict[Tier, Loads] = field(default_factory=lambda: {Tier.HOST: Loads(), Tier.DEVICE: Loads()})

    def sample(self, stats: EngineStats, now: float) -> None:
        """Add a sample of the gauges at ``now`` seconds."""
        self.at.append(now)
        for name, column in self.gauges.items():
            column.append(getattr(stats, name))
        self.queues.append(tuple(queue.num_waiting for queue in stats.queues))
