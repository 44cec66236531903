"""What the server needs of the engines behind it: a ``Fleet``, or the functions of a node."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from manylora.core.engine.status import AdapterStatus
from manylora.core.scaling import ScalingDecision
from manylora.core.types import Request
from manylora.serving.hosting.fleet.adapter_book import LoadedAdapter, UnavailableAdapter
from manylora.serving.hosting.fleet.keeper import EngineState
from manylora.serving.hosting.fleet.replica import Replica
from manylora.serving.hosting.fleet.resumption import ResumeStats
from manylora.serving.hosting.fleet.snapshot import Snapshot
from manylora.serving.hosting.links.in_flight import OutputStream
from manylora.serving.hosting.protocol import EngineInfo

__all__ = ["ServedAdapters", "ServedFleet"]


class ServedAdapters(Protocol):
    """Adapters by name, as of ``FleetAdapters``."""

    @property
    def loaded(self) -> Mapping[str, LoadedAdapter]:
        """Those that requests may name."""
        ...

    @property
    def unavailable(self) -> Mapping[str, UnavailableAdapter]:
        """Those that are tried again since their registry did not answer."""
        ...

    @property
    def num_changes(self) -> int:
        """Changes of ``loaded`` so far."""
        ...

    async def load(self, name: str, path: str, *, replace_existing: bool = False) -> AdapterStatus:
        """Load an adapter."""
        ...

    async def unload(self, name: str) -> None:
        """Unload an adapter."""
        ...

    async def pin(self, name: str, pinned: bool) -> AdapterStatus:
        """Pin or unpin an adapter."""
        ...

    async def warm(self, name: str) -> AdapterStatus:
        """Start to copy an adapter to the device."""
        ...


class ServedFleet(Protocol):
    """Engines, as of ``Fleet``."""

    served_name: str

    @property
    def adapters(self) -> ServedAdapters:
        """The adapters."""
        ...

    @property
    def state(self) -> EngineState:
        """The state of the best engine."""
        ...

    @property
    def info(self) -> EngineInfo:
        """Limits and sizes of an engine."""
        ...

    @property
    def num_replicas(self) -> int:
        """Number of engines, whether they serve or not."""
        ...

    @property
    def num_restarts(self) -> int:
        """Restarts of all engines."""
        ...

    @property
    def resumes(self) -> ResumeStats:
        """Counters of requests that went on after the loss of an engine."""
        ...

    @property
    def num_in_flight(self) -> int:
        """Number of answers in progress."""
        ...

    @property
    def scaling(self) -> ScalingDecision | None:
        """The last decision about the number of engines."""
        ...

    def hidden_from(self, tenant: str) -> frozenset[str]:
        """Return the names of adapters that do not exist for a tenant: it may neither call nor list them."""
        ...

    def check_serving(self) -> None:
        """Raise ``CapacityError`` unless requests are accepted."""
        ...

    def check_room(self) -> None:
        """Raise ``CapacityError`` if every engine would refuse a new request, at next to no cost."""
        ...

    def in_flight(self) -> AbstractContextManager[None]:
        """Count an answer as in progress while inside."""
        ...

    async def submit(self, requests: Sequence[Request]) -> OutputStream:
        """Add requests, all or none."""
        ...

    def cancel(self, request_ids: Sequence[str], *, stopped: bool = False) -> None:
        """Cancel requests."""
        ...

    async def snapshot(
        self, num_adapters: int | None = None, *, only_in_use: bool = False, name: str | None = None
    ) -> Snapshot:
        """Return the counters of all engines and the state of every adapter, or of some."""
        ...

    async def snapshots(
        self, num_adapters: int | None = None, *, only_in_use: bool = False, name: str | None = None
    ) -> dict[int, Snapshot]:
        """Return the snapshot of each engine that serves, by number."""
        ...

    def replicas(self) -> list[Replica]:
        """Return the state of each engine in use."""
        ...

    def num_by_state(self) -> Counter[EngineState]:
        """Return the number of engines in each state."""
        ...

    async def drain_replica(self, index: int, timeout_s: float) -> None:
        """End one engine for good."""
        ...
