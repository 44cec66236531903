"""What is asked of an engine: traces, arrival processes, lengths, and who asks for which adapter."""

from manylora.workloads.workload import AdapterSpec, RequestSpec, Workload

__all__ = ["AdapterSpec", "RequestSpec", "Workload"]
