"""Capacity planning by simulation: rate per replica, replicas, memory and cost."""

from manylora.lab.planning.load_test import LoadTest, LoadTests, Objective, SearchBudget
from manylora.lab.planning.plan import Cost, Plan, TrafficDemand, make_plan
from manylora.lab.planning.search import Capacity, expected_load_tests, find_capacity

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
