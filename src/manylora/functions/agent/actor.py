"""The Ray actor of a node: it starts the node's agent and reports the end of it.

Its socket listens here and its folder is made here, so that an agent that starts again has the address and the bases of
the one before. A pipe ends with the actor, and with it the agent, its bases and its functions.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

import msgspec

from manylora.core.errors import ConfigError
from manylora.functions.controller.credentials import read_token
from manylora.functions.wire import AgentSetup
from manylora.serving.http.listening import BACKLOG, bind

__all__ = ["AgentActor"]


class AgentActor:
    """Runs the agent of a node. It ends with the process that created it.

    Args:
        setup: The ``AgentSetup``, as JSON; its folder, socket and lifeline are made here.
        token_file: File with the controller's token, on this node; ``None`` for no token.
        version: Version of this package where the actor was created.

    Raises:
        ConfigError: This node has another version, or cannot listen on the address.
    """

    def __init__(self, setup: bytes, token_file: str | None, version: str) -> None:
        if version != (here := metadata.version("manylora")):
            raise ConfigError(f"Got manylora {here} on this node, expected {version}")
        given = msgspec.json.decode(setup, type=AgentSetup)
        self._socket = bind(given.server.host, given.server.port)
        self._socket.listen(BACKLOG)
        self._lifeline, self._held = os.pipe()
        self._setup = msgspec.structs.replace(
            given,
            token=None if token_file is None else read_token(Path(token_file)),
            folder=tempfile.mkdtemp(prefix="manylora-agent-"),
            socket=self._socket.fileno(),
            lifeline=self._lifeline,
        )
        self._process: subprocess.Popen[bytes] | None = None
        self._is_stopped = False

    def run(self) -> int:
        """Start an agent and wait for its end; return its exit code, or minus the number of a signal."""
        if self._is_stopped:
            return 0
        process = self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "manylora.functions.agent.agent"],
            stdin=subprocess.PIPE,
            pass_fds=(self._socket.fileno(), self._lifeline),
            start_new_session=True,
        )
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError), process.stdin as pipe:
            pipe.write(msgspec.json.encode(self._setup))
        return process.wait()

    def stop(self) -> None:
        """End the agent gracefully; ``run`` returns then."""
        self._is_stopped = True
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
