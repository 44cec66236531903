"""The engines of a fleet over its life: started together, watched, and none ends the others.

::

    start: every first engine ---> it serves, and is watched while others still start
                 |  |
                 |  +-- it died, or found no place ---> tried again, as after a death, if another came up
                 +----- it refused its configuration, or a required adapter ---> the start fails
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any

from manylora.core.errors import CapacityError, EngineDead
from manylora.serving.hosting.fleet.keeper import SCARCITY, EngineKeeper, EngineState

__all__ = ["ENDED", "FleetEngines"]

logger = logging.getLogger(__name__)

ENDED = (EngineState.STOPPED, EngineState.IDLE)
"""States of engines that will not serve by themselves."""


class FleetEngines:
    """Starts and watches the engines of one fleet. For the event loop's thread alone.

    Args:
        keepers: The engines, in use or idle.
    """

    def __init__(self, keepers: Sequence[EngineKeeper]) -> None:
        self._keepers = keepers
        self._watching: dict[int, asyncio.Task[None]] = {}  # by the engine's number; of drained ones the last
        self._has_news = asyncio.Event()  # a task has ended

    async def start(self) -> None:
        """Start the first engines.

        With several, each is watched as soon as it serves: its requests must not wait for the start of the others. The
        engine of a fleet that has no other is watched by ``run`` alone, so a program without ``run`` sees its death.

        Raises:
            ManyloraError: An engine refused its configuration, or a required adapter. Or no engine came up: the error
                of the first.
            OSError: As well if no engine came up, for lack of room.
        """
        starting = [engine for engine, keeper in enumerate(self._keepers) if keeper.state is EngineState.STARTING]
        errors = await asyncio.gather(*map(self._start, starting))
        for engine, error in zip(starting, errors, strict=True):
            if error is not None and all(errors):
                raise error
            if error is not None and self._keepers[engine].state is EngineState.STARTING:
                self._keepers[engine].state = EngineState.RESTARTING  # by ``run``

    async def run(self, beside: Iterable[Coroutine[Any, Any, None]]) -> None:
        """Watch the engines and restart those that die, until all are drained or stopped.

        Args:
            beside: Other work of the fleet, for as long.

        Raises:
            EngineDead: An engine died too often, and no other serves or may soon.
        """
        for engine, keeper in enumerate(self._keepers):
            if keeper.state is not EngineState.IDLE and engine not in self._watching:
                self.watch(engine)
        others = [self._task(one) for one in beside]
        try:
            while True:
                self._has_news.clear()
                for task in [*others, *self._watching.values()]:
                    if task.done():
                        task.result()
                if all(keeper.state in ENDED for keeper in self._keepers):
                    return
                await self._has_news.wait()
        finally:
            for task in [*others, *self._watching.values()]:
                task.cancel()

    def watch(self, engine: int) -> None:
        """Watch an engine and restart it, until it is drained."""
        self._watching[engine] = self._task(self._keepers[engine].run())

    def is_watched(self, engine: int) -> bool:
        """Whether an engine that dies is restarted."""
        return engine in self._watching

    async def give_back(self, engine: int, timeout_s: float) -> None:
        """End an engine whose place may be filled again: its requests may finish for a time, then they go on elsewhere.

        Args:
            engine: Its number; it is watched.
            timeout_s: The time, in seconds.
        """
        await self._keepers[engine].retire(timeout_s)
        await self._watching[engine]

    def is_alone(self, keeper: EngineKeeper) -> bool:
        """Whether no other engine serves, or may soon."""
        return not any(one.may_serve for one in self._keepers if one is not keeper)

    async def _start(self, engine: int) -> Exception | None:
        """Start an engine; return the error of one that may be tried again."""
        try:
            await self._keepers[engine].start()
        except (EngineDead, CapacityError, *SCARCITY) as error:
            logger.error("engine_start_failed engine=%d error=%r", engine, error)
            return error
        if len(self._keepers) > 1:
            self.watch(engine)
        return None

    def _task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        task.add_done_callback(lambda task: self._has_news.set())
        return task
