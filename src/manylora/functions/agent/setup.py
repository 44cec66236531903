"""The set-up of an agent's process, which reads it from its standard input."""

from __future__ import annotations

import logging

import msgspec

from manylora.core.config import ServerConfig
from manylora.functions.controller.tls import TlsFiles

__all__ = ["AgentSetup"]


class AgentSetup(msgspec.Struct, frozen=True, kw_only=True):
    """The set-up of an agent.

    Args:
        node: The node's name.
        controller: Address of the controller.
        token: Its token; ``None`` for none.
        tls: This node's certificate for it; ``None`` for none.
        server: The HTTP server in front of the functions.
        folder: Where sockets of backbones are made.
        socket: Descriptor of its listening socket; ``None`` to bind one.
        lifeline: Descriptor of a pipe with whose end this process and its backbones end; ``None`` for none.
    """

    node: str
    controller: str
    token: str | None
    tls: TlsFiles | None = None
    server: ServerConfig
    folder: str
    socket: int | None = None
    lifeline: int | None = None
    log_level: int = logging.INFO
