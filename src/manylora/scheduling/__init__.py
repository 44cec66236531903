"""Scheduling: one file per policy."""
