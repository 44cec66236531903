"""Protocols that the machinery below the engine core implements; owned by the core.

The torch executor implements them on a device, the simulated one on a cost model, the fake one in tests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from manylora.adapters.shape import BaseShape
from manylora.plan import AdapterLoad, LoadResult, StepPlan, StepResult
from manylora.types import AdapterKey, AdapterVersion, Tier

__all__ = ["AdapterReader", "EngineParts", "Executor", "Work"]


class Work(Protocol):
    """Something launched: a step or a load."""

    @property
    def ready_at(self) -> float:
        """When it completes, in seconds: exact in simulation, infinite when only the device knows."""
        ...

    def poll(self, now: float) -> StepResult | LoadResult | None:
        """Return the result once complete, else ``None``. Never blocks.

        Raises:
            Exception: The step failed on the device; the engine is lost.
        """
        ...


class Executor(Protocol):
    """Carries plans out. Every call returns at once; completion is seen through ``Work.poll``.

    A live executor also wakes the loop's clock when work completes.
    """

    def launch(self, plan: StepPlan, now: float) -> Work:
        """Start a step, behind the one in flight if there is one; at most two are."""
        ...

    def load_adapter(self, load: AdapterLoad, now: float) -> Work:
        """Start a load; any number in flight, carried out first in first out per link.

        A failed load is a ``LoadResult`` with ``error``, never an exception.
        """
        ...

    def drop_adapter(self, key: AdapterKey, tier: Tier) -> None:
        """Forget all that is kept for an adapter in ``tier`` (host buffers, device views); its pages are already free.

        Never called while a planned step in flight uses it there, with one exception: an image in the host tier may be
        dropped while a step in flight reads it. The executor keeps the image until that step has ended.
        """
        ...


class AdapterReader(Protocol):
    """Turns a path into an adapter version, with its packed weights kept in the host tier."""

    def read(self, name: str, path: str) -> AdapterVersion:
        """Read, check and pack an adapter. Blocks; safe from any thread, so that the loop never waits for a disk.

        Args:
            name: The caller's name for it, for messages.
            path: Its directory.

        Raises:
            AdapterError: It cannot be served on this base; says why.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParts:
    """The parts that an engine core is put together from; made by ``execution.build`` or ``sim.build``.

    Args:
        base: The base model's shape.
        num_pages: Pages in the pool.
        executor: Carries plans out.
        reader: Reads adapters.
        close: Stops threads and frees the device.
        machine: The machine that carries plans out, in words; for reports of measurements.
        is_accelerated: Whether steps run on a device of their own, beside this process.
        reads_host: Whether a step can read an adapter's weights from the host tier.
    """

    base: BaseShape
    num_pages: int
    executor: Executor
    reader: AdapterReader
    close: Callable[[], None]
    machine: str = ""
    is_accelerated: bool = False
    reads_host: bool = False
