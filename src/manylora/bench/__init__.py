"""Measurements people run: a load generator for any OpenAI-compatible server, and our parts against their floors."""

__all__: list[str] = []
