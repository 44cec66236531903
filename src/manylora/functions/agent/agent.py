"""The agent's process: learn the node's functions from the controller, serve them, and report once a second.

The controller may come and go: functions are served meanwhile, and the account of that time is in the next report. A
report that was not answered is sent again as it was, because the controller may have recorded it.

An agent that starts begins with an empty report. The controller charges the time since the last report to the platform:
the agent that was killed took its account with it.

``python -m manylora.functions.agent.agent``, with its set-up on standard input.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import msgspec

from manylora.core.errors import CapacityError, CertificateRefused, ConfigError, EngineDead, RequestError
from manylora.core.machine import available_bytes
from manylora.functions.agent.app import agent_server
from manylora.functions.controller.client import ControllerClient
from manylora.functions.controller.server import run_process
from manylora.functions.decisions.billing import Taken
from manylora.functions.deployment import BackboneSpec
from manylora.functions.node.backbone_fleet import BackboneFleet
from manylora.functions.node.launch import Timeouts
from manylora.functions.node.node import FunctionNode
from manylora.functions.wire import MAX_REPORT_BYTES, Account, AgentSetup, NodeReport, Orders, cut_to
from manylora.serving.http.listening import HttpServer, bind, run_until_stopped, url_of
from manylora.serving.http.rereading import keep_reading
from manylora.serving.http.tenants import TenantBook
from manylora.serving.metrics.status_report import FunctionState
from manylora.serving.metrics.usage import UsageLedger

__all__ = ["Agent", "run_agent"]

REPORT_EVERY_S = 1.0
RETRY_S = 0.5
SHARE_OF_AVAILABLE = 0.8
"""Share of the available memory that backbones and functions take, unless the controller's orders set it."""

logger = logging.getLogger(__name__)


