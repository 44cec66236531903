"""Execution: the torch executor; the only package that imports torch."""
