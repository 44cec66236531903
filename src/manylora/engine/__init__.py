"""The engine: decides each step, and the one loop that serves and simulates."""