class Agent:
    """An agent, from start to stop, on one event loop.

    ``ConfigError`` if the system does not tell the memory that is available, or the tenants or their ledger are wrong.
    """

    def __init__(self, setup: AgentSetup, controller: ControllerClient, bound: socket.socket) -> None:
        self._name = setup.node
        self._controller = controller
        self._config = setup.server
        self._socket = bound
        self.url = url_of(bound)
        self._incarnation = uuid.uuid4().hex
        self._generation = 0
        self._unsent: NodeReport | None = None
        self._stop = asyncio.Event()
        self._fleets: list[BackboneFleet] = []
        self._backbones: Mapping[str, BackboneSpec] | None = None  # those of the first orders
        self._is_outdated = False
        self._is_ending = False
        config = setup.server
        self.tenants = None if config.tenants is None else TenantBook(Path(config.tenants).expanduser())
        self._usage = None if config.usage is None else UsageLedger(Path(config.usage).expanduser())
        if (memory_bytes := available_bytes()) is None:
            raise ConfigError("Got no MemAvailable in /proc/meminfo, expected Linux: functions run there alone")
        self.node = FunctionNode(
            Path(setup.folder),
            memory_bytes=int(SHARE_OF_AVAILABLE * memory_bytes),
            parent_pipe=setup.parent_pipe,
            timeouts=Timeouts.of(setup.server),
        )
        if setup.parent_pipe is not None:
            asyncio.get_running_loop().add_reader(setup.parent_pipe, os._exit, 1)  # its other end has gone

    def drain(self) -> None:
        """Begin to stop: new requests are refused, requests in flight may finish."""
        for fleet in self._fleets:
            fleet.drain()
        self._stop.set()

    async def serve(self, on_ready: Callable[[], None]) -> None:
        """Serve until drained.

        Errors are those of ``ControllerClient.report``, which refuses this agent if another one reports for the node;
        ``EngineDead`` if the backbones are others than at the start: the next agent begins with those.
        """
        stopping = asyncio.create_task(self._stop.wait())
        orders = await self._first_orders(stopping)
        if orders is None:
            self._socket.close()
            return
        tasks: list[asyncio.Task[None]] = []
        server = None
        try:
            listening = asyncio.Event()
            server = await asyncio.to_thread(self._make_server, orders, listening.set)
            tasks.append(asyncio.create_task(server.serve(sockets=[self._socket])))
            tasks += [asyncio.create_task(self.node.run()), asyncio.create_task(self._report())]
            if self.tenants is not None:
                tasks.append(asyncio.create_task(keep_reading(self.tenants.reread)))
            if self._usage is not None:
                tasks.append(asyncio.create_task(self._usage.run()))
            waiting = asyncio.create_task(listening.wait())
            await asyncio.wait({waiting, stopping, *tasks}, return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            if listening.is_set():
                on_ready()
            await asyncio.wait({stopping, *tasks}, return_when=asyncio.FIRST_COMPLETED)
            if stopping.done():
                await self._finish_in_flight()
            if self._is_outdated:
                raise EngineDead("The controller has other backbones than at this agent's start: start it again.")
            for task in tasks:
                if task.done():
                    task.result()
        finally:
            stopping.cancel()
            self._is_ending = True
            self.drain()  # what is still asked would wake functions again
            await self.node.stop()
            await self._last_report()
            if server is not None:
                server.should_exit = True
            for task in tasks[1:]:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if self._usage is not None:
                await self._usage.close()

    def _make_server(self, orders: Orders, on_listening: Callable[[], None]) -> HttpServer:
        config = self._config
        if not config.api_keys and config.admin_key is None:
            config = replace(config, api_keys=orders.api_keys, admin_key=orders.admin_key)
        server, self._fleets = agent_server(
            self.node, orders.backbones, config, on_listening, tenants=self.tenants, usage=self._usage
        )
        return server

    async def _finish_in_flight(self) -> None:
        try:
            async with asyncio.timeout(self._config.drain_timeout_s):
                for fleet in self._fleets:
                    await fleet.in_progress.ended()
        except TimeoutError:
            logger.warning("drain_timed_out after_s=%.1f", self._config.drain_timeout_s)

    # -- reports -----------------------------------------------------------------------------------------------------

    async def _first_orders(self, stopping: asyncio.Task[bool]) -> Orders | None:
        """Return the controller's first orders, once it answers; ``None`` if stopped before."""
        while not stopping.done():
            taken, accounts = self.node.take()
            empty = msgspec.structs.replace(
                self._make(taken, accounts), is_first=True, since_ns=taken.until_ns, accounts=[], device_ns=0, cpu_ns=0,
                host_byte_ns=0,
            )  # fmt: skip
            try:
                orders = await self._controller.report(self._name, empty)
            except CapacityError as error:
                logger.warning("controller_away error=%s", error)
                await asyncio.wait({stopping}, timeout=RETRY_S)
                continue
            self.node.accounts.begin(orders.recorded_until_ns)
            self._follow(orders)
            return orders
        return None

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(REPORT_EVERY_S)
            await self._send()

    async def _send(self) -> bool:
        """Send a report; return whether the controller answered."""
        if self._unsent is None:
            self._unsent = cut_to(MAX_REPORT_BYTES, self._make(*self.node.take()))
        try:
            orders = await self._controller.report(self._name, self._unsent)
        except (CapacityError, CertificateRefused) as error:  # certificates may be replaced while functions are served
            logger.warning("controller_away error=%s", error)
            return False
        except RequestError as error:
            good = [state for state in self._unsent.functions if _is_decodable(state)]
            if len(good) == len(self._unsent.functions):
                raise EngineDead(f"This agent is not wanted: {error}") from error
            self._unsent = msgspec.structs.replace(self._unsent, functions=good)
            return False
        self._unsent = None
        self._follow(orders)
        return True

    async def _last_report(self) -> None:
        try:
            async with asyncio.timeout(RETRY_S * 4):
                while self._unsent is not None and not await self._send():
                    await asyncio.sleep(RETRY_S)
                await self._send()
        except (TimeoutError, EngineDead):
            logger.warning("last_report_not_sent")

    def _make(self, taken: Taken, accounts: list[Account]) -> NodeReport:
        duration_ns = taken.until_ns - taken.since_ns
        return NodeReport(
            incarnation=self._incarnation,
            is_first=False,
            since_ns=taken.since_ns,
            until_ns=taken.until_ns,
            num_devices=1,
            num_cpus=taken.cpu_ns // duration_ns if duration_ns else 1,
            accounts=accounts,
            device_ns=taken.device_ns,
            cpu_ns=taken.cpu_ns,
            host_byte_ns=taken.host_byte_ns,
            address=self.url,
            pid=os.getpid(),
            generation=self._generation,
            free_bytes=self.node.room.num_bytes,
            functions=self.node.states(),
            backbones=[host.describe() for host in self.node.hosts.values()],
            lines=self.node.take_lines(),
        )

    def _follow(self, orders: Orders) -> None:
        if self._is_ending:  # its functions and backbones have left, or are about to
            return
        if self._backbones is None:
            self._backbones = orders.backbones
        if orders.backbones != self._backbones:  # applications have the tokenizers of the former ones
            if not self._is_outdated:
                logger.error("backbones_changed: requests in flight may finish, and this agent ends")
            self._is_outdated = True
            self.drain()
            return
        self._generation = orders.generation
        self.node.configure(orders.backbones, orders.functions, orders.node, orders.hold, orders.prices)


def _is_decodable(state: FunctionState) -> bool:
    """Whether the controller can decode the state of a function.

    States contain texts and numbers of functions. One that slips through the checks must not end the agent, and with it
    all functions of the node.
    """
    try:
        msgspec.json.decode(msgspec.json.encode(state), type=FunctionState)
    except (msgspec.MsgspecError, UnicodeEncodeError) as error:
        logger.error("function_state_dropped name=%s error=%s", state.name, error)
        return False
    return True


def run_agent(setup: AgentSetup) -> int:
    """Serve until SIGTERM or SIGINT; return the exit code.

    ``ManyloraError`` if the agent cannot listen, a backbone is wrong, or the controller refuses the agent.
    """
    logging.getLogger("httpx").setLevel(logging.WARNING)  # a line for each report
    server = setup.server

    def make() -> Agent:
        bound = bind(server.host, server.port) if setup.socket is None else socket.socket(fileno=setup.socket)
        return Agent(setup, ControllerClient(setup.controller, setup.token, setup.tls), bound)

    def say_ready(agent: Agent) -> None:
        num_functions, num_backbones = len(agent.node.functions), len(agent.node.hosts)
        print(f"manylora serves {num_functions} functions on {num_backbones} backbones at {agent.url}", flush=True)
        if agent.tenants is not None:
            agent.tenants.reread_on_signal()

    return run_until_stopped(make, say_ready, drain_timeout_s=server.drain_timeout_s)


if __name__ == "__main__":
    sys.exit(run_process("agent", AgentSetup, run_agent))
