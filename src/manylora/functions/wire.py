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
from manylora.serving.metrics.status_report import FunctionName, FunctionState, MeasureNote

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
    "cut_to",
]

MAX_REPORT_BYTES = 64 << 20  # more than the accounts of all functions take
MAX_LOG_LINES = 200  # last lines of a function that are kept

Nanoseconds = Annotated[int, Meta(ge=0, lt=2**62)]
Count = Annotated[int, Meta(ge=0, lt=2**62)]
Text = Annotated[str, Meta(max_length=4096)]

logger = logging.getLogger(__name__)


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
    """A node's report."""

    incarnation: Annotated[str, Meta(min_length=1, max_length=64)]  # names this run of the agent
    is_first: bool  # whether it is the first of this run, which replaces all earlier ones
    since_ns: Nanoseconds  # begin of the interval, in nanoseconds since the epoch
    until_ns: Nanoseconds  # its end
    num_devices: Annotated[int, Meta(ge=1, le=1024)]
    num_cpus: Annotated[int, Meta(ge=1, le=65536)]
    accounts: Annotated[list[Account], Meta(max_length=200_000)]  # usage in the interval
    # Time of all devices in the interval, which the accounts add up to, as to ``cpu_ns`` and ``host_byte_ns``.
    device_ns: Count
    cpu_ns: Count
    host_byte_ns: int
    address: Text  # where the node serves the functions
    pid: int  # the agent's process
    generation: int  # generation of the orders that it has
    free_bytes: int  # memory for artefacts, with those that it holds
    functions: Annotated[list[FunctionState], Meta(max_length=200_000)]
    backbones: Annotated[list[BackboneState], Meta(max_length=1024)]
    # Lines that functions have written since the last report, by function.
    lines: dict[FunctionName, Annotated[list[Text], Meta(max_length=MAX_LOG_LINES)]] = {}


def cut_to(max_bytes: int, report: NodeReport) -> NodeReport:
    """Return a report of at most so many bytes, with all its accounts.

    If it is too long, functions have filled it: the reasons that they gave are left out, then their lines and the
    states of those that sleep, the least called first.
    """
    if (num_bytes := len(msgspec.json.encode(report))) <= max_bytes:
        return report
    logger.warning("report_cut bytes=%d functions=%d", num_bytes, len(report.functions))
    functions = [
        msgspec.structs.replace(
            one,
            error=None if one.error is None else "left out: the node's report was too long",
            missing=tuple([MeasureNote(note.name, "") for note in one.missing]),
        )
        for one in report.functions
    ]
    report = msgspec.structs.replace(report, functions=functions)
    if (excess := len(msgspec.json.encode(report)) - max_bytes) > 0:
        excess -= len(msgspec.json.encode(report.lines))
        asleep = sorted((one for one in functions if one.state == "asleep"), key=lambda one: one.requests_per_s)
        dropped = set()
        for one in asleep:
            if excess <= 0:
                break
            excess -= len(msgspec.json.encode(one))
            dropped.add(one.name)
        kept = [one for one in functions if one.name not in dropped]
        report = msgspec.structs.replace(report, functions=kept, lines={})
    return report


class Orders(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The answer to a report."""

    recorded_until_ns: int  # end of the node's ledger
    generation: int  # generation of the functions
    node: NodeSpec
    backbones: dict[str, BackboneSpec]
    functions: dict[str, FunctionSpec] | None = None  # the node's functions; ``None`` if the agent has this generation
    hold: list[str] = []  # names of artefacts to hold ready (`decisions/placement.py`)
    prices: PriceList = PriceList()  # rents, and the price of waiting, by which functions are kept awake
    # Keys of the HTTP server in front of the functions, if the agent was started without.
    api_keys: tuple[str, ...] = ()
    admin_key: str | None = None  # key of their administrators


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
    """The files of one side of TLS, in PEM."""

    cert: str  # its certificate, followed by those that lead to the authority
    key: str  # its private key, without a password
    ca: str  # the authority. It admits every certificate that leads to it, so it should sign for this purpose alone


class ControllerSetup(msgspec.Struct, frozen=True, kw_only=True):
    """The set-up of a controller."""

    config: str  # file of functions
    folder: str  # where its database is
    token: str | None  # token of all calls; ``None`` for none, on loopback or with TLS
    tls: TlsFiles | None = None  # its certificate, and the authority of its callers; ``None`` for no TLS
    host: str = "127.0.0.1"
    port: int = 0
    socket: int | None = None  # descriptor of its listening socket; ``None`` to bind ``host`` and ``port``
    parent_pipe: int | None = None  # descriptor of a pipe with whose end this process ends; ``None`` for none
    has_adapters: bool = False  # whether the adapters are on this machine, so that one that cannot be read is refused
    api_keys: tuple[str, ...] = ()  # keys of the HTTP servers of agents that were started without
    admin_key: str | None = None  # key of their administrators
    log_level: int = logging.INFO


class AgentSetup(msgspec.Struct, frozen=True, kw_only=True):
    """The set-up of an agent."""

    node: str
    controller: str  # address of the controller
    token: str | None  # its token; ``None`` for none
    tls: TlsFiles | None = None  # this node's certificate for it; ``None`` for none
    server: ServerConfig  # the HTTP server in front of the functions
    folder: str  # where sockets of backbones are made
    socket: int | None = None  # descriptor of its listening socket; ``None`` to bind one
    # Descriptor of a pipe with whose end this process and its backbones end; ``None`` for none.
    parent_pipe: int | None = None
    log_level: int = logging.INFO
