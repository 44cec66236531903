"""Benchmarks of the command line: a load generator for OpenAI-compatible servers, and parts against their floors."""

__all__: list[str] = []
