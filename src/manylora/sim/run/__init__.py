"""A simulated run: the engine on a virtual clock, with an executor that completes work when a cost model says so."""
