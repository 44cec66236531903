"""From events to figures: records, summaries, tables and plots, the same for live and simulated runs."""

from manylora.measure.records import RequestRecord

__all__ = ["RequestRecord"]
