"""What the server needs of the engines behind it: a ``Fleet``, or the functions of a node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from manylora.core.engine.status import AdapterStatus
from manylora.core.scaling.autoscaler import ScalingDecision
from manylora.core.types import Request
from manylora.serving.hosting.fleet.adapter_book import LoadedAdapter, UnavailableAdapter
from manylora.serving.hosting.fleet.engines import Replica
from manylora.serving.hosting.fleet.fleet_versions import PublicationTerms
from manylora.serving.hosting.fleet.keeper import EngineState
from manylora.serving.hosting.fleet.requests import AnswersInProgress
from manylora.serving.hosting.fleet.resumption import ResumeStats
from manylora.serving.hosting.fleet.snapshot import Snapshot
from manylora.serving.hosting.fleet.versions import NumberedVersion
from manylora.serving.hosting.links.in_flight import OutputStream
from manylora.serving.hosting.protocol import EngineInfo

__all__ = ["AdaptersPort", "EnginesPort", "FleetPort", "RequestsPort"]


class AdaptersPort(Protocol):
    """The adapters of a fleet, by name: ``FleetAdapters``."""

    @property
    def loaded(self) -> Mapping[str, LoadedAdapter]:
        """Adapters that requests may name."""

    @property
    def unavailable(self) -> Mapping[str, UnavailableAdapter]:
        """Adapters that are tried again since their registry did not answer."""

    @property
    def num_changes(self) -> int:
        """Changes of ``loaded`` so far."""

    async def load(
        self, name: str, path: str, *, replace_existing: bool = False, by_header: bool = False
    ) -> AdapterStatus:
        """Load an adapter."""

    async def publish(self, name: str, path: str, terms: PublicationTerms) -> tuple[NumberedVersion, AdapterStatus]:
        """Load a version of an adapter and move its name to it."""

    def take(self, model: str) -> NumberedVersion | None:
        """Count an answer in on the version of a model, until ``give``; ``None`` for a model without versions."""

    def give(self, version: NumberedVersion) -> None:
        """Count an answer out."""

    def versions_of(self, name: str) -> Sequence[NumberedVersion]:
        """Return the versions of an adapter that are not freed."""

    def find(self, model: str) -> NumberedVersion | None:
        """Return the version of a name, ``name@number`` or ``name@digest``."""

    async def unload(self, name: str) -> None:
        """Unload an adapter."""

    async def pin(self, name: str, pinned: bool) -> AdapterStatus:
        """Pin or unpin an adapter."""

    async def warm(self, name: str) -> AdapterStatus:
        """Start to copy an adapter to the device."""


class EnginesPort(Protocol):
    """The engines of a fleet and their state: ``FleetEngines``."""

    @property
    def state(self) -> EngineState:
        """The state of the best engine."""

    @property
    def info(self) -> EngineInfo:
        """Limits and sizes of an engine."""

    @property
    def num_serving(self) -> int:
        """Number of engines that serve."""

    def replicas(self) -> list[Replica]:
        """Return the state of each engine, idle ones included."""

    def check_serving(self) -> None:
        """Raise ``CapacityError`` unless requests are accepted."""

    async def snapshots(
        self, num_adapters: int | None = None, *, only_in_use: bool = False, name: str | None = None
    ) -> dict[int, Snapshot]:
        """Return the counters of each engine that serves, by number, and the state of its adapters, all or selected."""

    async def drain_replica(self, index: int, timeout_s: float) -> None:
        """End one engine for good."""


class RequestsPort(Protocol):
    """The requests of a fleet: ``FleetRequests``."""

    in_progress: AnswersInProgress

    def check_room(self) -> None:
        """Raise ``CapacityError`` if every engine would refuse a new request, at next to no cost."""

    async def submit(self, requests: Sequence[Request]) -> OutputStream:
        """Add requests, all or none."""

    def cancel(self, request_ids: Sequence[str], *, stopped: bool = False) -> None:
        """Cancel requests."""


class FleetPort(Protocol):
    """The engines behind a server: ``Fleet``."""

    served_name: str

    @property
    def adapters(self) -> AdaptersPort:
        """The adapters."""

    @property
    def engines(self) -> EnginesPort:
        """The engines."""

    @property
    def requests(self) -> RequestsPort:
        """The requests."""

    @property
    def resumes(self) -> ResumeStats:
        """Counters of requests that went on after the loss of an engine."""

    @property
    def scaling(self) -> ScalingDecision | None:
        """The last decision about the number of engines."""

    def hidden_from(self, tenant: str) -> frozenset[str]:
        """Return the names of adapters that do not exist for a tenant: it may neither call nor list them."""
