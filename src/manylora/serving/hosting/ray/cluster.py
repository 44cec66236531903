"""A Ray cluster, as the API process uses it: places for engines, and their actors.

Ray's functions block, so all are called on one thread. Ray is imported there, on the first call, and nowhere else but
in the actor.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from importlib.util import find_spec
from typing import Any, TypeVar

import zmq

from manylora.core.config import GIB
from manylora.core.errors import ConfigError, EngineDead, NoPlace
from manylora.core.server_config import FleetConfig
from manylora.serving.hosting.ray.actor import CurveKeys, Door, EngineActor

__all__ = ["RayCluster", "RayPlace", "engine_resources", "engines_on_node"]

T = TypeVar("T")

CONNECT_S = 5.0  # time for the head of a cluster to accept a connection

logger = logging.getLogger(__name__)


def engine_resources(given: Mapping[str, Any], device: str) -> dict[str, float]:
    """Return an engine's amounts by name: ``CPU``, ``GPU``, ``memory`` in bytes, and names of the cluster's own.

    An engine on a GPU takes one by default. ``ConfigError`` if a given amount is not a number above 0.
    """
    resources = {"CPU": 1.0} | ({"GPU": 1.0} if device.startswith("cuda") else {})
    for name, amount in given.items():
        try:
            resources[name] = float(amount)
        except (TypeError, ValueError):
            resources[name] = math.nan
        if not 0 < resources[name] < math.inf:
            raise ConfigError(f"Got --ray-resource {name}={amount}, expected an amount above 0")
    return resources


def engines_on_node(node: Mapping[str, float], each: Mapping[str, float], most: int) -> int:
    """Return how many engines may be on one node, ``most`` at most, for the shares of its cores and its memory.

    ``node`` has the amounts of the node in all, ``each`` those that an engine takes, by name. Ray fills and empties
    nodes later, and an engine keeps its share, so the number is the most for which there is room.
    """
    room = [math.floor(node.get(name, 0.0) / amount + 1e-6) for name, amount in each.items()]
    return max(1, min([most, *room]))


class RayCluster:
    """The cluster of one fleet. For the event loop's thread alone.

    ``resources`` are the amounts that each engine takes of its node. ``ConfigError`` if Ray is not installed, or the
    address cannot be one.
    """

    def __init__(self, fleet: FleetConfig, resources: dict[str, float]) -> None:
        assert fleet.ray is not None
        if find_spec("ray") is None:
            raise ConfigError(f"Got ray = {fleet.ray!r}, and Ray is not installed: pip install 'manylora[ray]'")
        if fleet.ray != "auto" and ("/" in fleet.ray or not fleet.ray.rpartition(":")[2].isdecimal()):
            raise ConfigError(f"Got ray = {fleet.ray!r}, expected auto or HOST:PORT, as 10.0.0.1:6379")
        self.keys = CurveKeys(*zmq.curve_keypair())  # the keys of this process; the secret one does not leave it
        self.resources = resources
        self.labels = {str(key): str(value) for key, value in fleet.ray_labels.items()}
        self.timeout_s = fleet.ray_timeout_s
        self._address = fleet.ray
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ray")
        self._connecting: asyncio.Task[None] | None = None
        self._is_owner = False

    async def connect(self) -> None:
        """Connect to the cluster, once; ``ConfigError`` if there is none at the address."""
        if self._connecting is None:
            self._connecting = asyncio.create_task(self._connect())
        await asyncio.shield(self._connecting)

    async def call(self, work: Callable[[], T]) -> T:
        """Return the result of ``work``, which calls Ray, on Ray's thread; calls are made in order."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def result(self, reference: Any) -> Any:
        """Wait for the result of a remote call; ``EngineDead`` if its actor has ended, or could not start."""
        from ray.exceptions import RayError

        try:
            return await asyncio.wrap_future(reference.future())
        except RayError as error:
            raise EngineDead(" ".join(str(error).split())) from error

    async def close(self) -> None:
        """Leave the cluster; what is left of the fleet there ends."""
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.gather(self._connecting, return_exceptions=True)
        await self.call(self._leave)
        self._thread.shutdown(wait=False)

    def actor_options(self) -> dict[str, Any]:
        """Return the options of an actor with the resources.

        Ray starts no other in its place: the fleet does, and loads adapters before it takes requests.
        """
        wanted = dict(self.resources)
        named = {
            "num_cpus": wanted.pop("CPU", 0),
            "num_gpus": wanted.pop("GPU", 0),
            "memory": wanted.pop("memory", None),
        }
        return {**named, "resources": wanted, "max_restarts": 0}

    def describe_nodes(self) -> str:
        """Return the nodes and their resources, for a message; on Ray's thread."""
        import ray

        alive = [node for node in ray.nodes() if node["Alive"]]
        rows = [f"{node['NodeManagerAddress']}/{node['NodeID'][:8]} {_amounts(node['Resources'])}" for node in alive]
        return f"{len(alive)} nodes have {'; '.join(rows)}; free in all: {_amounts(ray.available_resources())}"

    async def _connect(self) -> None:
        if self._address != "auto":  # Ray would try for minutes, and then end this process
            host, _, port = self._address.rpartition(":")
            try:
                async with asyncio.timeout(CONNECT_S):
                    _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
            except (OSError, TimeoutError) as error:
                reason = str(error) or f"no answer within {CONNECT_S:g} s"
                raise ConfigError(f"Got ray = {self._address!r}, and there is no Ray cluster: {reason}") from None
            writer.close()
        await self.call(self._join)

    def _join(self) -> None:
        import ray

        if ray.is_initialized():  # by the program that this server is a part of
            return
        logging.getLogger("ray").setLevel(logging.ERROR)  # of a signal handler that it cannot set on this thread
        try:
            ray.init(address=self._address, configure_logging=False)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise ConfigError(
                f"Got ray = {self._address!r}, and this machine is not part of such a Ray cluster: "
                f"{str(error).splitlines()[0]} (ray start --head, or --address=HOST:PORT, makes it one)"
            ) from error
        self._is_owner = True
        logger.info("ray_joined nodes=%r", self.describe_nodes())

    def _leave(self) -> None:
        if self._is_owner:
            import ray

            ray.shutdown()


