"""Records, summaries, tables and plots of runs, the same for live and simulated ones."""

from manylora.measure.recorder import Recorder
from manylora.measure.records import RequestRecord
from manylora.measure.statistics import Interval, PercentileSummary, interval_of_runs, percentiles
from manylora.measure.summary import GroupSummary, Slo, Summary, gaps_of, summarise
from manylora.measure.timeline import GAUGES, Loads, Steps, Timeline

__all__ = [
    "GAUGES",
    "GroupSummary",
    "Interval",
    "Loads",
    "PercentileSummary",
    "Recorder",
    "RequestRecord",
    "Slo",
    "Steps",
    "Summary",
    "Timeline",
    "gaps_of",
    "interval_of_runs",
    "percentiles",
    "summarise",
]
