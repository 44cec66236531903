"""An engine on a node of a Ray cluster, connected by ZeroMQ with CURVE.

Ray says when the engine process or its actor has ended. The connection says it sooner when a node is lost. Either ends
the link.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from manylora.core.errors import EngineDead
from manylora.serving.hosting.links.process import LAST_MESSAGES_S, Inbox, ending_of
from manylora.serving.hosting.protocol import Command, Ending, EngineSpec, Message, encode
from manylora.serving.hosting.ray.actor import CurveKeys, Door
from manylora.serving.hosting.ray.cluster import RayCluster, RayPlace, engines_on_node
from manylora.serving.hosting.sockets import MAX_FRAME_BYTES, endpoint

__all__ = ["EngineConnection", "RayLink"]

REPORT_S = 2.0
"""Time for the exit code of an engine whose connection is lost. If its node lives, the code comes at once."""

LOST_EVENTS = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)

KEEP_ALIVE = {
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: 2,
    zmq.TCP_KEEPALIVE_INTVL: 2,
    zmq.TCP_KEEPALIVE_CNT: 4,
    zmq.TCP_MAXRT: 10_000,
}
"""A node without power is noticed after ten seconds. Kernels answer, so that a stopped process on either side is not
taken for a lost node: the watchdog sees to engines that hang."""


class EngineConnection:
    """Two connections to one engine. They are never made again: after a loss, messages may be missing.

    For the event loop's thread alone.

    No other process can take the place of the engine, whose public key the door has.
    """

    def __init__(self, door: Door, keys: CurveKeys, deliver: Callable[[Sequence[Message]], None]) -> None:
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Done once the network or the engine has closed a connection: the event, in words."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._monitors: dict[zmq.Socket[bytes], zmq.Socket[bytes]] = {}  # by the socket that each reports about
        messages = self._connect(zmq.PULL, door, door.messages_port, keys)
        self._commands = self._connect(zmq.PUSH, door, door.commands_port, keys)
        self._inbox = Inbox(messages, deliver)
        self.broken = self._inbox.broken

    def send(self, command: Command) -> None:
        """Send a command; one to an engine that is lost is dropped."""
        if not self._commands.closed:
            with contextlib.suppress(zmq.Again):
                self._commands.send(encode(command), zmq.NOBLOCK)

    def close(self) -> None:
        """Close both connections; may be called again."""
        if self._commands.closed:  # two threads that end one context are undefined in ZeroMQ
            return
        loop = asyncio.get_running_loop()
        for socket, monitor in self._monitors.items():
            loop.remove_reader(monitor.fileno())
            # While the socket is open: an event without a reader would hold up ZeroMQ's thread for ever.
            socket.disable_monitor()
            monitor.close(linger=0)
        self._monitors.clear()
        self._inbox.close()
        self._commands.close(linger=0)
        # After a refused handshake ZeroMQ sometimes never ends its context, and nothing here waits for that.
        threading.Thread(target=self._context.term, name="connection-end", daemon=True).start()

    def _connect(self, kind: int, door: Door, port: int, keys: CurveKeys) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.set_hwm(0)
        socket.curve_publickey, socket.curve_secretkey = keys
        socket.curve_serverkey = door.public_key
        socket.setsockopt(zmq.IPV6, int(":" in door.host))
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        socket.setsockopt(zmq.RECONNECT_IVL, -1)
        socket.setsockopt(zmq.HANDSHAKE_IVL, 0)  # the port listens before the engine process answers
        for option, value in KEEP_ALIVE.items():
            socket.setsockopt(option, value)
        monitor = socket.get_monitor_socket(LOST_EVENTS)
        self._monitors[socket] = monitor
        asyncio.get_running_loop().add_reader(monitor.fileno(), self._note_loss, monitor)
        self._note_loss(monitor)  # ZeroMQ signals only the change from empty
        socket.connect(endpoint(door.host, port))
        return socket

    def _note_loss(self, monitor: zmq.Socket[bytes]) -> None:
        with contextlib.suppress(zmq.Again):
            while True:
                event = zmq.Event(recv_monitor_message(monitor, zmq.NOBLOCK)["event"])
                if not self.lost.done():
                    self.lost.set_result(str(event.name).lower())


class RayLink:
    """An ``EngineLink`` to a new engine on a node that Ray chooses.

    The engines of its machine are those that the node has room for, ``num_engines`` at most.
    """

    def __init__(self, engine: EngineSpec, cluster: RayCluster) -> None:
        assert isinstance(engine.builder, str), "a function cannot be sent to another process"
        self.pid: int | None = None  # the engine's process, on its node; ``None`` before it has started
        self.node: str | None = None  # the node: its address and the begin of its id; ``None`` before Ray has chosen it
        self._engine = engine
        self._cluster = cluster
        self._place = RayPlace(cluster)
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
