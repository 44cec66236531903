"""One function of a node: asleep until a request comes, then a process of its own until none has come for long.

::

    asleep --request, or order--> waking ---> awake --idle for keep-alive, or memory needed--> ending ---> asleep
                                    |
                                    +--error--> failed --a while later--> asleep

Requests wait here until they leave as a batch (``functions.batching``). They leave at once if nothing is gained by
waiting: on an idle device, if no other request is expected in time, and if the function runs, so that its next step
takes them in.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Protocol

from msgspec import structs

from manylora.core.errors import AdapterError, CapacityError, EngineDead, ManyloraError
from manylora.core.types import Request
from manylora.functions.decisions.batching import deadline_margin_s
from manylora.functions.decisions.rates import RequestRate
from manylora.functions.deployment import FunctionSpec
from manylora.functions.node.accounts import account_name
from manylora.functions.node.backbone_host import BackboneHost
from manylora.functions.node.batch_times import BatchTimes
from manylora.functions.node.launch import Awake, Timeouts, Users, launch_until_up
from manylora.functions.node.readings import memory_of
from manylora.functions.processes.function_log import FunctionLog
from manylora.serving.hosting.fleet.keeper import EngineState
from manylora.serving.hosting.links.in_flight import OutputStream
from manylora.serving.hosting.protocol import Observations
from manylora.serving.metrics.status_report import FunctionStart, FunctionState, MeasureNote

__all__ = ["FunctionInstance", "FunctionPhase", "HostNode"]

RETRY_AFTER_S = 5.0
"""Seconds after a failed start in which requests get its error at once."""

RESTARTING_S = 0.1
"""Seconds between two looks at a process that is restarted."""

logger = logging.getLogger(__name__)


class FunctionPhase(Enum):
    """The states of a function."""

    ASLEEP = "asleep"
    WAKING = "waking"
    AWAKE = "awake"
    ENDING = "ending"
    FAILED = "failed"


class HostNode(Users, Protocol):
    """What a function needs of its node."""

    usual_bytes: int
    """Memory that a process is expected to take before it was ever read."""

    timeouts: Timeouts
    """Bounds of the silence of its functions."""

    async def reserve(self, instance: FunctionInstance) -> None:
        """Make room for a function; raises ``CapacityError`` if none comes free."""
        ...

    def changed(self, instance: FunctionInstance) -> None:
        """Note that a function's phase, or whether it runs, has changed."""
        ...

    def num_running_beside(self, instance: FunctionInstance) -> int:
        """Return the number of other functions that run."""
        ...

    def num_sharers(self, host: BackboneHost) -> int:
        """Return the number of processes that share the pages of a backbone's zygote, with itself."""
        ...

    def read_cpu(self, instance: FunctionInstance) -> None:
        """Count the processor time of a function, whose phase is about to change."""
        ...

    def observed(self, instance: FunctionInstance, seen: Observations) -> None:
        """Take the observations of a function's engine."""
        ...


@dataclass(slots=True, eq=False)
class _Waiting:
    go: asyncio.Future[None]
    since: float
    num_requests: int
    has_left: bool = False


