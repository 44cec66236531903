"""Simulation: the setup, target and scenario of simulated engines; the runs are in ``run/``."""
