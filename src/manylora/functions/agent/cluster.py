"""A controller here and an agent on every node of a Ray cluster: ``manylora functions serve --ray``.

Ray says which nodes there are, starts an agent on each and reports its end. A node that is lost is a lost agent: the
controller gives its functions to others. Requests and reports do not pass through Ray, nor do tokens and keys: a node
reads the token or its certificate from files of its own, and gets the API keys from the controller.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import msgspec

from manylora.core.config import ServerConfig
from manylora.core.errors import ConfigError
from manylora.core.server_config import FleetConfig
from manylora.functions.agent.supervise import RESTARTS, keep_until_stopped, open_controller
from manylora.functions.controller.credentials import read_token
from manylora.functions.deployment import read_deployment
from manylora.functions.wire import AgentSetup, ControllerSetup, TlsFiles
from manylora.serving.hosting.ray.cluster import RayCluster, engine_resources
from manylora.serving.hosting.ray.nodes import NodeActor, RayNode, fitting_nodes, own_address
from manylora.serving.http.listening import BACKLOG, bind

__all__ = ["AgentActor", "supervise_cluster"]

LOOK_EVERY_S = 2.0  # seconds between two looks for nodes that have joined

STOP_S = 5.0

logger = logging.getLogger(__name__)


def supervise_cluster(
    config: Path,
    folder: Path,
    server: ServerConfig,
    fleet: FleetConfig,
    *,
    token_file: Path | None,
    tls: TlsFiles | None,
    log_level: int,
) -> int:
    """Run a controller, and agents on the nodes of a cluster, until SIGTERM or SIGINT; return the exit code.

    Arguments are as for ``supervise``. The HTTP server is each agent's, on its node's address. The controller's token
    and certificate are in files of one path on this machine and on every node; without a token the certificate is
    enough.

    ``ConfigError`` if the file is wrong, there is neither token nor certificate, or no cluster at the address;
    ``EngineDead`` if the controller died too often before it had worked.
    """
    read_deployment(config)
    if token_file is None and tls is None:
        raise ConfigError("Got ray without token_file and tls_cert, expected either: agents call from other machines")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    controller = ControllerSetup(
        config=str(config.resolve()),
        folder=str(folder),
        token=None if token_file is None else read_token(token_file),
        tls=tls,
        api_keys=server.api_keys,
        admin_key=server.admin_key,
        log_level=log_level,
    )
    asyncio.run(_serve(controller, server, fleet, token_file))
    return 0


async def _serve(setup: ControllerSetup, server: ServerConfig, fleet: FleetConfig, token_file: Path | None) -> None:
    cluster = RayCluster(fleet, engine_resources(fleet.ray_resources, "cpu"))
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(cluster.close)
        controller, url, _ = stack.enter_context(open_controller(setup, await own_address(cluster)))
        agent = AgentSetup(
            node="",
            controller=url,
            token=None,
            tls=setup.tls,
            server=replace(server, api_keys=(), admin_key=None),
            folder="",
            log_level=setup.log_level,
        )
        agents = _Agents(cluster, agent, None if token_file is None else str(token_file.resolve()))
        await keep_until_stopped(controller, agents)


class _Agents:
    """The agents of all nodes."""

    def __init__(self, cluster: RayCluster, setup: AgentSetup, token_file: str | None) -> None:
        self._cluster = cluster
        self._setup = setup
        self._token_file = token_file
        self._actors: dict[str, NodeActor] = {}
        self._keeping: dict[str, asyncio.Task[None]] = {}
        self._is_stopping = False

    async def keep(self) -> None:
        """Start an agent on every node that is there or joins.

        ``ConfigError`` if there is no cluster, or it refuses the resources.
        """
        num_nodes = -1
        while not self._is_stopping:
            try:
                nodes = await fitting_nodes(self._cluster)
            except ConfigError:
                raise
            except Exception as error:  # Ray's head is away: the agents serve meanwhile
                logger.error("nodes_unknown error=%r", error)
                await asyncio.sleep(LOOK_EVERY_S)
                continue
            if len(nodes) != num_nodes:
                num_nodes = len(nodes)
                logger.log(logging.INFO if nodes else logging.WARNING, "nodes_for_agents num_nodes=%d", num_nodes)
            for node in nodes:
                if node.node_id not in self._keeping:
                    self._keeping[node.node_id] = asyncio.create_task(self._keep_on(node))
            await asyncio.sleep(LOOK_EVERY_S)
            for node_id in [node_id for node_id, task in self._keeping.items() if task.done()]:
                self._keeping.pop(node_id).result()

    async def stop(self) -> None:
        """End all agents; those that hang are killed after the time for requests under way."""
        self._is_stopping = True
        stopping = [actor.call("stop") for actor in self._actors.values()]
        await asyncio.gather(*stopping, return_exceptions=True)
        if self._keeping:
            await asyncio.wait(self._keeping.values(), timeout=self._setup.server.drain_timeout_s + STOP_S)
        for task in self._keeping.values():
            task.cancel()
        await asyncio.gather(*self._keeping.values(), return_exceptions=True)

    async def _keep_on(self, node: RayNode) -> None:
        """Keep the agent of one node, until the node is lost or the agent was stopped."""
        server = replace(self._setup.server, host=node.address)
        setup = msgspec.structs.replace(self._setup, node=node.name, server=server)
        arguments = (msgspec.json.encode(setup), self._token_file, metadata.version("manylora"))
        actor = self._actors[node.node_id] = NodeActor(self._cluster, AgentActor, node, arguments, num_threads=2)
        now = asyncio.get_running_loop().time
        deaths = 0
        try:
            while True:
                since = now()
                code = await actor.call("run")
                if code == 0:
                    return
                deaths = 1 if now() - since >= RESTARTS.healthy_after_s else deaths + 1
                logger.error("agent_ended node=%s code=%s in_a_row=%d", node.name, code, deaths)
                await asyncio.sleep(RESTARTS.pause_s(deaths))
        except ConfigError:
            raise
        except Exception as error:  # the actor has ended, or Ray's head is away: if its node lives, it is found again
            logger.error("agent_lost node=%s error=%s", node.name, error)
        finally:
            del self._actors[node.node_id]
            await actor.remove()


class AgentActor:
    """The Ray actor of a node: runs the node's agent and reports its end. It ends with the process that created it.

    Its socket listens here and its folder is made here, so that an agent that starts again has the address and the
    bases of the one before. A pipe ends with the actor, and with it the agent, its bases and its functions. The
    ``setup`` is an ``AgentSetup`` as JSON, whose folder, socket and parent_pipe are made here, and whose token is in a
    file of this node. ``ConfigError`` if this node has another version of this package, or cannot listen.
    """

    def __init__(self, setup: bytes, token_file: str | None, version: str) -> None:
        if version != (here := metadata.version("manylora")):
            raise ConfigError(f"Got manylora {here} on this node, expected {version}")
        given = msgspec.json.decode(setup, type=AgentSetup)
        self._socket = bind(given.server.host, given.server.port)
        self._socket.listen(BACKLOG)
        self._parent_pipe, self._held = os.pipe()
        self._setup = msgspec.structs.replace(
            given,
            token=None if token_file is None else read_token(Path(token_file)),
            folder=tempfile.mkdtemp(prefix="manylora-agent-"),
            socket=self._socket.fileno(),
            parent_pipe=self._parent_pipe,
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
            pass_fds=(self._socket.fileno(), self._parent_pipe),
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
