"""Simulated runs: the engine on a virtual clock, with an executor that completes work by a cost model."""
