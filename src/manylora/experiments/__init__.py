"""The published evaluations and ours, as data: what to run, what was published, and what came out."""

__all__: list[str] = []
