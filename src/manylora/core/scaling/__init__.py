"""The number of replicas: decided by pure code that is told the time, for live and simulated fleets."""
