"""How much hardware a service needs: capacity, replicas, memory and cost, by simulation."""

from manylora.planning.capacity import Capacity, find_capacity
from manylora.planning.plan import Cost, Demand, Plan, make_plan
from manylora.planning.promise import Promise
from manylora.planning.trial import Effort, Trial, Trials

__all__ = ["Capacity", "Cost", "Demand", "Effort", "Plan", "Promise", "Trial", "Trials", "find_capacity", "make_plan"]
