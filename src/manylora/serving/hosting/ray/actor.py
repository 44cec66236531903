"""The Ray actor beside an engine: it starts the engine process on its node and reports the end of it.

The engine is a process of its own, the same as on one machine: its exit code tells a crash from a kill, and Ray's
threads do not share its interpreter. The actor's methods are called one at a time, on the main thread of Ray's worker.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from importlib import metadata
from typing import NamedTuple

import msgspec
import zmq

from manylora.serving.hosting.links.process import EngineChild
from manylora.serving.hosting.protocol import EngineSpec, ProcessSetup
from manylora.serving.hosting.sockets import CurveSockets

__all__ = ["CurveKeys", "Door", "EngineActor"]

NUM_WAITING = 16  # connections that may wait until the engine process accepts them


@dataclass(frozen=True, slots=True, kw_only=True)
class Door:
    """The place of an engine, and all that a client needs to recognise it."""

    version: str  # version of this package on the node
    node: str  # the node, as its address and the begin of its id
    host: str
    commands_port: int
    messages_port: int
    public_key: bytes  # the engine's public key, as Z85
    resources: dict[str, float]  # amounts that the node has in all, by name


class CurveKeys(NamedTuple):
    """A pair of keys for CURVE, as Z85."""

    public: bytes
    secret: bytes


class EngineActor:
    """Runs one engine process. It ends with the actor, and the actor with the process that created it."""

    def __init__(self) -> None:
        self._listening: list[socket.socket] = []
        self._secret_key = b""
        self._child: EngineChild | None = None

    def open(self) -> Door:
        """Listen on the node's address with new keys; the secret key stays on the node."""
        import ray

        host, node_id = ray.util.get_node_ip_address(), ray.get_runtime_context().get_node_id()
        self._listening = [_listen(host), _listen(host)]
        public_key, self._secret_key = zmq.curve_keypair()
        commands_port, messages_port = (one.getsockname()[1] for one in self._listening)
        return Door(
            version=metadata.version("manylora"),
            node=f"{host}/{node_id[:8]}",
            host=host,
            commands_port=commands_port,
            messages_port=messages_port,
            public_key=public_key,
            resources=next(one["Resources"] for one in ray.nodes() if one["NodeID"] == node_id),
        )

    def start(self, engine: bytes, client_key: bytes, log_level: int) -> int:
        """Start the engine process and return its id.

        It admits the one client whose public key is ``client_key``; ``engine`` is an ``EngineSpec`` as msgpack.
        """
        commands, messages = (one.fileno() for one in self._listening)
        setup = ProcessSetup(
            engine=msgspec.msgpack.decode(engine, type=EngineSpec),
            sockets=CurveSockets(
                commands_file=commands, messages_file=messages, secret_key=self._secret_key, client_key=client_key
            ),
            log_level=log_level,
        )
        self._child = EngineChild(setup, (commands, messages))
        for one in self._listening:  # the engine's now
            one.close()
        return self._child.pid

    def wait(self) -> int:
        """Wait for the end of the engine process; return its exit code, or minus the number of a signal."""
        assert self._child is not None
        return self._child.wait()


def _listen(host: str) -> socket.socket:
    """Return a socket that listens on a free port of an address."""
    listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listening.bind((host, 0))
    listening.listen(NUM_WAITING)
    return listening
