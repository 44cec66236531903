"""Capacity planning by simulation: rate per replica, replicas, memory and cost."""

from manylora.planning.capacity import Capacity, expected_load_tests, find_capacity
from manylora.planning.load_test import LoadTest, LoadTests, SearchBudget
from manylora.planning.plan import Cost, Plan, TrafficDemand, make_plan
from manylora.planning.slo import Objective

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
