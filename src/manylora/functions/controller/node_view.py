"""A node as of its last report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from manylora.functions.decisions.holding import HoldingCost, hold_name
from manylora.functions.decisions.placement import Candidate
from manylora.functions.wire import NodeReport
from manylora.serving.metrics.status_report import FunctionState

__all__ = ["NodeView"]


@dataclass(slots=True)
class NodeView:
    """A node's last report, the time at which it came, and the certificate of its sender."""

    report: NodeReport
    seen_at: float
    functions: dict[str, FunctionState]
    member: str | None

    def loaded(self) -> frozenset[str]:
        """Return the names of the artefacts that are loaded."""
        held: set[str] = set()
        for one in self.report.backbones:
            if one.num_bytes:
                held.add(hold_name("backbone", one.name))
            if one.state == "ready":
                held.add(hold_name("libraries", one.name))
        held.update(hold_name("process", name) for name, one in self.functions.items() if one.state == "awake")
        return frozenset(held)

    def candidate(self, name: str, needed: Mapping[str, HoldingCost], num_functions: int) -> Candidate:
        """Return this node as a place for a function.

        Args:
            name: The node's name.
            needed: The artefacts that the function needs.
            num_functions: Other functions that have this node.
        """
        loaded = self.loaded()
        lacking = [load for artefact, load in needed.items() if artefact not in loaded]
        used = sum(one.num_bytes + one.zygote_bytes for one in self.report.backbones)
        used += sum(one.own_bytes for one in self.functions.values() if one.state == "awake")
        return Candidate(
            name,
            load_s=sum(load.took_s for load in lacking),
            num_batches=sum(one.num_running > 0 for one in self.functions.values()),
            evicts_bytes=max(0, used + sum(load.num_bytes for load in lacking) - self.report.free_bytes),
            num_functions=num_functions,
        )
