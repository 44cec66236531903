"""An engine on a node of a Ray cluster, connected by ZeroMQ with CURVE.

Ray says when the engine process or its actor has ended. The connection says it sooner when a node is lost. Either ends
the link.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from manylora.core.errors import EngineDead
from manylora.serving.hosting.links.child import ending_of
from manylora.serving.hosting.protocol import Command, Ending, EngineSpec, Message, encode
from manylora.serving.hosting.ray.cluster import RayCluster
from manylora.serving.hosting.ray.connection import EngineConnection
from manylora.serving.hosting.ray.resources import engines_on_node

__all__ = ["RayLink"]

LAST_MESSAGES_S = 0.2

REPORT_S = 2.0
"""Time for the exit code of an engine whose connection is lost. If its node lives, the code comes at once."""


class RayLink:
    """An ``EngineLink`` to a new engine on a node that Ray chooses.

    Args:
        engine: The engine. The engines of its machine are those that the node has room for, ``num_engines`` at most.
        cluster: The cluster.
    """

    def __init__(self, engine: EngineSpec, cluster: RayCluster) -> None:
        assert isinstance(engine.builder, str), "a function cannot be sent to another process"
        self.pid: int | None = None
        """The engine's process, on its node; ``None`` before it has started."""
        self.node: str | None = None
        """The node: its address and the begin of its id; ``None`` before Ray has chosen it."""
        self._engine = engine
        self._cluster = cluster
        self._place = cluster.place()
        self._connection: EngineConnection | None = None
        self._exit: asyncio.Task[Ending] | None = None
        self._is_stopped = False

    async def start(self, deliver: Callable[[Sequence[Message]], None]) -> None:
        """Let Ray place the engine, connect to it and start it."""
        door = await self._place.open()
        if self._is_stopped:
            await self._place.remove()
            raise EngineDead("The engine was stopped before it started.")
        self.node = door.node
        self._connection = EngineConnection(door, self._cluster.keys, deliver)
        config = self._engine.config
        num_engines = engines_on_node(door.resources, self._cluster.resources, config.num_engines)
        engine = msgspec.structs.replace(self._engine, config=replace(config, num_engines=num_engines))
        level = logging.getLogger().getEffectiveLevel()
        self.pid = await self._place.start(encode(engine), level)
        self._exit = asyncio.create_task(self._wait_for_exit())

    def send(self, command: Command) -> None:
        """Send a command."""
        if self._connection is not None:
            self._connection.send(command)

    async def closed(self) -> Ending:
        """Wait until the engine ends, its node is lost, or it sends a message that cannot be decoded."""
        assert self._exit is not None
        assert self._connection is not None
        lost, broken = self._connection.lost, self._connection.broken
        waiting: list[asyncio.Future[Any]] = [self._exit, lost, broken]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if not broken.done():
            await asyncio.wait({self._exit}, timeout=REPORT_S)
        if self._exit.done():
            await asyncio.sleep(LAST_MESSAGES_S)  # its last messages are still arriving
            return self._exit.result()
        if broken.done():
            return Ending(f"lost the connection to {self._name}: {broken.result()}")
        return Ending(f"lost the connection to {self._name}: {lost.result()}", is_external=True)

    async def stop(self) -> None:
        """Kill the engine, give its resources back and close the connection."""
        self._is_stopped = True
        await self._place.remove()
        if self._connection is not None:
            self._connection.close()
        if self._exit is not None:  # the removal ends it at once, unless the cluster is gone
            await asyncio.wait({self._exit}, timeout=REPORT_S)
            self._exit.cancel()

    @property
    def _name(self) -> str:
        return f"engine process {self.pid} on node {self.node}"

    async def _wait_for_exit(self) -> Ending:
        try:
            return ending_of(await self._place.exit_code(), self._name)
        except EngineDead as error:
            return Ending(f"{self._name} ended with its actor: {error}", is_external=True)
