"""Protocols of the engine core, implemented by the torch executor, the simulated executor and the fake one of tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from manylora.core.adapters.shape import BaseShape
from manylora.core.config import DEFAULT_HOST_BYTES
from manylora.core.errors import AdapterError
from manylora.core.plan import AdapterLoad, LoadResult, StepPlan, StepResult
from manylora.core.types import AdapterKey, AdapterVersion, Constraint, Tier

__all__ = ["AdapterReader", "CoreParts", "EngineParts", "Executor", "SharedBase", "Work", "check_each"]


class Work(Protocol):
    """A launched step or load."""

    @property
    def ready_at(self) -> float:
        """Time of completion in seconds: exact in simulation, infinite for work on a device."""

    def poll(self, now: float) -> StepResult | LoadResult | None:
        """Return the result once complete, else ``None``. Never blocks.

        ``Exception`` if the step failed on the device; the engine must be restarted.
        """


class Executor(Protocol):
    """Executes plans. No call blocks; ``Work.poll`` reports completion, and a live executor also wakes the loop."""

    def launch(self, plan: StepPlan, now: float) -> Work:
        """Start a step, behind the one in flight if any; at most two are in flight."""

    def load_adapter(self, load: AdapterLoad, now: float) -> Work:
        """Start a load, in FIFO order per link; a failure is a ``LoadResult`` with ``error``, never an exception.

        With ``EngineParts.waits_by_layer``, the load to the device may start while that to the host is in flight, and
        copies each layer once it has been read.
        """

    def drop_adapter(self, key: AdapterKey, tier: Tier) -> None:
        """Drop the state of an adapter in ``tier`` (host buffers, device views); its pages are already free.

        The state on disk is what the executor may have kept there of host buffers; it goes with the version.
        Never called while a step in flight uses it there, with one exception: an image in the host tier may be dropped
        while a step in flight reads it. The executor keeps the image until that step has ended.
        """


class AdapterReader(Protocol):
    """Reads adapters into the host tier, or checks them where they are."""

    def read(self, name: str, path: str) -> AdapterVersion:
        """Read, check and pack the adapter in the directory ``path``. Blocks on the disk; safe from any thread.

        ``AdapterError`` if the adapter cannot be served on this base; gives ``name`` and the reason.
        """

    def check(self, adapters: Sequence[tuple[str, str]]) -> list[AdapterVersion | AdapterError]:
        """Check adapters, by name and directory, as far as their weights need not be read; they stay on disk.

        Returns:
            For each its version, or the reason why it cannot be served. An executor brings the version to the host tier
            on demand; only then a fault of the weights themselves appears.
        """


def check_each(
    read: Callable[[str, str], AdapterVersion], adapters: Sequence[tuple[str, str]]
) -> list[AdapterVersion | AdapterError]:
    """Check adapters one by one, for a reader that has no weights to spare the reading of."""

    def check(name: str, path: str) -> AdapterVersion | AdapterError:
        try:
            return read(name, path)
        except AdapterError as error:
            return error

    return [check(name, path) for name, path in adapters]


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedBase:
    """The base's weights in memory that other processes of this machine can map."""

    file: int  # descriptor of the memory, in the process that holds this
    num_bytes: int  # size of the memory
    manifest: bytes  # table of the weights in it, for the builder that made it
    gpu: str = ""  # identity of the GPU whose memory it is; empty for main memory


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreParts:
    """The parts that an engine core is made of."""

    base: BaseShape  # the base model's shape
    num_pages: int  # pages in the pool
    executor: Executor  # executes plans
    is_accelerated: bool = False  # whether steps run on a device rather than on this process's CPU
    reads_host: bool = False  # whether a step can read an adapter's weights from the host tier
    waits_by_layer: bool = False  # whether a step can run on an adapter that is on its way, and wait for each layer
    # Whether a copy may be asked for while its read is in flight, although no step runs on it yet.
    chains_copies: bool = False
    has_kv: bool = True  # whether the pool holds KV; if not, all its pages are for adapters
    host_bytes: int = DEFAULT_HOST_BYTES  # size of the host tier where the configuration gives none
    # How the base's weights are kept and multiplied: a line for each kind, the largest first.
    base_weights: tuple[str, ...] = ()
    base_bytes: int = 0  # size of the base's weights; 0 where there are none


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParts(CoreParts):
    """The parts of an engine, made by ``execution.build`` or ``sim.build``."""

    reader: AdapterReader  # reads adapters
    close: Callable[[], None]  # stops threads and frees the device
    machine: str = ""  # the executor's machine, in words; for reports of measurements
    shared: SharedBase | None = None  # the base's weights, where other processes can map them
    # Compiles a request's constraint before the request is added; blocks, safe from any thread. Raises ``RequestError``
    # for one that cannot be enforced.
    prepare: Callable[[Constraint], None] = lambda constraint: None
