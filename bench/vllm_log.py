"""What an engine of vLLM did: requests, loads and steps on one clock, and the log of it to which prices are fitted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from manylora.core.adapters.shape import BaseShape
from manylora.core.costs.features import StepFeatures
from manylora.core.costs.step_log import LoadRecord, LogHeader, LogLine, StepRecord
from manylora.core.types import AdapterVersion, Tier

__all__ = ["Load", "Served", "Step", "log_lines"]

Load = tuple[str, str, int, float, float]
"""Kind (``read`` or ``copy``), adapter, bytes, begin and end in seconds."""


class Step(NamedTuple):
    """A step of an engine that was timed.

    Args:
        turn: Time of the turn that planned it, in seconds.
        ended: Time of the turn that read its results.
        device_s: Its duration without the time since the step before it.
        spent_s: Processor time of the process, without that of loads.
        features: Its content.
    """

    turn: float
    ended: float
    device_s: float
    spent_s: float
    features: StepFeatures


class Served(NamedTuple):
    """What was served, live or simulated, on one clock.

    Args:
        asked: Adapter and time of arrival, by request.
        times: The time of each token, by request.
        loads: The loads.
        took_s: Duration of all of it.
    """

    asked: dict[str, tuple[str, float]]
    times: dict[str, list[float]]
    loads: list[Load]
    took_s: float


def log_lines(
    base: BaseShape,
    versions: Mapping[str, AdapterVersion],
    steps: Sequence[Step],
    loads: Sequence[Load],
    *,
    waits: bool,
) -> list[LogLine]:
    """Return the log of an engine: its loads, and then its steps.

    Args:
        base: The model.
        versions: Of the adapters, by name.
        steps: In order of time.
        loads: Likewise.
        waits: Whether a step waits for the loads that begin in it, so that its own time is the rest.
    """
    begun = [(load[3], load[4] - load[3]) for load in loads] if waits else []
    lines: list[LogLine] = [LogHeader(base=base, num_pages=2), *(_load_line(versions, load) for load in loads)]
    for number, step in enumerate(steps):
        loaded_s = sum(took_s for at, took_s in begun if step.turn <= at < step.ended)
        record = StepRecord(
            step_id=number,
            launched_at=step.turn + loaded_s,
            ended_at=step.ended,
            device_s=step.device_s - loaded_s,
            features=step.features,
        )
        lines.append(record)
    return lines


def _load_line(versions: Mapping[str, AdapterVersion], load: Load) -> LoadRecord:
    kind, name, _, began, ended = load
    return LoadRecord(
        adapter=versions[name].key,
        tier=Tier.HOST if kind == "read" else Tier.DEVICE,
        num_bytes=versions[name].disk_bytes if kind == "read" else versions[name].host_bytes,
        launched_at=began,
        ended_at=ended,
        device_s=ended - began,
    )
