"""Compiled kernels, one package per device family, and the plain matrix product."""
