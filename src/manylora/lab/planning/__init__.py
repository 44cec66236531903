"""Capacity planning by simulation: rate per replica, replicas, memory and cost."""

from manylora.lab.planning.capacity import Capacity, expected_load_tests, find_capacity
from manylora.lab.planning.load_test import LoadTest, LoadTests, SearchBudget
from manylora.lab.planning.plan import Cost, Plan, TrafficDemand, make_plan
from manylora.lab.planning.slo import Objective

__all__ = [
    "Capacity",
    "Cost",
    "LoadTest",
    "LoadTests",
    "Objective",
    "Plan",
    "SearchBudget",
    "TrafficDemand",
    "expected_load_tests",
    "find_capacity",
    "make_plan",
]
