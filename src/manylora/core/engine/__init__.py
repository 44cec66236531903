"""The engine: decides each step and each load. One loop drives it, live or simulated."""
