"""Decisions about isolated functions on shared backbones: pre-loading, batching, offloading, placement, and their bill.

All of it is pure code that is told the time, so that a live controller and a simulation run the same.
"""
