"""One function of a node: asleep until a request comes, then a process of its own until none has come for long.

Requests wait here until they leave as a batch (`manylora.functions.decisions.batching`). They leave at once if nothing
is gained by waiting: on an idle device, if no other request is expected in time, and if the function runs, so that its
next step takes them in.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Protocol

from msgspec import structs

from manylora.core.adapters.folder import WEIGHT_FILES
from manylora.core.errors import AdapterError, CapacityError, EngineDead, ManyloraError, RequestError
from manylora.core.types import Request
from manylora.functions.decisions.batching import RequestRate
from manylora.functions.deployment import FunctionSpec
from manylora.functions.node.backbone_host import BackboneHost
from manylora.functions.node.launch import AwakeFunction, Launcher, ProcessUsers, Timeouts
from manylora.functions.node.queue import BatchQueue
from manylora.functions.processes.link import FunctionLog
from manylora.serving.hosting.fleet.keeper import EngineState
from manylora.serving.hosting.links.in_flight import OutputStream
from manylora.serving.hosting.protocol import Observations
from manylora.serving.metrics.status_report import FunctionStart, FunctionState, MeasureNote

__all__ = ["FunctionInstance", "FunctionPhase", "HostNode"]

RETRY_AFTER_S = 5.0  # seconds after a failed start in which requests get its error at once
RESTARTING_S = 0.1  # seconds between two looks at a process that is restarted

logger = logging.getLogger(__name__)


class FunctionPhase(Enum):
    """The states of a function."""

    ASLEEP = "asleep"
    WAKING = "waking"
    AWAKE = "awake"
    ENDING = "ending"
    FAILED = "failed"

    @property
    def has_process(self) -> bool:
        """Whether a function has a process, or is about to have one."""
        return self in (FunctionPhase.WAKING, FunctionPhase.AWAKE, FunctionPhase.ENDING)


TRANSITIONS = {
    (FunctionPhase.ASLEEP, FunctionPhase.WAKING): "a request came, or an order to hold it ready",
    (FunctionPhase.WAKING, FunctionPhase.AWAKE): "its engine takes requests",
    (FunctionPhase.WAKING, FunctionPhase.ASLEEP): "there was no room for it, or it was put to sleep",
    (FunctionPhase.WAKING, FunctionPhase.FAILED): "its start failed",
    (FunctionPhase.AWAKE, FunctionPhase.ENDING): "its keep-alive is over, its memory is needed, or it was removed; or "
    "its adapter's files are others than at its start",
    (FunctionPhase.AWAKE, FunctionPhase.FAILED): "its processes died too often in a row",
    (FunctionPhase.ENDING, FunctionPhase.ASLEEP): "its process has ended",
    (FunctionPhase.FAILED, FunctionPhase.ASLEEP): "a request came after ``RETRY_AFTER_S``, or it was removed",
}
"""The changes of a function's phase, and their causes."""


class HostNode(Protocol):
    """What a function needs of its node."""

    users: ProcessUsers
    timeouts: Timeouts

    async def reserve(self, instance: FunctionInstance) -> None:
        """Make room for a function; raises ``CapacityError`` if none comes free."""

    def enter(self, instance: FunctionInstance, phase: FunctionPhase) -> None:
        """Charge a function for its phase until now, and set the next one."""

    def parted(self, instance: FunctionInstance, engine: AwakeFunction) -> None:
        """Keep what a function's engine has counted, which ends."""

    def changed(self, instance: FunctionInstance) -> None:
        """Note that a function runs, or no longer does."""

    def num_running_beside(self, instance: FunctionInstance) -> int:
        """Return the number of other functions that run."""

    def observed(self, instance: FunctionInstance, seen: Observations) -> None:
        """Take the observations of a function's engine."""


