"""Decides from reports: the node of each function, and what each node holds ready.

Only the store outlives it. A controller that starts again knows functions, nodes of functions and the ledger; the
states of functions come with the next reports. A function leaves a node that no longer reports for the node with the
most of it already loaded.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from manylora.controller.store import Store
from manylora.errors import ConfigError, RequestError
from manylora.functions.deployment import MAX_FUNCTIONS, Deployment, FunctionSpec, check_function
from manylora.functions.placement import Load, NodeRoom, Wanted, choose_holding, choose_node, hold_name
from manylora.functions.wire import BackboneState, FunctionRow, FunctionState, Node, Orders, Overview, Report

__all__ = ["Controller"]

LOST_AFTER_S = 10.0
"""Seconds without a report after which the functions of a node move to others."""

DECIDE_EVERY_S = 5.0
"""Seconds between two decisions about the artefacts to hold."""

MAX_NODES = 1024

UNMEASURED = Load(num_bytes=128 << 20, took_s=1.0)
"""The size and the time of an artefact that no node has loaded yet."""


@dataclass(slots=True)
class _NodeView:
    report: Report
    seen_at: float
    functions: dict[str, FunctionState]

    def loaded(self) -> frozenset[str]:
        """Return the names of the artefacts that are loaded."""
        held: set[str] = set()
        for one in self.report.backbones:
            if one.state == "ready":
                held.update((hold_name("backbone", one.name), hold_name("libraries", one.name)))
        for state in self.functions.values():
            if state.state == "awake":
                held.update((hold_name("adapter", state.name), hold_name("process", state.name)))
        return frozenset(held)


class Controller:
    """The controller. For one thread alone.

    Args:
        store: Its database.
        deployment: The configuration, whose functions are registered.
        now: Returns monotonic seconds.
    """

    def __init__(self, store: Store, deployment: Deployment, *, now: Callable[[], float]) -> None:
        self._store = store
        self._backbones = deployment.backbones
        self._node = deployment.node
        self._now = now
        store.configure(deployment.functions, deployment.prices)
        self._functions = store.functions()
        self._placements = {name: node for name, node in store.placements().items() if name in self._functions}
        self._starts = store.starts()
        self._nodes: dict[str, _NodeView] = {}
        self._hold: dict[str, frozenset[str]] = {}
        self._decided_at = float("-inf")
        self._started_at = now()
        # Numbers of one run of the controller say nothing to agents that knew another.
        self._generation = int.from_bytes(os.urandom(6), "big") << 8

    # -- nodes -------------------------------------------------------------------------------------------------------

    def report(self, node: str, report: Report) -> Orders:
        """Record a node's report, and return its orders.

        Raises:
            ConfigError: The report cannot be recorded.
            RequestError: Another run of the node's agent has reported since.
        """
        end = self._store.end_of(node)
        if end is None and node not in self._nodes and len(self._nodes) >= MAX_NODES:
            raise RequestError(f"Got node {node!r}, and there are {MAX_NODES} already")
        if not report.is_first and (end is None or end.incarnation != report.incarnation):
            raise RequestError(f"Got a report of node {node!r} from an agent that another one has replaced")
        starts = {}
        for state in report.functions:
            if state.last_start is not None and self._starts.get(state.name) != state.last_start:
                starts[state.name] = state.last_start
        recorded_until_ns = self._store.record(node, report, starts)
        self._starts |= starts
        self._nodes[node] = _NodeView(report, self._now(), {one.name: one for one in report.functions})
        self._place()
        self._decide()
        is_current = report.generation == self._generation and not report.is_first
        return Orders(
            recorded_until_ns=recorded_until_ns,
            generation=self._generation,
            node=self._node,
            backbones=self._backbones,
            functions=None if is_current else self._functions_of(node),
            hold=sorted(self._hold.get(node, ())),
        )

    def _up(self) -> dict[str, _NodeView]:
        now = self._now()
        return {name: view for name, view in sorted(self._nodes.items()) if now - view.seen_at < LOST_AFTER_S}

    def _place(self) -> None:
        """Give a node to every function that has none that reports."""
        up = self._up()
        # A controller that has just begun waits for the agents of functions that have a node.
        may_move = self._now() - self._started_at >= LOST_AFTER_S
        homeless = [
            name
            for name in self._functions
            if (node := self._placements.get(name)) is None or (may_move and node not in up)
        ]
        if not homeless or not up:
            return
        loaded = {name: view.loaded() for name, view in up.items()}
        placed = Counter(self._placements.values())
        moved = {}
        for name in homeless:
            free = {node: -placed[node] for node in up}  # fewest functions first: memory is shared by those awake
            moved[name] = choose_node(name, self._functions[name].backbone, loaded, free)
            placed[moved[name]] += 1
        self._store.place(moved)
        self._placements |= moved
        self._generation += 1

    def _decide(self) -> None:
        """Choose the artefacts to hold, from the rates, sizes and times of the last reports."""
        if not self._node.preload or self._now() - self._decided_at < DECIDE_EVERY_S:
            return
        self._decided_at = self._now()
        up = self._up()
        measured: dict[str, BackboneState] = {}
        for view in up.values():
            measured |= {one.name: one for one in view.report.backbones if one.load_s > 0.0}
        backbones = {}
        for name in self._backbones:
            one = measured.get(name)
            backbones[name] = (
                (UNMEASURED, UNMEASURED)
                if one is None
                else (Load(one.num_bytes, one.load_s), Load(one.zygote_bytes, one.zygote_s))
            )
        # A function's node serves it, so that its artefacts are chosen for that node alone.
        for node, view in up.items():
            wanted = [
                _wanted(name, self._functions[name], state)
                for name, state in view.functions.items()
                if self._placements.get(name) == node and name in self._functions
            ]
            self._hold |= choose_holding(wanted, backbones, [NodeRoom(node, view.report.free_bytes)])

    def _functions_of(self, node: str) -> dict[str, FunctionSpec]:
        return {name: spec for name, spec in self._functions.items() if self._placements.get(name) == node}

    # -- functions ---------------------------------------------------------------------------------------------------

    def register(self, name: str, spec: FunctionSpec) -> None:
        """Add a function, or replace it.

        Raises:
            ConfigError: Its name or its backbone is wrong, or there are too many.
        """
        check_function(name, spec, self._backbones)
        if name not in self._functions and len(self._functions) >= MAX_FUNCTIONS:
            raise ConfigError(f"Got functions.{name}, and there are {MAX_FUNCTIONS} already")
        self._store.register(name, spec)
        self._functions[name] = spec
        self._generation += 1
        self._place()

    def remove(self, name: str) -> None:
        """Forget a function; its bills remain.

        Raises:
            RequestError: There is none of this name.
        """
        if not self._store.remove(name):
            raise RequestError(f"Got function {name!r}, expected a registered one", param="name")
        self._functions.pop(name, None)
        self._placements.pop(name, None)
        self._starts.pop(name, None)
        self._generation += 1

    def overview(self) -> Overview:
        """Return nodes and functions, as of the last reports."""
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
                Node(
                    name=name,
                    is_up=name in up,
                    address=view.report.address,
                    pid=view.report.pid,
                    seen_s=self._now() - view.seen_at,
                    backbones=view.report.backbones,
                )
                for name, view in sorted(self._nodes.items())
            ],
            num_functions=len(rows),
            functions=rows,
        )


def _wanted(name: str, spec: FunctionSpec, state: FunctionState) -> Wanted:
    stages = {} if state.last_start is None else state.last_start.stages_s
    own_s = sum(stages.get(stage, 0.0) for stage in ("fork", "confine", "map", "build")) or UNMEASURED.took_s
    return Wanted(
        name=name,
        backbone=spec.backbone,
        requests_per_s=state.requests_per_s,
        adapter=Load(state.adapter_bytes, stages.get("adapter", 0.0)),
        process=Load(state.own_bytes or spec.kv_bytes + spec.adapter_bytes, own_s),
    )