class FunctionInstance:
    """A function on its node. For the event loop's thread alone.

    Args:
        name: Its name.
        spec: Its registration.
        host: Its backbone.
        node: Its node.
    """

    def __init__(self, name: str, spec: FunctionSpec, host: BackboneHost, node: HostNode) -> None:
        self.name = name
        self.spec = spec
        self.host = host
        self.phase = FunctionPhase.ASLEEP
        self.is_held = False
        """Whether the controller wants it awake, whatever its requests."""
        self.last_used = float("-inf")
        self.own_bytes = 0
        """Memory of its process alone, as of the last reading; of the one before while it sleeps."""
        self.account = account_name(spec.tenant, name)
        self._node = node
        self._awake: Awake | None = None
        self._log: FunctionLog | None = None  # from its first start on
        self._told_missing: tuple[MeasureNote, ...] = ()
        self._ending: Awake | None = None  # from the end of its service to that of its process
        self._waiting: deque[_Waiting] = deque()
        self._num_leaving = 0  # requests between the queue and the engine
        self._waker: asyncio.Task[None] | None = None
        self._stopping: asyncio.Task[None] | None = None  # of an engine that was given up
        self._timer: asyncio.TimerHandle | None = None
        self._rate = RequestRate()
        self._times = BatchTimes(spec)
        self._pss_bytes = 0
        self._num_starts = self._num_deaths = 0
        self._start: FunctionStart | None = None
        self._awake_since: float | None = None
        self._failed: tuple[float, ManyloraError] | None = None
        self._adapter_bytes: int | None = None

    # -- state -------------------------------------------------------------------------------------------------------

    @property
    def is_running(self) -> bool:
        """Whether requests are with its engine, or on their way."""
        if self._num_leaving:
            return True
        awake = self._awake
        return awake is not None and awake.num_in_flight > 0

    @property
    def is_idle(self) -> bool:
        """Whether it is awake without any request."""
        return self.phase is FunctionPhase.AWAKE and not self._waiting and not self.is_running

    @property
    def reserved_bytes(self) -> int:
        """Memory that its process takes, or is expected to; at least that of a full pool and its adapter."""
        return max(self.own_bytes or self._node.usual_bytes, self.spec.kv_bytes + self.spec.adapter_bytes)

    @property
    def pid(self) -> int | None:
        """Its process."""
        engine = self._awake or self._ending
        return None if engine is None else engine.pid

    @property
    def has_process(self) -> bool:
        """Whether it has a process, or is about to have one."""
        return self.phase in (FunctionPhase.WAKING, FunctionPhase.AWAKE, FunctionPhase.ENDING)

    @property
    def awake(self) -> Awake | None:
        """Its engine, while it is awake."""
        return self._awake

    @property
    def cold_start_s(self) -> float:
        """Seconds of a start from a zygote, as of the last; a guess before the first."""
        return 1.0 if self._start is None else self._start.total_s

    def rate(self, now: float) -> float:
        """Return its requests per second."""
        return self._rate.per_s(now)

    def margin_s(self, now: float, num_batches: int) -> float:
        """Return the time left before its waiting requests must start; it has some."""
        return deadline_margin_s(self._times.window, self._waiting[0].since, self._num_waiting, now, num_batches)

    @property
    def has_waiting(self) -> bool:
        """Whether requests wait to leave."""
        return bool(self._waiting)

    def describe(self, now: float) -> FunctionState:
        """Return its state for a report."""
        awake = self._awake
        return FunctionState(
            name=self.name,
            state=self.phase.value,
            pid=self.pid,
            awake_since=self._awake_since,
            is_held=self.is_held,
            num_running=0 if awake is None else awake.num_in_flight,
            num_waiting=self._num_waiting,
            pss_bytes=self._pss_bytes if awake is not None else 0,
            own_bytes=self.own_bytes,
            adapter_bytes=self._file_bytes(),
            requests_per_s=self.rate(now),
            num_starts=self._num_starts,
            num_deaths=self._num_deaths + (0 if awake is None else awake.fleet.num_restarts),
            last_start=self._start,
            error=str(self._failed[1])[:4000] if self.phase is FunctionPhase.FAILED and self._failed else None,
            missing=self._missing(),
        )

    def _missing(self) -> tuple[MeasureNote, ...]:
        """Return the measures of isolation that are not in force."""
        report = None if self._awake is None else self._awake.report
        measures = () if report is None else report.measures
        return tuple([MeasureNote(one.name, one.note[:4000]) for one in measures if not one.is_on])

    def _tell_missing(self) -> None:
        """Log the measures that are not in force, once, and again when they are others."""
        missing = self._missing()
        if missing != self._told_missing:
            self._told_missing = missing
            reasons = "; ".join([f"{one.name}: {one.note!r}" for one in missing]) or "none"
            logger.warning("function_isolation_missing name=%s measures=%s", self.name, reasons)

    def take_lines(self) -> list[str]:
        """Return the last lines that its processes have written since the last call."""
        return [] if self._log is None else self._log.take()

    def weigh(self) -> None:
        """Give its process a share of the processors while it has requests."""
        if self._awake is not None:
            self._awake.weigh(self.has_waiting or self.is_running)

    def read_memory(self) -> None:
        """Read its memory."""
        if self.phase is not FunctionPhase.AWAKE or self.pid is None:
            return
        reading = memory_of(self.pid, self._node.num_sharers(self.host), self.host.zygote_bytes, self.host.num_bytes)
        if reading is not None:
            self._pss_bytes, self.own_bytes = reading.pss, reading.own
            self._node.usual_bytes = max(self._node.usual_bytes, self.own_bytes)

    # -- requests ----------------------------------------------------------------------------------------------------

    async def submit(self, requests: Sequence[Request]) -> OutputStream:
        """Wait for the process and for the batch, submit requests, and return their stream.

        Raises:
            ManyloraError: The function cannot start, too many requests wait, or as of ``Fleet.submit``.
        """
        if self._num_waiting + len(requests) > self.spec.max_waiting:
            raise CapacityError(f"{self._num_waiting} requests wait for function {self.name!r}, which is its limit")
        loop = asyncio.get_running_loop()
        entry = _Waiting(loop.create_future(), loop.time(), len(requests))
        self._waiting.append(entry)
        self._rate.note(loop.time(), len(requests))
        self.last_used = loop.time()
        self.advance()
        try:
            await self._turn(entry.go)
            if self._awake is None:  # it was given up, or put to sleep, between the queue and the engine
                raise self._sleeping()
            return await self._awake.fleet.submit(requests)
        finally:
            if entry.has_left:
                self._num_leaving -= entry.num_requests
            elif entry in self._waiting:
                self._waiting.remove(entry)
            self._node.changed(self)

    async def _turn(self, go: asyncio.Future[None]) -> None:
        """Wait until requests may leave; for as long as their batch may wait, and a process may be silent."""
        hang_s = self._node.timeouts.hang_s
        try:
            async with asyncio.timeout(None if hang_s is None else hang_s + self.spec.slo_s):
                await go
        except TimeoutError:
            state = self.phase if self._awake is None else self._awake.fleet.state
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
        if not self._waiting:
            return
        loop = asyncio.get_running_loop()
        now = loop.time()
        if self.phase is FunctionPhase.FAILED:
            assert self._failed is not None
            failed_at, error = self._failed
            if now - failed_at < RETRY_AFTER_S:
                self._refuse(error)
                return
            self.phase = FunctionPhase.ASLEEP
        if self.phase is FunctionPhase.ASLEEP:
            self.wake()
        if self.phase is not FunctionPhase.AWAKE:
            return
        assert self._awake is not None
        if self._awake.fleet.state is not EngineState.SERVING:
            self._timer = loop.call_later(RESTARTING_S, self.advance)
            return
        while self._waiting:
            num_batches = self._node.num_running_beside(self) + 1
            if num_batches > 1 and not self.is_running:
                at = self._times.window.leaves_at(self._waiting[0].since, self._num_waiting, now, num_batches)
                if self.rate(now) * (at - now) >= 1.0:  # another is expected by then
                    self._timer = loop.call_later(at - now, self.advance)
                    return
            self._leave(now, num_batches)

    def observed(self, seen: Observations) -> None:
        """Count the observations of its engine."""
        now = asyncio.get_running_loop().time()
        self._node.observed(self, seen)
        if seen.ttft_s:
            took_s = self._times.note(now, sum(map(len, seen.ttft_s.values())))
            if took_s is not None and self._start is not None:
                self._start = structs.replace(self._start, first_token_s=took_s)
        if seen.finished:
            self.last_used = now
            self._node.changed(self)

    # -- life --------------------------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Start the process, unless there is one."""
        if self.phase is FunctionPhase.ASLEEP:
            self.phase = FunctionPhase.WAKING
            self._waker = asyncio.create_task(self._wake())
            self._node.changed(self)

    async def sleep(self, reason: str, error: ManyloraError | None = None) -> None:
        """End the process; requests that wait for it wake it again.

        Args:
            reason: For the log.
            error: The end of requests with its engine; ``None`` to ask their callers to try again.
        """
        waker, self._waker = self._waker, None
        if waker is not None:
            waker.cancel()
            await asyncio.gather(waker, return_exceptions=True)
        if self._ending is not None:  # the first of two calls ends it
            return
        self._node.read_cpu(self)
        awake, self._awake, self._awake_since = self._awake, None, None
        self._times.restart()
        if awake is not None:
            self._num_deaths += awake.fleet.num_restarts
            logger.info("function_sleeps name=%s reason=%s", self.name, reason)
            self._ending, self.phase = awake, FunctionPhase.ENDING
            self._node.changed(self)
        try:
            if awake is not None:
                await awake.stop(error or self._sleeping())
        finally:
            self._ending, self.phase = None, FunctionPhase.ASLEEP
            self._node.changed(self)
        self.advance()

    async def close(self, error: ManyloraError) -> None:
        """End the process; requests that wait, and those with its engine, get the error."""
        self._refuse(error)
        await self.sleep("closed", error)

    async def _wake(self) -> None:
        loop = asyncio.get_running_loop()
        began, at = loop.time(), time.time()
        begun_from = self.host.begun_from
        self._log = self._log or FunctionLog(self.name)
        try:
            await self._node.reserve(self)
            stages = {"room": loop.time() - began}
            awake = await launch_until_up(
                self.name,
                self.spec,
                self.host,
                stages,
                begun_from,
                log=self._log,
                users=self._node,
                timeouts=self._node.timeouts,
                observe=self.observed,
            )
        except CapacityError as error:  # no fault of the function: the next request tries again
            self.phase, self._waker = FunctionPhase.ASLEEP, None
            self._refuse(error)
            self._node.changed(self)
            return
        except AdapterError as error:  # the caller's request is right
            self._fail(self._unusable(error))
            return
        except ManyloraError as error:
            self._fail(error)
            return
        except Exception as error:  # it would wake for ever
            logger.exception("function_start_broke name=%s", self.name)
            self._fail(EngineDead(f"It cannot start: {error!r}"))
            return
        report = awake.report
        stages |= {} if report is None else report.took_s
        total_s = loop.time() - began
        stages["adapter"] = max(0.0, total_s - sum(stages.values()))
        self._start = FunctionStart(at=at, begun_from=begun_from, stages_s=stages, total_s=total_s)
        self._num_starts += 1
        self._awake, self._waker, self._failed = awake, None, None
        self._node.read_cpu(self)  # its start
        self.phase, self._awake_since = FunctionPhase.AWAKE, time.time()
        awake.keeping.add_done_callback(lambda task: self._given_up(awake, task))
        self.read_memory()
        logger.info("function_awake name=%s from=%s took_s=%.3f", self.name, begun_from, total_s)
        self._tell_missing()
        self._node.changed(self)
        self.advance()

    def _fail(self, error: ManyloraError) -> None:
        logger.warning("function_failed name=%s error=%s", self.name, error)
        self.phase, self._waker = FunctionPhase.FAILED, None
        self._failed = asyncio.get_running_loop().time(), error
        self._refuse(error)
        self._node.changed(self)

    def _given_up(self, awake: Awake, task: asyncio.Task[None]) -> None:
        """Its process died too often."""
        if self._awake is not awake or task.cancelled() or task.exception() is None:
            return
        error = task.exception()
        self._awake, self._awake_since = None, None
        self._times.restart()
        self._num_deaths += awake.fleet.num_restarts + 1
        self._fail(error if isinstance(error, ManyloraError) else EngineDead(repr(error)))
        self._stopping = asyncio.create_task(awake.stop(self._sleeping()))

    def _refuse(self, error: ManyloraError) -> None:
        for entry in self._waiting:
            if not entry.go.done():
                entry.go.set_exception(error)
        self._waiting.clear()

    def _unusable(self, error: ManyloraError) -> CapacityError:
        return CapacityError(f"Function {self.name!r} cannot start: {error}", retry_after_s=RETRY_AFTER_S, status=503)

    def _sleeping(self) -> CapacityError:
        return CapacityError(
            f"Function {self.name!r} went to sleep as the request came; please try again.",
            retry_after_s=1.0,
            status=503,
        )

    # -- batches -----------------------------------------------------------------------------------------------------

    @property
    def _num_waiting(self) -> int:
        return sum(entry.num_requests for entry in self._waiting)

    def _leave(self, now: float, num_batches: int) -> None:
        """Let the oldest requests go, at most as many as a batch has."""
        size = 0
        is_first = not self.is_running
        while self._waiting and (not size or size + self._waiting[0].num_requests <= self.spec.max_batch):
            entry = self._waiting.popleft()
            if entry.go.done():
                continue  # its caller has gone
            size += entry.num_requests
            entry.has_left = True
            self._num_leaving += entry.num_requests
            entry.go.set_result(None)
        if size and is_first:
            self._times.begin(now, size, num_batches)
        if size:
            self._node.changed(self)

    def _file_bytes(self) -> int:
        if self._adapter_bytes is None:
            try:
                self._adapter_bytes = sum(one.stat().st_size for one in Path(self.spec.adapter).glob("*.safetensors"))
            except OSError:
                return 0
        return self._adapter_bytes
