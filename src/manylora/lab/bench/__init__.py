"""Measurements that users run: load for a server, a calibration sweep over a live engine, kernels on this machine."""

__all__: list[str] = []
