"""The number of replicas: decided by pure code that is told the time, for live and simulated fleets."""

from manylora.scaling.autoscaler import Autoscaler, Scaler, ScalingDecision, ScalingPolicy
from manylora.scaling.capacity import ReplicaCapacity, predict_capacity
from manylora.scaling.controller import Phase, ScalingController, ScalingOrder
from manylora.scaling.forecast import RateForecast
from manylora.scaling.watch import Load, LoadWatch, WatchedDispatcher

__all__ = [
    "Autoscaler",
    "Load",
    "LoadWatch",
    "Phase",
    "RateForecast",
    "ReplicaCapacity",
    "Scaler",
    "ScalingController",
    "ScalingDecision",
    "ScalingOrder",
    "ScalingPolicy",
    "WatchedDispatcher",
    "predict_capacity",
]
