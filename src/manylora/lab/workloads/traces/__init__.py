"""Readers of public traces: one file per family, typed rows and arrays, errors that say where."""

from manylora.lab.workloads.traces.requests import RequestTrace, read_requests

__all__ = ["RequestTrace", "read_requests"]
