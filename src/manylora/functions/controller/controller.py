"""Decides from reports: the node of each function, and what each node holds ready.

Only the store outlives it. A controller that starts again knows functions, nodes of functions and the ledger; the
states of functions come with the next reports. A function leaves a node that no longer reports for the one that is
expected to answer first (`placing.py`).
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field

from manylora.core.errors import ConfigError, RequestError
from manylora.functions.controller.placing import NodeView, backbone_costs, choose_nodes, wanted
from manylora.functions.controller.store import Store
from manylora.functions.decisions.placement import revise_holding
from manylora.functions.deployment import MAX_FUNCTIONS, Deployment, FunctionSpec, check_function
from manylora.functions.wire import MAX_LOG_LINES, FunctionRow, NodeReport, NodeRow, Orders, Overview
from manylora.serving.metrics.status_report import FunctionState

__all__ = ["Controller"]

LOST_AFTER_S = 10.0  # seconds without a report after which the functions of a node move to others
DECIDE_EVERY_S = 5.0  # seconds between two decisions about the artefacts to hold

MAX_NODES = 1024


@dataclass(eq=False)
class Controller:
    """The controller. Only for one thread."""

    store: Store  # its database
    deployment: Deployment  # the configuration, whose functions are registered
    _: KW_ONLY
    now: Callable[[], float]  # returns monotonic seconds
    api_keys: tuple[str, ...] = ()  # keys of the HTTP servers of agents that were started without
    admin_key: str | None = None  # key of their administrators
    _lines: dict[str, deque[str]] = field(default_factory=dict)
    _nodes: dict[str, NodeView] = field(default_factory=dict)
    _hold: dict[str, frozenset[str]] = field(default_factory=dict)
    _decided_at: float = -math.inf

    def __post_init__(self) -> None:
        self.store.configure(self.deployment.functions, self.deployment.prices)
        self._functions = self.store.functions()
        self._placements = {name: node for name, node in self.store.placements().items() if name in self._functions}
        self._starts = self.store.starts()
        self._started_at = self.now()
        # Numbers of one run of the controller say nothing to agents that knew another.
        self._generation = int.from_bytes(os.urandom(6), "big") << 8

    # -- nodes -------------------------------------------------------------------------------------------------------

    def report(self, node: str, report: NodeReport, *, member: str | None = None) -> Orders:
        """Record a node's report, and return its orders; ``member`` is the caller's names in its certificate.

        ``ConfigError`` if it cannot be recorded; ``RequestError`` if another run of the node's agent has reported
        since, or has reported just now at another address, or a caller with another certificate.
        """
        known = self._nodes.get(node)
        if known is not None and self.now() - known.seen_at < LOST_AFTER_S:
            if known.member != member:
                got = f"Got a report of node {node!r} by certificate {member!r}"
                raise RequestError(f"{got}, expected {known.member!r}")
            if report.is_first and report.address != known.report.address:  # an agent that starts again has the same
                got = f"Got a report of node {node!r} by an agent at {report.address}"
                raise RequestError(f"{got}, and one at {known.report.address} reports for it: each needs its own name")
        end = self.store.end_of(node)
        if len(self._nodes) >= MAX_NODES:
            self._nodes = self._up()
        if end is None and node not in self._nodes and len(self._nodes) >= MAX_NODES:
            raise RequestError(f"Got node {node!r}, and there are {MAX_NODES} already")
        if not report.is_first and (end is None or end.incarnation != report.incarnation):
            raise RequestError(f"Got a report of node {node!r} from an agent that another one has replaced")
        starts = {
            state.name: state.last_start
            for state in report.functions
            if state.name in self._functions
            and state.last_start is not None
            and self._starts.get(state.name) != state.last_start
        }
        recorded_until_ns = self.store.record(node, report, starts)
        self._starts |= starts
        if end is None or report.until_ns > end.until_ns:  # not sent again
            for name, lines in report.lines.items():
                if name in self._functions:
                    self._lines.setdefault(name, deque(maxlen=MAX_LOG_LINES)).extend(lines)
        has_joined = node not in self._nodes
        self._nodes[node] = NodeView(report, self.now(), {one.name: one for one in report.functions}, member)
        self._place(joined=has_joined)
        self._decide()
        is_current = report.generation == self._generation and not report.is_first
        return Orders(
            recorded_until_ns=recorded_until_ns,
            generation=self._generation,
            node=self.deployment.node,
            backbones=self.deployment.backbones,
            functions=None
            if is_current
            else {name: spec for name, spec in self._functions.items() if self._placements.get(name) == node},
            hold=sorted(self._hold.get(node, ())),
            prices=self.deployment.prices,
            api_keys=self.api_keys,
            admin_key=self.admin_key,
        )

    def _up(self) -> dict[str, NodeView]:
        now = self.now()
        return {name: view for name, view in sorted(self._nodes.items()) if now - view.seen_at < LOST_AFTER_S}

    def _place(self, *, joined: bool = False) -> None:
        """Choose a node for every function that has none which reports."""
        # A controller that has just begun waits for the agents of functions that have a node.
        may_move = self.now() - self._started_at >= LOST_AFTER_S
        moved = choose_nodes(
            self._up(), self._functions, self._placements, self._starts, joined=joined, may_move=may_move
        )
        if moved:
            self.store.place(moved)
            self._placements |= moved
            self._generation += 1

    def _decide(self) -> None:
        """Choose the artefacts to hold, from the rates, sizes and times of the last reports."""
        if not self.deployment.node.preload or self.now() - self._decided_at < DECIDE_EVERY_S:
            return
        self._decided_at = self.now()
        up = self._up()
        backbones = backbone_costs(up.values(), self.deployment.backbones)
        # A function's node serves it, so that its artefacts are chosen for that node alone.
        for node, view in up.items():
            functions = [
                wanted(name, self._functions[name], state, state.last_start)
                for name, state in view.functions.items()
                if self._placements.get(name) == node and name in self._functions
            ]
            held = self._hold.get(node, frozenset())
            self._hold[node] = revise_holding(
                held, functions, backbones, view.report.free_bytes, self.deployment.prices
            )

    # -- functions ---------------------------------------------------------------------------------------------------

    def check(self, name: str, spec: FunctionSpec) -> None:
        """Raise ``ConfigError`` if the name or the backbone of a function is wrong, or there are too many functions."""
        check_function(name, spec, self.deployment.backbones)
        if name not in self._functions and len(self._functions) >= MAX_FUNCTIONS:
            raise ConfigError(f"Got functions.{name}, and there are {MAX_FUNCTIONS} already")

    def register(self, name: str, spec: FunctionSpec) -> None:
        """Add a function, or replace it; raise ``ConfigError`` like ``check``."""
        self.check(name, spec)
        self.store.register(name, spec)
        self._functions[name] = spec
        self._generation += 1
        self._place()

    def remove(self, name: str) -> None:
        """Forget a function; its bills remain; ``RequestError`` if there is none of this name."""
        if not self.store.remove(name):
            raise RequestError(f"Got function {name!r}, expected a registered one", param="name")
        self._functions.pop(name, None)
        self._placements.pop(name, None)
        self._starts.pop(name, None)
        self._lines.pop(name, None)
        self._generation += 1

    def lines(self, name: str) -> list[str]:
        """Return the last lines that a function has written, since this controller began.

        ``RequestError`` if there is none of this name.
        """
        if name not in self._functions:
            raise RequestError(f"Got function {name!r}, expected a registered one", param="name")
        return list(self._lines.get(name, ()))

    def overview(self) -> Overview:
        """Return nodes and functions, from the last reports."""
        up = self._up()
        rows = []
        for name, spec in self._functions.items():
            node = self._placements.get(name)
            state = up[node].functions.get(name) if node in up else None
            if state is None:
                state = FunctionState(name=name, state="asleep", last_start=self._starts.get(name))
            rows.append(FunctionRow(name=name, tenant=spec.tenant, backbone=spec.backbone, node=node, state=state))
        return Overview(
            pid=os.getpid(),
            nodes=[
                NodeRow(
                    name=name,
                    is_up=name in up,
                    address=view.report.address,
                    pid=view.report.pid,
                    seen_s=self.now() - view.seen_at,
                    backbones=view.report.backbones,
                )
                for name, view in sorted(self._nodes.items())
            ],
            num_functions=len(rows),
            functions=rows,
        )
