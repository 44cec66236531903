"""Records, summaries, tables and plots of runs, the same for live and simulated ones."""

from manylora.lab.measure.recorder import Recorder
from manylora.lab.measure.records import RequestRecord
from manylora.lab.measure.statistics import Estimate, PercentileSummary, interval_of_runs, percentiles
from manylora.lab.measure.summary import GroupSummary, Slo, Summary, gaps_of, summarise
from manylora.lab.measure.timeline import GAUGES, Loads, Steps, Timeline

__all__ = [
    "GAUGES",
    "Estimate",
    "GroupSummary",
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
