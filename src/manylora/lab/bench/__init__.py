"""Measurements that users run: load for a server, and a calibration sweep over a live engine."""

__all__: list[str] = []
