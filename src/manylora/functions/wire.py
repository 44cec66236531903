"""The bodies between agents and the controller, as JSON; and the set-ups of their processes, on standard input.

::

    agent  --- POST /v1/nodes/NODE/report  Report --->  controller
           <-------------------------------- Orders ---

An agent reports every second; each report continues the one before without a gap. A report that was recorded and not
answered is sent again and not recorded twice, because the ledger knows where it ends.
"""

from __future__ import annotations

import logging
from typing import Annotated

import msgspec
from msgspec import Meta

from manylora.core.config import ServerConfig
from manylora.functions.decisions.billing import PriceList, Usage
from manylora.functions.deployment import BackboneSpec, FunctionSpec, NodeSpec
from manylora.serving.metrics.status_report import FunctionName, FunctionState

__all__ = [
    "MAX_LOG_LINES",
    "MAX_REPORT_BYTES",
    "Account",
    "AgentSetup",
    "BackboneState",
    "ControllerSetup",
    "FunctionRow",
    "NodeReport",
    "NodeRow",
    "Orders",
    "Overview",
    "TlsFiles",
]

MAX_REPORT_BYTES = 32 << 20
MAX_LOG_LINES = 200
"""Last lines of a function that are kept."""

Nanoseconds = Annotated[int, Meta(ge=0, lt=2**62)]
Count = Annotated[int, Meta(ge=0, lt=2**62)]
Text = Annotated[str, Meta(max_length=4096)]


class Account(msgspec.Struct, frozen=True, kw_only=True):
    """The usage of a function, or of the platform (an empty name), in a report's interval."""

    name: Annotated[str, Meta(max_length=128)]
    tenant: Annotated[str, Meta(max_length=128)] = ""
    usage: Usage
    num_requests: Count = 0
    num_tokens: Count = 0


class BackboneState(msgspec.Struct, frozen=True, kw_only=True):
    """A backbone on a node; the times are of the last load, 0 before the first."""

    name: FunctionName
    state: Text
    pid: int | None = None
    zygote_pid: int | None = None
    num_bytes: int = 0
    zygote_bytes: int = 0
    load_s: float = 0.0
    zygote_s: float = 0.0


class NodeReport(msgspec.Struct, frozen=True, kw_only=True):
    """A node's report.

    Args:
        incarnation: Names this run of the agent.
        is_first: Whether it is the first of this run, which replaces all earlier ones.
        since_ns: Begin of the interval, in nanoseconds since the epoch.
        until_ns: Its end.
        accounts: Usage in the interval.
        device_ns: Time of all devices in the interval, which the accounts add up to, as to ``cpu_ns`` and
            ``host_byte_ns``.
        address: Where the node serves the functions.
        pid: The agent's process.
        generation: Generation of the orders that it has.
        free_bytes: Memory for artefacts, with those that it holds.
        lines: Lines that functions have written since the last report, by function.
    """

    incarnation: Annotated[str, Meta(min_length=1, max_length=64)]
    is_first: bool
    since_ns: Nanoseconds
    until_ns: Nanoseconds
    num_devices: Annotated[int, Meta(ge=1, le=1024)]
    num_cpus: Annotated[int, Meta(ge=1, le=65536)]
    accounts: Annotated[list[Account], Meta(max_length=200_000)]
    device_ns: Count
    cpu_ns: Count
    host_byte_ns: int
    address: Text
    pid: int
    generation: int
    free_bytes: int
    functions: Annotated[list[FunctionState], Meta(max_length=200_000)]
    backbones: Annotated[list[BackboneState], Meta(max_length=1024)]
    lines: dict[FunctionName, Annotated[list[Text], Meta(max_length=MAX_LOG_LINES)]] = {}


class Orders(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The answer to a report.

    Args:
        recorded_until_ns: End of the node's ledger.
        generation: Generation of the functions.
        functions: The node's functions; ``None`` if the agent has this generation.
        hold: Names of artefacts to hold ready (`decisions/placement.py`).
        prices: Rents, and the price of waiting, by which functions are kept awake.
        api_keys: Keys of the HTTP server in front of the functions, if the agent was started without.
        admin_key: Key of their administrators.
    """

    recorded_until_ns: int
    generation: int
    node: NodeSpec
    backbones: dict[str, BackboneSpec]
    functions: dict[str, FunctionSpec] | None = None
    hold: list[str] = []
    prices: PriceList = PriceList()
    api_keys: tuple[str, ...] = ()
    admin_key: str | None = None


class NodeRow(msgspec.Struct, frozen=True, kw_only=True):
    """A node, as the controller knows it; without an agent's report for some time it is not ``is_up``."""

    name: str
    is_up: bool
    address: str
    pid: int
    seen_s: float
    backbones: list[BackboneState]


class FunctionRow(msgspec.Struct, frozen=True, kw_only=True):
    """A function of the platform: its registration, its node and the state there."""

    name: str
    tenant: str
    backbone: str
    node: str | None
    state: FunctionState


class Overview(msgspec.Struct, frozen=True, kw_only=True):
    """The platform."""

    pid: int
    nodes: list[NodeRow]
    num_functions: int
    functions: list[FunctionRow]


class TlsFiles(msgspec.Struct, frozen=True, kw_only=True):
    """The files of one side of TLS, in PEM.

    Args:
        cert: Its certificate, followed by those that lead to the authority.
        key: Its private key, without a password.
        ca: The authority. It admits every certificate that leads to it, so it should sign for this purpose alone.
    """

    cert: str
    key: str
    ca: str


class ControllerSetup(msgspec.Struct, frozen=True, kw_only=True):
    """The set-up of a controller.

    Args:
        config: File of functions.
        folder: Where its database is.
        token: Token of all calls; ``None`` for none, on loopback or with TLS.
        tls: Its certificate, and the authority of its callers; ``None`` for no TLS.
        socket: Descriptor of its listening socket; ``None`` to bind ``host`` and ``port``.
        parent_pipe: Descriptor of a pipe with whose end this process ends; ``None`` for none.
        has_adapters: Whether the adapters are on this machine, so that one that cannot be read is refused.
        api_keys: Keys of the HTTP servers of agents that were started without.
        admin_key: Key of their administrators.
    """

    config: str
    folder: str
    token: str | None
    tls: TlsFiles | None = None
    host: str = "127.0.0.1"
    port: int = 0
    socket: int | None = None
    parent_pipe: int | None = None
    has_adapters: bool = False
    api_keys: tuple[str, ...] = ()
    admin_key: str | None = None
    log_level: int = logging.INFO


class AgentSetup(msgspec.Struct, frozen=True, kw_only=True):
    """The set-up of an agent.

    Args:
        controller: Address of the controller.
        token: Its token; ``None`` for none.
        tls: This node's certificate for it; ``None`` for none.
        server: The HTTP server in front of the functions.
        folder: Where sockets of backbones are made.
        socket: Descriptor of its listening socket; ``None`` to bind one.
        parent_pipe: Descriptor of a pipe with whose end this process and its backbones end; ``None`` for none.
    """

    node: str
    controller: str
    token: str | None
    tls: TlsFiles | None = None
    server: ServerConfig
    folder: str
    socket: int | None = None
    parent_pipe: int | None = None
    log_level: int = logging.INFO
