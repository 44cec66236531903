"""Options of a server's fleet: how many engines, where they run, and the choice among them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from manylora.core.errors import ConfigError
from manylora.core.options import check_options, option

__all__ = ["FleetConfig"]

_replicas = partial(option, panel="Replicas")


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetConfig:
    """The engines of a server, and the choice among them."""

    replicas: int = _replicas(
        1, unit="engines", at_least=1, at_most=256, help="Engines that serve the model, each with memory of its own."
    )
    devices: str | None = _replicas(
        None,
        metavar="DEVICE,...",
        help="Devices of the engines in order, as cuda:0,cuda:1, then from the first again; by default --device.",
    )
    router: str = _replicas("auto", plugin="router", help="Choice of the engine for each request.")
    router_options: Mapping[str, Any] = _replicas(
        factory=dict,
        flag="--router-option",
        metavar="KEY=VALUE",
        help="An option of the router, built-in or plug-in. Repeatable.",
    )
    max_resumes: int = _replicas(
        3,
        at_least=0,
        help="Engines that a request may lose and still go on, on another engine or the restarted one; 0 fails it with "
        "its engine.",
    )
    resume_timeout_s: float = _replicas(
        300.0,
        unit="s",
        at_least=0,
        help="Longest wait of a request that lost its engine for another or the restarted one, while none serves.",
    )
    min_replicas: int | None = _replicas(
        None, unit="engines", at_least=1, at_most=256, help="Engines at least, with --max-replicas; by default 1."
    )
    max_replicas: int | None = _replicas(
        None,
        unit="engines",
        at_least=1,
        at_most=256,
        help="Start and drain engines by the load, up to this many; by default their number is fixed.",
    )
    slo_ttft_s: float = _replicas(
        2.0, unit="s", above=0, help="Time to first token that scaling keeps, for 99 % of requests."
    )
    replica_rate: float | None = _replicas(
        None,
        unit="requests/s",
        above=0,
        help="Capacity of an engine, as of [bold]manylora plan[/bold]; by default predicted from its steps, and "
        "corrected by the traffic.",
    )

    ray: str | None = _replicas(
        None,
        metavar="auto|HOST:PORT",
        help="Run the engines on the nodes of this Ray cluster; auto is the one of RAY_ADDRESS, or of this machine.",
    )
    ray_resources: Mapping[str, Any] = _replicas(
        factory=dict,
        flag="--ray-resource",
        metavar="NAME=AMOUNT",
        help="A resource that each engine takes of its node: CPU, GPU, memory (bytes), or a name of your own; by "
        "default CPU=1, and GPU=1 with [bold]--device cuda[/bold]. Repeatable.",
    )
    ray_labels: Mapping[str, Any] = _replicas(
        factory=dict,
        flag="--ray-label",
        metavar="KEY=VALUE",
        help="A label that the nodes of the engines must have. Repeatable.",
    )
    ray_timeout_s: float = _replicas(
        300.0, unit="s", above=0, help="Time for Ray to find a node for an engine, and for the cluster to grow one."
    )

    @property
    def num_places(self) -> int:
        """Engines at most."""
        return self.replicas if self.max_replicas is None else self.max_replicas

    def __post_init__(self) -> None:
        check_options(self)
        if self.max_replicas is not None and self.replicas != 1:
            raise ConfigError(
                f"Got replicas = {self.replicas}, max_replicas = {self.max_replicas}, expected a fixed number or bounds"
            )
        if self.min_replicas is not None and not self.min_replicas <= (self.max_replicas or 0):
            raise ConfigError(
                f"Got min_replicas = {self.min_replicas}, max_replicas = {self.max_replicas}, expected 1 <= min <= max"
            )
        if self.devices is not None and not all(self.devices.split(",")):
            raise ConfigError(f"Got devices = {self.devices!r}, expected names between commas, as cuda:0,cuda:1")
        if self.ray is not None and self.devices is not None:
            raise ConfigError(f"Got ray = {self.ray!r}, devices = {self.devices!r}, expected --ray-resource GPU=1")
