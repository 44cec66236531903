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

        Raises:
            Exception: The step failed on the device; the engine must be restarted.
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

        Never called while a step in flight uses it there, with one exception: an image in the host tier may be dropped
        while a step in flight reads it. The executor keeps the image until that step has ended.
        """


class AdapterReader(Protocol):
    """Reads adapters into the host tier, or checks them where they are."""

    def read(self, name: str, path: str) -> AdapterVersion:
        """Read, check and pack the adapter in the directory ``path``. Blocks on the disk; safe from any thread.

        Raises:
            AdapterError: It cannot be served on this base; gives ``name`` and the reason.
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
    """The base's weights in memory that other processes of this machine can map.

    Args:
        file: Descriptor of the memory, in the process that holds this.
        num_bytes: Size of the memory.
        manifest: Table of the weights in it, for the builder that made it.
        gpu: Identity of the GPU whose memory it is; empty for main memory.
    """

    file: int
    num_bytes: int
    manifest: bytes
    gpu: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreParts:
    """The parts that an engine core is made of.

    Args:
        base: The base model's shape.
        num_pages: Pages in the pool.
        executor: Executes plans.
        is_accelerated: Whether steps run on a device rather than on this process's CPU.
        reads_host: Whether a step can read an adapter's weights from the host tier.
        waits_by_layer: Whether a step can run on an adapter that is on its way, and wait for each layer.
        host_bytes: Size of the host tier where the configuration gives none.
        base_weights: How the base's weights are kept and multiplied: a line for each kind, the largest first.
    """

    base: BaseShape
    num_pages: int
    executor: Executor
    is_accelerated: bool = False
    reads_host: bool = False
    waits_by_layer: bool = False
    host_bytes: int = DEFAULT_HOST_BYTES
    base_weights: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParts(CoreParts):
    """The parts of an engine, made by ``execution.build`` or ``sim.build``.

    Args:
        reader: Reads adapters.
        close: Stops threads and frees the device.
        machine: The executor's machine, in words; for reports of measurements.
        shared: The base's weights, where other processes can map them.
        prepare: Compiles a request's constraint before the request is added; blocks, safe from any thread. Raises
            ``RequestError`` for one that cannot be enforced.
    """

    reader: AdapterReader
    close: Callable[[], None]
    machine: str = ""
    shared: SharedBase | None = None
    prepare: Callable[[Constraint], None] = lambda constraint: None
