"""How much hardware a service needs: capacity, replicas, memory and cost, by simulation."""

from manylora.planning.capacity import Capacity, find_capacity
from manylora.planning.load_test import LoadTest, LoadTests, SearchBudget
from manylora.planning.plan import Cost, Demand, Plan, make_plan
from manylora.planning.slo import Objective

__all__ = [
    "Capacity",
    "Cost",
    "Demand",
    "LoadTest",
    "LoadTests",
    "Objective",
    "Plan",
    "SearchBudget",
    "find_capacity",
    "make_plan",
]
