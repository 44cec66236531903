"""The two sockets of an engine process: commands arrive on one, messages leave on the other.

On one machine they are Unix sockets in a private directory. Across machines they are TCP sockets, encrypted and
authenticated by CURVE: the engine admits the one client whose public key it was told, and the client knows the engine's
public key. A connection without the right keys gets no further than the handshake, whatever it sends.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from pathlib import Path
from typing import NamedTuple, TypeAlias

import msgspec
import zmq
from zmq.utils import z85

__all__ = ["MAX_FRAME_BYTES", "CurveSockets", "EngineSockets", "OpenSockets", "UnixSockets", "endpoint", "open_sockets"]

MAX_FRAME_BYTES = 64 << 20  # longest frame on a TCP socket; a longer one ends the connection
ZAP_ADDRESS = "inproc://zeromq.zap.01"  # libzmq asks there whether it may admit a client


class UnixSockets(msgspec.Struct, frozen=True, tag="unix"):
    """Sockets in a directory that the API process has made, and that this machine's other users cannot enter."""

    directory: str

    @property
    def commands(self) -> str:
        """Return the address that the engine binds."""
        return f"ipc://{Path(self.directory) / 'down'}"

    @property
    def messages(self) -> str:
        """Return the address that the API process binds."""
        return f"ipc://{Path(self.directory) / 'up'}"


class CurveSockets(msgspec.Struct, frozen=True, tag="curve", kw_only=True):
    """TCP sockets that listen already, and the keys of both ends; the API process connects to both."""

    commands_file: int  # descriptor of the socket for commands, which the engine process inherits
    messages_file: int  # descriptor of the socket for messages, likewise
    secret_key: bytes  # the engine's secret key, as Z85
    client_key: bytes  # the public key of the API process, as Z85


EngineSockets: TypeAlias = UnixSockets | CurveSockets


class OpenSockets(NamedTuple):
    """The engine's sockets: commands in, messages out. Each may move to one other thread before its first use."""

    commands: zmq.Socket[bytes]
    messages: zmq.Socket[bytes]


def open_sockets(context: zmq.Context[zmq.Socket[bytes]], sockets: EngineSockets) -> OpenSockets:
    """Open the engine's end.

    A slow API process does not block a step, because no queue has a limit. Before the API process has connected, a
    message over TCP waits for it.
    """
    commands, messages = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    for one in (commands, messages):
        one.set_hwm(0)
    if isinstance(sockets, UnixSockets):
        commands.bind(sockets.commands)
        messages.connect(sockets.messages)
    else:
        _admit_only(context, sockets.client_key)
        for one, file in ((commands, sockets.commands_file), (messages, sockets.messages_file)):
            one.curve_server = 1
            one.curve_secretkey = sockets.secret_key
            one.zap_domain = b"manylora"
            one.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without an answer to the question, no client is admitted
            one.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
            with socket.socket(fileno=file) as listening:
                host, port = listening.getsockname()[:2]
                listening.detach()
            one.setsockopt(zmq.IPV6, int(":" in host))
            one.setsockopt(zmq.USE_FD, file)
            one.bind(endpoint(host, port))
    return OpenSockets(commands, messages)


def endpoint(host: str, port: int) -> str:
    """Return ZeroMQ's name of a TCP address."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def _admit_only(context: zmq.Context[zmq.Socket[bytes]], client_key: bytes) -> None:
    """Admit clients with one public key to the sockets of a context, until it is terminated."""
    asked = context.socket(zmq.REP)
    asked.bind(ZAP_ADDRESS)
    key = z85.decode(client_key)

    def answer() -> None:
        with contextlib.suppress(zmq.ContextTerminated):
            while True:
                version, number, _domain, _address, _identity, mechanism, *credentials = asked.recv_multipart()
                is_known = mechanism == b"CURVE" and credentials == [key]
                status = (b"200", b"") if is_known else (b"400", b"unknown key")
                asked.send_multipart([version, number, *status, b"", b""])
        asked.close(linger=0)

    threading.Thread(target=answer, name="admission", daemon=True).start()
