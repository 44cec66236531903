"""Nodes at their last reports, and the node for each function: the one that is expected to answer first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from manylora.functions.decisions.placement import (
    BackboneCost,
    Candidate,
    HoldingCost,
    Wanted,
    choose_place,
    hold_name,
    needed_by,
)
from manylora.functions.deployment import FunctionSpec
from manylora.functions.wire import BackboneState, NodeReport
from manylora.serving.metrics.status_report import FunctionStart, FunctionState

__all__ = ["NodeView", "backbone_costs", "choose_nodes", "wanted"]

UNMEASURED = HoldingCost(num_bytes=128 << 20, took_s=1.0)
"""The size and the time of an artefact that no node has loaded yet."""


@dataclass(slots=True)
class NodeView:
    """A node's last report, the time at which it came, and the certificate of its sender."""

    report: NodeReport
    seen_at: float
    functions: dict[str, FunctionState]
    member: str | None

    def candidate(self, name: str, needed: Mapping[str, HoldingCost], num_functions: int) -> Candidate:
        """Return this node as a place for a function that needs these artefacts, beside the others that have it."""
        awake = {name: one for name, one in self.functions.items() if one.state == "awake"}
        loaded = {hold_name("process", name) for name in awake}
        for backbone in self.report.backbones:
            if backbone.num_bytes:
                loaded.add(hold_name("backbone", backbone.name))
            if backbone.state == "ready":
                loaded.add(hold_name("libraries", backbone.name))
        lacking = [load for artefact, load in needed.items() if artefact not in loaded]
        used = sum(one.num_bytes + one.zygote_bytes for one in self.report.backbones)
        used += sum(one.own_bytes for one in awake.values())
        return Candidate(
            name,
            load_s=sum(load.took_s for load in lacking),
            num_batches=sum(one.num_running > 0 for one in self.functions.values()),
            evicts_bytes=max(0, used + sum(load.num_bytes for load in lacking) - self.report.free_bytes),
            num_functions=num_functions,
        )


def choose_nodes(
    up: Mapping[str, NodeView],
    functions: Mapping[str, FunctionSpec],
    homes: Mapping[str, str],
    starts: Mapping[str, FunctionStart],
    *,
    joined: bool,
    may_move: bool,
) -> dict[str, str]:
    """Return the new nodes of functions that have none which reports.

    Once a node has ``joined``, functions that have not been awake since their agent's start may move; with ``may_move``
    those of nodes that do not report as well.
    """
    if not up:
        return {}
    placed = Counter(homes.values())
    backbones = backbone_costs(up.values(), dict.fromkeys(one.backbone for one in functions.values()))
    moved: dict[str, str] = {}
    for name, spec in functions.items():
        home = homes.get(name)
        if home is not None and (name in up[home].functions or not joined if home in up else not may_move):
            continue
        start = starts.get(name)
        needed = needed_by(wanted(name, spec, None, start), backbones[spec.backbone])
        batch_s = (None if start is None else start.first_token_s) or UNMEASURED.took_s
        candidates = {node: view.candidate(node, needed, placed[node] - (node == home)) for node, view in up.items()}
        best = choose_place(list(candidates.values()), batch_s)
        assert best is not None
        if home is not None and home in up and candidates[home].order(batch_s) <= best.order(batch_s):
            continue
        placed[best.place] += 1
        if home is not None:
            placed[home] -= 1
        moved[name] = best.place
    return moved


def backbone_costs(up: Iterable[NodeView], backbones: Iterable[str]) -> dict[str, BackboneCost]:
    """Return the memory and the libraries of each backbone, as last measured on any node."""
    measured: dict[str, BackboneState] = {}
    for view in up:
        measured |= {one.name: one for one in view.report.backbones if one.load_s > 0.0}
    return {
        name: (
            (HoldingCost(one.num_bytes, one.load_s), HoldingCost(one.zygote_bytes, one.zygote_s))
            if (one := measured.get(name)) is not None
            else (UNMEASURED, UNMEASURED)
        )
        for name in backbones
    }


def wanted(name: str, spec: FunctionSpec, state: FunctionState | None, start: FunctionStart | None) -> Wanted:
    """Return a function with its sizes and times, as far as they have been measured."""
    stages = {} if start is None else start.stages_s
    own_s = sum(stages.get(stage, 0.0) for stage in ("fork", "confine", "map", "build")) or UNMEASURED.took_s
    return Wanted(
        name=name,
        backbone=spec.backbone,
        requests_per_s=0.0 if state is None else state.requests_per_s,
        adapter=HoldingCost(0 if state is None else state.adapter_bytes, stages.get("adapter", 0.0)),
        process=HoldingCost(max(0 if state is None else state.own_bytes, spec.kv_bytes + spec.adapter_bytes), own_s),
    )
