"""The agent's process: ``python -m manylora.agent.process``, with its set-up on standard input."""

from __future__ import annotations

import logging
import os
import socket
import sys
from pathlib import Path

import msgspec

from manylora.agent.agent import Agent
from manylora.config import ServerConfig
from manylora.controller.client import ControllerClient
from manylora.hosting.logs import configure_logging
from manylora.server.listening import bind, run_until_stopped

__all__ = ["AgentSetup", "run_agent"]

SHARE_OF_AVAILABLE = 0.8


class AgentSetup(msgspec.Struct, frozen=True, kw_only=True):
    """The set-up of an agent.

    Args:
        node: The node's name.
        controller: Address of the controller.
        token: Its token; ``None`` for none.
        server: The HTTP server in front of the functions.
        folder: Where sockets of backbones are made.
        memory_bytes: Memory for backbones and functions; ``None`` for most of the memory that is available.
        socket: Descriptor of its listening socket; ``None`` to bind one.
        lifeline: Descriptor of a pipe with whose end this process and its backbones end; ``None`` for none.
    """

    node: str
    controller: str
    token: str | None
    server: ServerConfig
    folder: str
    memory_bytes: int | None = None
    socket: int | None = None
    lifeline: int | None = None
    log_level: int = logging.INFO


def run_agent(setup: AgentSetup) -> int:
    """Serve until SIGTERM or SIGINT; return the exit code.

    Raises:
        ManyloraError: It cannot listen, a backbone is wrong, or the controller refuses it.
    """
    logging.getLogger("httpx").setLevel(logging.WARNING)  # a line for each report

    def make() -> Agent:
        bound = (
            bind(setup.server.host, setup.server.port) if setup.socket is None else socket.socket(fileno=setup.socket)
        )
        return Agent(
            setup.node,
            ControllerClient(setup.controller, setup.token),
            setup.server,
            bound,
            Path(setup.folder),
            memory_bytes=setup.memory_bytes or int(SHARE_OF_AVAILABLE * _available_bytes()),
            lifeline=setup.lifeline,
        )

    def say_ready(agent: Agent) -> None:
        node = agent.node
        print(
            f"manylora serves {len(node.functions)} functions on {len(node.hosts)} backbones at {agent.url}", flush=True
        )

    return run_until_stopped(make, say_ready, drain_timeout_s=setup.server.drain_timeout_s)


def _available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def main() -> int:
    """Run an agent; return the exit code."""
    setup = msgspec.json.decode(sys.stdin.buffer.read(), type=AgentSetup)
    configure_logging(setup.log_level, "agent")
    return run_agent(setup)


if __name__ == "__main__":
    sys.exit(main())
