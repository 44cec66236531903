"""Isolated functions on devices, in virtual time: cold starts, batches, memory and the ledger.

The decisions are those of `manylora.functions`; the durations of steps are those of `manylora.costs`.
"""

from manylora.sim.functions.setup import FunctionsSetup, LoadTimes
from manylora.sim.functions.simulation import FunctionsRun, FunctionsSimulation

__all__ = ["FunctionsRun", "FunctionsSetup", "FunctionsSimulation", "LoadTimes"]