class RayPlace:
    """Resources on one node, and the actor that runs an engine with them. Used once.

    The resources are a placement group of one bundle, so that Ray chooses among all nodes and counts the engine's
    device and memory; its removal ends every process there, even one that is stopped.
    """

    def __init__(self, cluster: RayCluster) -> None:
        self._cluster = cluster
        self._group: Any = None
        self._actor: Any = None

    async def open(self) -> Door:
        """Reserve the resources, start the actor there, and return the sockets on which its engine will listen.

        ``ConfigError`` if there is no cluster, Ray refuses the resources or labels, or the node has another version of
        this package; ``NoPlace`` if Ray found no node in time; ``EngineDead`` if the actor could not start.
        """
        await self._cluster.connect()
        try:
            opening = await self._cluster.call(self._create)
        except ValueError as error:  # an amount like 1.5 GPUs, or no such form of a label
            raise ConfigError(f"Ray refuses the resources or labels of an engine: {error}") from error
        try:
            async with asyncio.timeout(self._cluster.timeout_s):
                door: Door = await self._cluster.result(opening)
        except TimeoutError:
            raise NoPlace(await self._cluster.call(self._why_nowhere)) from None
        if door.version != (here := metadata.version("manylora")):
            raise ConfigError(f"Got manylora {door.version} on node {door.node}, expected {here} as on this machine")
        return door

    async def start(self, engine: bytes, log_level: int) -> int:
        """Start the engine process and return its id; ``EngineDead`` if the actor has ended.

        ``engine`` is an ``EngineSpec`` as msgpack.
        """
        client_key = self._cluster.keys.public
        starting = await self._cluster.call(lambda: self._actor.start.remote(engine, client_key, log_level))
        pid: int = await self._cluster.result(starting)
        return pid

    async def exit_code(self) -> int:
        """Wait for the end of the engine process; return its exit code, or minus the number of a signal.

        ``EngineDead`` if the actor ended first: it was killed, or its node has died.
        """
        waiting = await self._cluster.call(lambda: self._actor.wait.remote())
        code: int = await self._cluster.result(waiting)
        return code

    async def remove(self) -> None:
        """Kill the engine and its actor, and give the resources back; may be called again."""
        await self._cluster.call(self._remove)

    def _create(self) -> Any:
        import ray
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        labels = self._cluster.labels
        selector = {"bundle_label_selector": [labels]} if labels else {}
        self._group = placement_group([dict(self._cluster.resources)], **selector)
        strategy = PlacementGroupSchedulingStrategy(self._group, 0)
        options = self._cluster.actor_options()
        self._actor = ray.remote(EngineActor).options(**options, scheduling_strategy=strategy).remote()
        return self._actor.open.remote()

    def _remove(self) -> None:
        group, self._group, self._actor = self._group, None, None
        if group is not None:
            from ray.util.placement_group import remove_placement_group

            try:
                remove_placement_group(group)
            except Exception as error:  # the cluster is gone, and with it the group
                logger.warning("ray_place_not_removed error=%r", error)

    def _why_nowhere(self) -> str:
        labels = f" on a node with {self._cluster.labels}" if self._cluster.labels else ""
        return (
            f"Ray found no place for an engine within {self._cluster.timeout_s:g} s. "
            f"It needs {_amounts(self._cluster.resources)}{labels}; {self._cluster.describe_nodes()}"
        )


def _amounts(resources: dict[str, float]) -> str:
    """Return resources in one order, without those that Ray makes up for its own use."""
    shown = []
    for name, amount in sorted(resources.items()):
        if name == "memory":
            shown.append(f"memory={amount:.0f} ({amount / GIB:.1f} GiB)")
        elif name != "object_store_memory" and ":" not in name and "_group_" not in name:
            shown.append(f"{name}={amount:g}")
    return ", ".join(shown) or "nothing"
