"""The bodies between agents and the controller, as JSON.

::

    agent  --- POST /v1/nodes/NODE/report  Report --->  controller
           <-------------------------------- Orders ---

An agent reports every second; each report continues the one before without a gap. A report that was recorded and not
answered is sent again and not recorded twice, because the ledger knows where it ends.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from manylora.functions.billing import Usage
from manylora.functions.deployment import BackboneSpec, FunctionSpec, Name, NodeSpec

__all__ = [
    "MAX_REPORT_BYTES",
    "Account",
    "BackboneState",
    "ColdStart",
    "FunctionRow",
    "FunctionState",
    "MeasureNote",
    "Node",
    "Orders",
    "Overview",
    "Report",
]

MAX_REPORT_BYTES = 32 << 20

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


class MeasureNote(msgspec.Struct, frozen=True):
    """A measure of isolation that is not in force, and the reason."""

    name: Text
    note: Text


class ColdStart(msgspec.Struct, frozen=True, kw_only=True):
    """The last start of a function.

    Args:
        at: Its begin, in seconds since the epoch.
        begun_from: The state that the start began from: ``nothing``, ``backbone`` or ``zygote``.
        stages_s: Seconds of each stage, in order; they add up to ``total_s``.
        total_s: From the request, or the decision, until requests are taken.
        first_token_s: From there to the first token of the request that woke it; ``None`` if none did.
    """

    at: float
    begun_from: Text
    stages_s: dict[str, float]
    total_s: float
    first_token_s: float | None = None


class FunctionState(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A function on a node that has ever been awake there since the agent's start.

    Args:
        state: ``asleep``, ``waking``, ``awake``, ``ending`` or ``failed``.
        awake_since: In seconds since the epoch.
        is_held: Whether pre-loading keeps it awake: the platform pays then.
        pss_bytes: Proportional set size of its process.
        requests_per_s: Rate of its requests.
        error: The reason why it failed.
        missing: Measures that are not in force.
    """

    name: Name
    state: Text
    pid: int | None = None
    awake_since: float | None = None
    is_held: bool = False
    num_running: int = 0
    num_waiting: int = 0
    pss_bytes: int = 0
    own_bytes: int = 0
    adapter_bytes: int = 0
    requests_per_s: float = 0.0
    num_starts: int = 0
    num_deaths: int = 0
    last_start: ColdStart | None = None
    error: Text | None = None
    missing: tuple[MeasureNote, ...] = ()


class BackboneState(msgspec.Struct, frozen=True, kw_only=True):
    """A backbone on a node; the times are those of the last load, 0 before the first."""

    name: Name
    state: Text
    pid: int | None = None
    zygote_pid: int | None = None
    num_bytes: int = 0
    zygote_bytes: int = 0
    load_s: float = 0.0
    zygote_s: float = 0.0


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """A node's report.

    Args:
        incarnation: Names this run of the agent.
        is_first: Whether it is the first of this run, which replaces all earlier ones.
        since_ns: Begin of the interval, in nanoseconds since the epoch.
        until_ns: Its end.
        accounts: Usage in the interval.
        device_ns: Time of all devices in the interval, which the accounts add up to; likewise the next two.
        address: Where the node serves the functions.
        pid: The agent's process.
        generation: Of the orders that it has.
        free_bytes: Memory for artefacts, with those that it holds.
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


class Orders(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The answer to a report.

    Args:
        recorded_until_ns: End of the node's ledger.
        generation: Of the functions.
        functions: Those of the node; ``None`` if the agent has this generation.
        hold: Artefacts to hold ready (``functions.holding``).
        api_keys: Keys of the HTTP server in front of the functions, if the agent was started without.
        admin_key: Likewise.
    """

    recorded_until_ns: int
    generation: int
    node: NodeSpec
    backbones: dict[str, BackboneSpec]
    functions: dict[str, FunctionSpec] | None = None
    hold: list[str] = []
    api_keys: tuple[str, ...] = ()
    admin_key: str | None = None


class Node(msgspec.Struct, frozen=True, kw_only=True):
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
    nodes: list[Node]
    num_functions: int
    functions: list[FunctionRow]
