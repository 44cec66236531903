"""Figures of a running server: Prometheus metrics, the last minute for people, and the status report."""
