"""The agent's life: learn the node's functions from the controller, serve them, and report once a second.

The controller may come and go: functions are served meanwhile, and the account of that time is in the next report. A
report that was not answered is sent again as it was, because the controller may have recorded it.

An agent that starts begins with an empty report. The controller charges the time since the last one to the platform:
the agent that was killed took its account with it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import msgspec

from manylora.core.config import ServerConfig
from manylora.core.errors import CapacityError, CertificateRefused, EngineDead, RequestError
from manylora.functions.agent.http import backbone_apps, http_server
from manylora.functions.controller.client import ControllerClient
from manylora.functions.decisions.meter import Taken
from manylora.functions.deployment import BackboneSpec
from manylora.functions.node.backbone_fleet import BackboneFleet
from manylora.functions.node.launch import Timeouts
from manylora.functions.node.node import FunctionNode
from manylora.functions.wire import Account, NodeReport, Orders
from manylora.serving.hosting.protocol import Observations
from manylora.serving.http.listening import url_of
from manylora.serving.metrics.status_report import FunctionState

__all__ = ["Agent"]

REPORT_EVERY_S = 1.0
RETRY_S = 0.5

logger = logging.getLogger(__name__)


class Agent:
    """An agent, from start to stop, on one event loop.

    Args:
        node: The node's name.
        controller: The controller.
        config: The HTTP server.
        bound: The socket of the HTTP server.
        folder: For sockets.
        memory_bytes: Memory for backbones and functions, unless the controller's orders set it.
        lifeline: Descriptor of a pipe with whose end this process and its backbones end; ``None`` for none.
    """

    def __init__(
        self,
        node: str,
        controller: ControllerClient,
        config: ServerConfig,
        bound: socket.socket,
        folder: Path,
        *,
        memory_bytes: int,
        lifeline: int | None,
    ) -> None:
        self._name = node
        self._controller = controller
        self._config = config
        self._socket = bound
        self.url = url_of(bound)
        self._incarnation = uuid.uuid4().hex
        self._generation = 0
        self._unsent: NodeReport | None = None
        self._stop = asyncio.Event()
        self._observers: Mapping[str, Callable[[Observations], None]] = {}
        self._fleets: list[BackboneFleet] = []
        self._backbones: Mapping[str, BackboneSpec] | None = None  # as of the first orders
        self._is_outdated = False
        self.node = FunctionNode(
            folder,
            memory_bytes=memory_bytes,
            lifeline=lifeline,
            timeouts=Timeouts.of(config),
            on_observed=self._observed,
        )
        if lifeline is not None:
            asyncio.get_running_loop().add_reader(lifeline, os._exit, 1)  # its other end has gone

    @property
    def is_stopping(self) -> bool:
        """Whether it was asked to stop."""
        return self._stop.is_set()

    def drain(self) -> None:
        """Begin to stop: new requests are refused, requests in flight may finish."""
        for fleet in self._fleets:
            fleet.drain()
        self._stop.set()

    async def serve(self, on_ready: Callable[[], None]) -> None:
        """Serve until drained.

        Raises:
            CertificateRefused: Controller or agent refuses the certificate of the other.
            RequestError: The controller refuses this agent: another one reports for the node.
            EngineDead: The controller's backbones are others than at the start; the next agent begins with those.
        """
        stopping = asyncio.create_task(self._stop.wait())
        orders = await self._first_orders(stopping)
        if orders is None:
            self._socket.close()
            return
        tasks: list[asyncio.Task[None]] = []
        server = None
        try:
            config = self._config
            if not config.api_keys and config.admin_key is None:
                config = replace(config, api_keys=orders.api_keys, admin_key=orders.admin_key)
            apps = await asyncio.to_thread(backbone_apps, self.node, orders.backbones, config)
            self._fleets = [one.fleet for one in apps.values()]
            self._observers = {name: one.metrics.observe for name, one in apps.items()}
            listening = asyncio.Event()
            server = http_server(apps, self.node, config, listening.set)
            tasks.append(asyncio.create_task(server.serve(sockets=[self._socket])))
            tasks += [asyncio.create_task(self.node.run()), asyncio.create_task(self._report())]
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
            await self.node.stop()
            await self._last_report()
            if server is not None:
                server.should_exit = True
            for task in tasks[1:]:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _finish_in_flight(self) -> None:
        try:
            async with asyncio.timeout(self._config.drain_timeout_s):
                for fleet in self._fleets:
                    await fleet.idle()
        except TimeoutError:
            logger.warning("drain_timed_out after_s=%.1f", self._config.drain_timeout_s)

    def _observed(self, backbone: str, seen: Observations) -> None:
        if (observe := self._observers.get(backbone)) is not None:
            observe(seen)

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
            self.node.begin_account(orders.recorded_until_ns)
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
            self._unsent = self._make(*self.node.take())
        try:
            orders = await self._controller.report(self._name, self._unsent)
        except (CapacityError, CertificateRefused) as error:  # certificates may be replaced while functions are served
            logger.warning("controller_away error=%s", error)
            return False
        except RequestError as error:
            good = _decodable(self._unsent)
            if len(good.functions) == len(self._unsent.functions):
                raise EngineDead(f"This agent is not wanted: {error}") from error
            self._unsent = good
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
        functions, backbones = self.node.describe()
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
            free_bytes=self.node.memory_bytes,
            functions=functions,
            backbones=backbones,
            lines=self.node.take_lines(),
        )

    def _follow(self, orders: Orders) -> None:
        if self._backbones is None:
            self._backbones = orders.backbones
        if orders.backbones != self._backbones:  # applications have the tokenizers of the former ones
            if not self._is_outdated:
                logger.error("backbones_changed: requests in flight may finish, and this agent ends")
            self._is_outdated = True
            self.drain()
            return
        self._generation = orders.generation
        self.node.configure(orders.backbones, orders.functions, orders.node, orders.hold)


def _decodable(report: NodeReport) -> NodeReport:
    """Return a report without the states of functions that the controller cannot decode.

    States contain texts and numbers of functions. One that slips through the checks must not end the agent, and with it
    all functions of the node.
    """
    good = []
    for state in report.functions:
        try:
            msgspec.json.decode(msgspec.json.encode(state), type=FunctionState)
            good.append(state)
        except (msgspec.MsgspecError, UnicodeEncodeError) as error:
            logger.error("function_state_dropped name=%s error=%s", state.name, error)
    return msgspec.structs.replace(report, functions=good)
