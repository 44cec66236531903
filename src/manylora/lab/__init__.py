"""The laboratory: engines on virtual time, workloads, measurements, plans and published evaluations."""
