"""Simulation: the engine on a virtual clock and a cost model."""
