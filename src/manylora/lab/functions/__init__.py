"""Isolated functions on devices, in virtual time: cold starts, batches, memory and the ledger.

The decisions are those of `manylora.functions.decisions`; the durations of steps are those of `manylora.core.costs`.
"""

from manylora.lab.functions.setup import FunctionsSetup, LoadTimes
from manylora.lab.functions.simulation import FunctionsRun, FunctionsSimulation

__all__ = ["FunctionsRun", "FunctionsSetup", "FunctionsSimulation", "LoadTimes"]
