"""The agent's process: ``python -m manylora.functions.agent.process``, with its set-up on standard input."""

from __future__ import annotations

import logging
import os
import socket
import sys
from pathlib import Path

import msgspec

from manylora.core.logs import configure_logging
from manylora.functions.agent.agent import Agent
from manylora.functions.agent.setup import AgentSetup
from manylora.functions.controller.client import ControllerClient
from manylora.functions.controller.process import exit_code_of
from manylora.serving.http.listening import bind, run_until_stopped

__all__ = ["run_agent"]

SHARE_OF_AVAILABLE = 0.8


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
            ControllerClient(setup.controller, setup.token, setup.tls),
            setup.server,
            bound,
            Path(setup.folder),
            memory_bytes=int(SHARE_OF_AVAILABLE * _available_bytes()),
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
    return exit_code_of(lambda: run_agent(setup))


if __name__ == "__main__":
    sys.exit(main())
