"""Rates per second between two reports of a server."""

from __future__ import annotations

from dataclasses import dataclass

from manylora.serving.metrics.status_report import StatusReport

__all__ = ["Rates", "rates_between"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Rates per second between two reports."""

    tokens: float
    steps: float
    loads: float
    evictions: float
    preemptions: float


def rates_between(older: StatusReport, newer: StatusReport) -> Rates | None:
    """Return the rates between two reports; ``None`` without an engine, or unless the same engines answered both."""
    before, after, elapsed_s = older.engine, newer.engine, newer.time - older.time

    def engines(report: StatusReport) -> tuple[float, int, list[int]]:
        answered = [row.index for row in report.replicas if row.num_running is not None]
        return report.started_at, report.num_restarts, answered

    is_same = engines(older) == engines(newer)
    if before is None or after is None or not is_same or elapsed_s <= 0:
        return None

    def rate(name: str) -> float:
        change: int = getattr(after, name) - getattr(before, name)
        return change / elapsed_s

    return Rates(
        tokens=rate("num_generated_tokens"),
        steps=rate("num_steps"),
        loads=rate("num_loads"),
        evictions=rate("num_evictions"),
        preemptions=rate("num_preemptions"),
    )
