"""Metrics of a running server: Prometheus, latency of the last minute, and the status report."""
