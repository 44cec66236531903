"""Isolated functions on devices, in virtual time: cold starts, batches, memory and the ledger.

`manylora.functions.decisions` decides; `manylora.lab.costs` prices the steps.
"""

from manylora.lab.functions.setup import FunctionsSetup, LoadTimes
from manylora.lab.functions.simulation import FunctionsRun, FunctionsSimulation

__all__ = ["FunctionsRun", "FunctionsSetup", "FunctionsSimulation", "LoadTimes"]
