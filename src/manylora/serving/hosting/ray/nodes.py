"""The nodes of a Ray cluster, and an actor on a node of the caller's choice."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from manylora.core.errors import ConfigError
from manylora.serving.hosting.ray.cluster import RayCluster

__all__ = ["NodeActor", "RayNode", "fitting_nodes", "own_address"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RayNode:
    """A node that is alive, by the cluster's id."""

    node_id: str
    address: str

    @property
    def name(self) -> str:
        """Its address, and the begin of its id."""
        return f"{self.address}-{self.node_id[:8]}"


async def fitting_nodes(cluster: RayCluster) -> list[RayNode]:
    """Return the nodes with the labels and, were they idle, the resources of the cluster's settings."""
    await cluster.connect()

    def find() -> list[RayNode]:
        import ray

        return [
            RayNode(one["NodeID"], one["NodeManagerAddress"])
            for one in ray.nodes()
            if one["Alive"]
            and all(one["Resources"].get(name, 0.0) >= amount for name, amount in cluster.resources.items())
            and cluster.labels.items() <= one.get("Labels", {}).items()
        ]

    return await cluster.call(find)


async def own_address(cluster: RayCluster) -> str:
    """Return the address of this machine in the cluster; errors as of ``fitting_nodes``."""
    await cluster.connect()

    def find() -> str:
        import ray

        return str(ray.util.get_node_ip_address())

    return await cluster.call(find)


@dataclass(eq=False)
class NodeActor:
    """An actor on one node, which ends with this process."""

    cluster: RayCluster  # its resources are taken of the node
    kind: type  # the class of the actor, which every node can import
    node: RayNode  # if it is lost, so is the actor
    arguments: tuple[Any, ...] = ()  # those of the actor's construction
    num_threads: int = 1  # methods that run at once
    _actor: Any = None

    async def call(self, method: str, *arguments: Any) -> Any:
        """Return the result of a method; the first call creates the actor.

        ``ConfigError`` if Ray refuses the resources; ``EngineDead`` if the actor has ended, or the method failed.
        """
        try:
            begun = await self.cluster.call(lambda: self._begin(method, arguments))
        except ValueError as error:  # an amount like 1.5 GPUs
            raise ConfigError(f"Ray refuses the resources of an agent: {error}") from error
        return await self.cluster.result(begun)

    async def remove(self) -> None:
        """Kill the actor; may be called again."""
        await self.cluster.call(self._kill)

    def _begin(self, method: str, arguments: tuple[Any, ...]) -> Any:
        if self._actor is None:
            import ray
            from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

            strategy = NodeAffinitySchedulingStrategy(self.node.node_id, soft=False)
            options = {**self.cluster.actor_options(), "max_concurrency": self.num_threads}
            kind = ray.remote(self.kind).options(**options, scheduling_strategy=strategy)
            self._actor = kind.remote(*self.arguments)
        return getattr(self._actor, method).remote(*arguments)

    def _kill(self) -> None:
        actor, self._actor = self._actor, None
        if actor is not None:
            import ray

            try:
                ray.kill(actor)
            except Exception as error:  # the cluster is away, or gone and the actor with it
                logger.warning("ray_actor_not_killed node=%s error=%r", self.node.name, error)
