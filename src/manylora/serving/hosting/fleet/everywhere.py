"""Changes that every engine of a fleet makes, or none."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import msgspec

from manylora.core.errors import CapacityError, EngineDead, ManyloraError
from manylora.serving.hosting.fleet.engines import FleetEngines
from manylora.serving.hosting.links.client import EngineClient
from manylora.serving.hosting.protocol import Fault

__all__ = ["EveryEngine"]

T = TypeVar("T")


class EveryEngine:
    """Makes a change on every engine of a fleet. For the event loop's thread alone."""

    def __init__(self, engines: FleetEngines) -> None:
        self._engines = engines

    async def do(
        self,
        act: Callable[[EngineClient], Awaitable[T]],
        *,
        undo: Callable[[EngineClient], Awaitable[object]] | None = None,
    ) -> list[T]:
        """Make a change on every engine that serves, and on those that start to serve meanwhile.

        The error of an engine that dies is ignored if another succeeds: the book brings its successor up to date.
        Another error is raised, after ``undo`` has reverted the change where it succeeded; of several engines it names
        those that failed.

        Returns:
            The results of the engines that are alive, at least one. Until the caller next awaits, no engine serves that
            has not made the change.
        """
        results: dict[int, T | BaseException] = {}
        clients: dict[int, EngineClient] = {}
        serving = self._engines.serving()
        while pending := {index: one for index, one in serving.items() if clients.get(index) is not one}:
            clients |= pending
            done = await asyncio.gather(*map(act, pending.values()), return_exceptions=True)
            results |= dict(zip(pending, done, strict=True))
            with contextlib.suppress(CapacityError, EngineDead):
                serving = self._engines.serving()
        failed = {
            index: result
            for index, result in results.items()
            if isinstance(result, BaseException) and not isinstance(result, EngineDead)
        }
        if failed and undo is not None:
            undone = (undo(one) for index, one in clients.items() if not isinstance(results[index], BaseException))
            await asyncio.gather(*undone, return_exceptions=True)
        if failed:
            raise self._named(next(iter(failed.values())), list(failed))
        return _successes(list(results.values()))

    def _named(self, error: BaseException, engines: Sequence[int]) -> BaseException:
        """Return an error that names its engines, if the fleet has several."""
        num_engines = len(self._engines.keepers)
        if num_engines == 1 or not isinstance(error, ManyloraError):
            return error
        where = f"{'engine' if len(engines) == 1 else 'engines'} {', '.join(map(str, engines))} of {num_engines}"
        fault = Fault.of(error)
        return msgspec.structs.replace(
            fault, message=f"{where}: {fault.message}", reason=f"{where}: {fault.reason}"
        ).to_error()


def _successes(results: Sequence[T | BaseException]) -> list[T]:
    """Return the results of the engines that are alive; raise ``EngineDead`` if none is."""
    succeeded = [result for result in results if not isinstance(result, BaseException)]
    for result in results:
        if isinstance(result, BaseException) and not (succeeded and isinstance(result, EngineDead)):
            raise result
    return succeeded
