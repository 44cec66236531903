"""Records, summaries, tables and plots of runs, the same for live and simulated ones."""

from manylora.lab.measure.recorder import Recorder
from manylora.lab.measure.records import RequestRecord, Timeline
from manylora.lab.measure.summary import (
    Estimate,
    PercentileSummary,
    Slo,
    Summary,
    counted_of,
    gaps_of,
    interval_of_runs,
    percentiles,
    summarise,
)

__all__ = [
    "Estimate",
    "PercentileSummary",
    "Recorder",
    "RequestRecord",
    "Slo",
    "Summary",
    "Timeline",
    "counted_of",
    "gaps_of",
    "interval_of_runs",
    "percentiles",
    "summarise",
]
