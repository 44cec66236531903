"""Workloads: traces, arrival processes, lengths and the popularity of adapters."""

from manylora.lab.workloads.spec import AdapterSet, WorkloadSpec, make_workload, read_workload_spec
from manylora.lab.workloads.workload import AdapterSpec, RequestSpec, Workload

__all__ = [
    "AdapterSet",
    "AdapterSpec",
    "RequestSpec",
    "Workload",
    "WorkloadSpec",
    "make_workload",
    "read_workload_spec",
]
