"""How much hardware a service needs: capacity, replicas, memory and cost, by simulation."""

__all__: list[str] = []
