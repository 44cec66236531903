"""Isolated functions on devices, in virtual time: cold starts, batches, memory and the ledger.

`manylora.functions.decisions` decides; `manylora.lab.costs` prices the steps.
"""
