"""Capacity planning by simulation: rate per replica, replicas, memory and cost."""
