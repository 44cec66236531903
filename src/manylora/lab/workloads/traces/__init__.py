"""Readers of public traces: one file per family, typed rows and arrays, errors that say where."""
