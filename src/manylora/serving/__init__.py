"""Serving over HTTP and in Python: the API, its text and metrics, and the processes that host engines."""
