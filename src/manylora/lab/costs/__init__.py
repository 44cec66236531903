"""Prices of simulated steps and loads: rooflines, fitted profiles, calibration."""
