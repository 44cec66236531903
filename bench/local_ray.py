"""A Ray cluster of several raylets on this machine, whose nodes can be lost, for benchmarks."""

from __future__ import annotations

import os
from types import TracebackType
from typing import Any

__all__ = ["LocalRay"]

QUICK_DEATHS = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 1000}
"""A node counts as dead after five seconds in place of fifteen, so that its place is filled sooner."""


class LocalRay:
    """A head, and nodes with room for one engine each, as a context manager.

    Args:
        num_nodes: Nodes beside the head.
    """

    def __init__(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes
        self._cluster: Any = None

    def __enter__(self) -> LocalRay:
        """Start the cluster."""
        from ray.cluster_utils import Cluster

        os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 - this is the name
        head = {"num_cpus": 0, "include_dashboard": False, "_system_config": QUICK_DEATHS}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        for _ in range(self._num_nodes):
            self.add_node()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop every node."""
        self._cluster.shutdown()

    @property
    def address(self) -> str:
        """The address of the head."""
        return str(self._cluster.address)

    def add_node(self) -> None:
        """Start a node."""
        self._cluster.add_node(num_cpus=1)

    def lose(self, node: str) -> None:
        """Kill the raylet of a node, named as in ``/status``, with every process of it."""
        begin = node.rpartition("/")[2]
        (lost,) = (one for one in self._cluster.worker_nodes if one.node_id.startswith(begin))
        self._cluster.remove_node(lost, allow_graceful=False)
