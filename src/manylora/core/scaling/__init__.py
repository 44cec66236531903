"""The number of replicas: decided by pure code that is told the time, for live and simulated fleets."""

from manylora.core.scaling.autoscaler import Scaler, ScalingDecision, ScalingPolicy
from manylora.core.scaling.controller import ReplicaPhase, ScalingController
from manylora.core.scaling.watch import LoadWatch, WatchedDispatcher

__all__ = [
    "LoadWatch",
    "ReplicaPhase",
    "Scaler",
    "ScalingController",
    "ScalingDecision",
    "ScalingPolicy",
    "WatchedDispatcher",
]