@dataclass(eq=False)
class FunctionInstance:
    """A function on its node. Only for the event loop's thread."""

    name: str
    spec: FunctionSpec
    host: BackboneHost
    node: HostNode
    number: int  # of all functions that the node has ever had: the label ``replica`` of its engine's metrics
    phase: FunctionPhase = FunctionPhase.ASLEEP
    last_used: float = -math.inf
    rate: RequestRate = field(default_factory=RequestRate)
    log: FunctionLog | None = None  # the lines that its processes write; ``None`` before its first start
    engine: AwakeFunction | None = None  # its engine, while it is awake
    is_held: bool = False  # whether the controller wants it awake, whatever its requests
    own_bytes: int = 0  # memory of its own process at the last reading; while asleep, of the previous process
    pss_bytes: int = 0  # proportional set size of its process at the last reading
    _ending: AwakeFunction | None = None  # from the end of its service to the end of its process
    _waker: asyncio.Task[None] | None = None
    _stopping: asyncio.Task[None] | None = None  # of an engine whose processes died too often, or lack its adapter
    _timer: asyncio.TimerHandle | None = None
    _num_starts: int = 0
    _num_deaths: int = 0
    _start: FunctionStart | None = None
    _awake_since: float | None = None
    _failed: tuple[float, ManyloraError] | None = None
    _adapter_bytes: int = 0  # of its files, from its first start on
    _logged_missing: tuple[MeasureNote, ...] = ()

    def __post_init__(self) -> None:
        self.account = f"{self.spec.tenant}:{self.name}"  # neither part has a colon
        self.queue = BatchQueue(self.spec.slo_s, self.spec.max_batch)

    # -- state -------------------------------------------------------------------------------------------------------

    @property
    def is_running(self) -> bool:
        """Whether requests are with its engine, or on their way."""
        return self.queue.num_leaving > 0 or (self.engine is not None and self.engine.num_in_flight > 0)

    @property
    def is_idle(self) -> bool:
        """Whether the function is awake without any request."""
        return self.phase is FunctionPhase.AWAKE and not self.queue and not self.is_running

    @property
    def pid(self) -> int | None:
        """Its process."""
        engine = self.engine or self._ending
        return None if engine is None else engine.pid

    @property
    def cold_start_s(self) -> float:
        """Seconds of the last start; an estimate before the first."""
        return 1.0 if self._start is None else self._start.total_s

    def describe(self, now: float) -> FunctionState:
        """Return the state of the function for a report."""
        engine = self.engine
        return FunctionState(
            name=self.name,
            state=self.phase.value,
            pid=self.pid,
            awake_since=self._awake_since,
            is_held=self.is_held,
            num_running=0 if engine is None else engine.num_in_flight,
            num_waiting=len(self.queue),
            pss_bytes=0 if engine is None else self.pss_bytes,
            own_bytes=self.own_bytes,
            adapter_bytes=self._adapter_bytes,
            requests_per_s=self.rate.per_s(now),
            num_starts=self._num_starts,
            num_deaths=self._num_deaths + (0 if engine is None else engine.fleet.engines.num_restarts),
            last_start=self._start,
            error=str(self._failed[1])[:4000] if self.phase is FunctionPhase.FAILED and self._failed else None,
            missing=() if engine is None else _missing_measures(engine),
        )

    # -- requests ----------------------------------------------------------------------------------------------------

    async def submit(self, requests: Sequence[Request]) -> OutputStream:
        """Wait for the process and for the batch, submit requests, and return their stream.

        ``ManyloraError`` if the function cannot start, too many requests wait, or the engine refuses a request.
        """
        if len(requests) > self.spec.max_waiting:
            most = f"at most {self.spec.max_waiting} of function {self.name!r}"
            raise RequestError(f"Got {len(requests)} answers in one request, expected {most}", param="n")
        if len(self.queue) + len(requests) > self.spec.max_waiting:
            raise CapacityError(f"{len(self.queue)} requests wait for function {self.name!r}, which is its limit")
        now = asyncio.get_running_loop().time()
        try:
            with self.queue.join(now, len(requests)) as go:
                self.rate.note(now, len(requests))
                self.last_used = now
                self.advance()
                await self._wait(go)
                if self.engine is None:  # it failed, or was put to sleep, between the queue and the engine
                    raise self._asleep_error()
                try:
                    return await self.engine.fleet.requests.submit(requests)
                except ManyloraError:
                    self.queue.times.note(now, 0, len(requests))
                    raise
        finally:
            self.node.changed(self)

    async def _wait(self, go: asyncio.Future[None]) -> None:
        """Wait until requests may leave; for as long as their batch may wait, and a process may be silent."""
        hang_s = self.node.timeouts.hang_s
        try:
            async with asyncio.timeout(None if hang_s is None else hang_s + self.spec.slo_s):
                await go
        except TimeoutError:
            state = self.phase if self.engine is None else self.engine.fleet.engines.state
            raise CapacityError(
                f"Function {self.name!r} took no requests for {hang_s:g} s: it is {state.value}; please try again.",
                retry_after_s=RETRY_AFTER_S,
                status=503,
            ) from None

    def advance(self) -> None:
        """Let waiting requests leave if it is time; wake the process if there is none."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self.queue:
            return
        loop = asyncio.get_running_loop()
        now = loop.time()
        if self.phase is FunctionPhase.FAILED:
            assert self._failed is not None
            failed_at, error = self._failed
            if now - failed_at < RETRY_AFTER_S:
                self.queue.refuse(error)
                return
            self._enter(FunctionPhase.ASLEEP)
        self.wake()
        if self.engine is None:
            return
        if self.engine.fleet.engines.state is not EngineState.SERVING:
            self._timer = loop.call_later(RESTARTING_S, self.advance)
            return
        while self.queue:
            num_batches = self.node.num_running_beside(self) + 1
            if num_batches > 1 and not self.is_running:
                at = self.queue.leaves_at(now, num_batches)
                if self.rate.per_s(now) * (at - now) >= 1.0:  # another request is expected by then
                    self._timer = loop.call_later(at - now, self.advance)
                    return
            if self.queue.leave(now, num_batches, is_alone=not self.is_running):
                self.node.changed(self)

    def observed(self, seen: Observations) -> None:
        """Count the observations of its engine."""
        now = asyncio.get_running_loop().time()
        self.node.observed(self, seen)
        num_without = sum(one.prefill_s is None for one in seen.finished)
        if seen.ttft_s or num_without:
            took_s = self.queue.times.note(now, sum(map(len, seen.ttft_s.values())), num_without)
            if took_s is not None and self._start is not None:
                self._start = structs.replace(self._start, first_token_s=took_s)
        if seen.finished:
            self.last_used = now
            self.node.changed(self)
        if seen.num_failed_loads and self.phase is FunctionPhase.AWAKE:
            # A process that took the place of another one found other files: the next start is with those.
            self._stopping = asyncio.create_task(self.sleep("its adapter has changed", self._asleep_error()))

    # -- life --------------------------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Start the process if it is asleep."""
        if self.phase is FunctionPhase.ASLEEP:
            self._waker = asyncio.create_task(self._wake())
            self._enter(FunctionPhase.WAKING)

    async def sleep(self, reason: str, error: ManyloraError | None = None) -> None:
        """End the process; requests that wait for it wake it again, and those with its engine get the ``error``.

        Without one only an idle process ends: a request may have come since it was found so.
        """
        if (waker := self._waker) is not None:
            waker.cancel()
            await asyncio.gather(waker, return_exceptions=True)
            if self._waker is waker:
                self._waker = None
            elif self.engine is None:  # another call has ended it, or its start failed
                return
        if error is None and self.engine is not None and not self.is_idle:
            return
        if self.engine is not None:
            logger.info("function_sleeps name=%s reason=%s", self.name, reason)
            engine = self._ending = self._part_from_engine()
            self._enter(FunctionPhase.ENDING)
            try:
                await engine.stop(error or self._asleep_error())
            finally:
                self._ending = None
                self._enter(FunctionPhase.ASLEEP)
        elif self.phase in (FunctionPhase.WAKING, FunctionPhase.FAILED):
            self._enter(FunctionPhase.ASLEEP)
        self.advance()

    async def close(self, error: ManyloraError) -> None:
        """End the process; requests that wait, and those with its engine, get the error."""
        self.queue.refuse(error)
        await self.sleep("closed", error)

    async def _wake(self) -> None:
        try:
            await self._start_engine()
        except CapacityError as error:  # no fault of the function: the next request tries again
            self._waker = None
            self.queue.refuse(error)
            self._enter(FunctionPhase.ASLEEP)
        except AdapterError as error:  # the caller's request is right
            reason = f"Function {self.name!r} cannot start: {error}"
            self._fail(CapacityError(reason, retry_after_s=RETRY_AFTER_S, status=503))
        except ManyloraError as error:
            self._fail(error)
        except Exception as error:  # it would wake for ever
            logger.exception("function_start_broke name=%s", self.name)
            self._fail(EngineDead(f"It cannot start: {error!r}"))
        else:
            self.advance()

    async def _start_engine(self) -> None:
        loop = asyncio.get_running_loop()
        began, at = loop.time(), time.time()
        begun_from = self.host.begun_from
        self.log = self.log or FunctionLog(self.name)
        self._adapter_bytes = await asyncio.to_thread(_bytes_of_weights, Path(self.spec.adapter))
        launcher = Launcher(
            name=self.name,
            spec=self.spec,
            host=self.host,
            log=self.log,
            users=self.node.users,
            timeouts=self.node.timeouts,
            observe=self.observed,
        )
        await self.node.reserve(self)
        room_s = loop.time() - began
        engine, launched_s = await launcher.start(begun_from)
        stages = {"room": room_s, **launched_s, **({} if engine.report is None else engine.report.took_s)}
        total_s = loop.time() - began
        stages["adapter"] = max(0.0, total_s - sum(stages.values()))
        self._start = FunctionStart(at=at, begun_from=begun_from, stages_s=stages, total_s=total_s)
        self._num_starts += 1
        self.engine, self._waker, self._failed, self._awake_since = engine, None, None, time.time()
        engine.keeping.add_done_callback(partial(self._keeping_ended, engine))
        logger.info("function_awake name=%s from=%s took_s=%.3f", self.name, begun_from, total_s)
        self._log_missing(engine)
        self._enter(FunctionPhase.AWAKE)

    def _fail(self, error: ManyloraError) -> None:
        logger.warning("function_failed name=%s error=%s", self.name, error)
        self._waker = None
        self._failed = asyncio.get_running_loop().time(), error
        self.queue.refuse(error)
        self._enter(FunctionPhase.FAILED)

    def _keeping_ended(self, engine: AwakeFunction, task: asyncio.Task[None]) -> None:
        """Fail if its process died too often."""
        if self.engine is not engine or task.cancelled() or (error := task.exception()) is None:
            return
        self._part_from_engine()
        self._num_deaths += 1
        self._fail(error if isinstance(error, ManyloraError) else EngineDead(repr(error)))
        self._stopping = asyncio.create_task(engine.stop(self._asleep_error()))

    def _part_from_engine(self) -> AwakeFunction:
        engine, self.engine, self._awake_since = self.engine, None, None
        assert engine is not None
        self.queue.times.restart()
        self._num_deaths += engine.fleet.engines.num_restarts
        self.node.parted(self, engine)
        return engine

    def _enter(self, phase: FunctionPhase) -> None:
        assert (self.phase, phase) in TRANSITIONS, f"{self.name} went from {self.phase} to {phase}"
        self.node.enter(self, phase)

    def _asleep_error(self) -> CapacityError:
        message = f"Function {self.name!r} went to sleep as the request came; please try again."
        return CapacityError(message, retry_after_s=1.0, status=503)

    def _log_missing(self, engine: AwakeFunction) -> None:
        """Log the measures that are not in force, once, and again when they are others."""
        missing = _missing_measures(engine)
        if missing != self._logged_missing:
            self._logged_missing = missing
            reasons = "; ".join([f"{one.name}: {one.note!r}" for one in missing]) or "none"
            logger.warning("function_isolation_missing name=%s measures=%s", self.name, reasons)


def _bytes_of_weights(folder: Path) -> int:
    """Return the size of the weights, by their names: the tenant may have any number of other files beside them."""
    for file in WEIGHT_FILES:
        with contextlib.suppress(OSError):
            return (folder / file).stat().st_size
    return 0


def _missing_measures(engine: AwakeFunction) -> tuple[MeasureNote, ...]:
    """Return the measures of isolation that are not in force."""
    measures = () if engine.report is None else engine.report.measures
    return tuple([MeasureNote(one.name, one.note[:4000]) for one in measures if not one.is_on])
