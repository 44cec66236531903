"""The engine: decides each step. Its loop drives one, live or simulated."""
