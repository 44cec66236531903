"""The number of replicas: decided by pure code that is told the time, for live and simulated fleets."""

from manylora.core.scaling.autoscaler import Autoscaler, Scaler, ScalingDecision, ScalingPolicy
from manylora.core.scaling.capacity import ReplicaCapacity, predict_capacity
from manylora.core.scaling.controller import ReplicaPhase, ScalingController, ScalingOrder
from manylora.core.scaling.forecast import RateForecast
from manylora.core.scaling.watch import FleetLoad, LoadWatch, WatchedDispatcher

__all__ = [
    "Autoscaler",
    "FleetLoad",
    "LoadWatch",
    "RateForecast",
    "ReplicaCapacity",
    "ReplicaPhase",
    "Scaler",
    "ScalingController",
    "ScalingDecision",
    "ScalingOrder",
    "ScalingPolicy",
    "WatchedDispatcher",
    "predict_capacity",
]
