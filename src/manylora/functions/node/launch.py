"""Start the processes of a function from a zygote: its engine, its place, its adapter."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from random import SystemRandom

from manylora.core.adapters.folder import real_roots
from manylora.core.config import AdapterConfig, EngineConfig, MemoryConfig, SchedulerConfig, ServerConfig
from manylora.core.errors import AdapterError, CapacityError, EngineDead, ManyloraError
from manylora.core.isolation.cgroups import ProcessorShare
from manylora.functions.deployment import FunctionSpec
from manylora.functions.node.backbone_host import BackboneHost
from manylora.functions.processes.function_process import PACKAGE, shared_folders
from manylora.functions.processes.link import FunctionLink, FunctionLog
from manylora.functions.processes.messages import FunctionPlace
from manylora.functions.processes.zygote import Zygote
from manylora.serving.hosting.fleet.adapter_book import LoraModule
from manylora.serving.hosting.fleet.fleet import Fleet, FleetPolicy
from manylora.serving.hosting.fleet.keeper import RestartPolicy
from manylora.serving.hosting.fleet.resumption import ResumePolicy
from manylora.serving.hosting.protocol import EngineSpec, Observations, StartReport

__all__ = ["AwakeFunction", "Launcher", "ProcessUsers", "Timeouts"]

RESTARTS = RestartPolicy(max_deaths=4, first_pause_s=0.1, max_pause_s=5.0)

MAX_ZYGOTES = 3  # zygotes that may end during one start before its requests are refused

RETRY_AFTER_S = 5.0

FIRST_UID, NUM_UIDS, NUM_RANGES = 1_000_000_000, 2**16, 2**15
"""Users of functions are above those of people, services and most containers, and each agent has a range of its own:
functions of a second one on the machine, or of one that was killed a moment ago, are other users."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Bounds of a function's silence."""

    # Seconds without progress after which its process is killed and started again; a request waits no longer for the
    # process. ``None`` for never.
    hang_s: float | None
    start_s: float | None  # seconds for a process to start and to read the adapter; ``None`` for any time

    @classmethod
    def of(cls, config: ServerConfig) -> Timeouts:
        """Return the timeouts of a server, where 0 is never."""
        return cls(hang_s=config.hang_timeout_s or None, start_s=config.start_timeout_s or None)


class ProcessUsers:
    """The users of processes: each process has one of its own, until it has ended."""

    def __init__(self) -> None:
        self._unused = itertools.count(FIRST_UID + os.getpid() % NUM_RANGES * NUM_UIDS)
        self._returned: list[int] = []

    def take(self) -> int | None:
        """Return a user for a new process; ``None`` unless this process is root."""
        if os.geteuid() != 0:
            return None
        return heapq.heappop(self._returned) if self._returned else next(self._unused)

    def give_back(self, uid: int | None) -> None:
        """Take back a user that no process has any more."""
        if uid is not None:
            heapq.heappush(self._returned, uid)


@dataclass(slots=True, eq=False)
class AwakeFunction:
    """A function's engine."""

    fleet: Fleet  # the engine, restarted when it dies
    keeping: asyncio.Task[None]  # watches it
    links: list[FunctionLink]  # the links of its processes, the last one alive
    _share: ProcessorShare | None = field(default=None, init=False)
    _weighed: FunctionLink | None = field(default=None, init=False)

    @property
    def pid(self) -> int | None:
        """Its process."""
        return self.fleet.engines.replicas()[0].pid

    @property
    def num_in_flight(self) -> int:
        """Requests with the engine, or between two of its processes."""
        return sum(one.num_in_flight for one in self.fleet.engines.replicas()) + self.fleet.resumes.num_waiting

    @property
    def report(self) -> StartReport | None:
        """The start of the last process that was ready, and its measures."""
        return next((link.report for link in reversed(self.links) if link.report is not None), None)

    def weigh(self, has_requests: bool) -> None:
        """Set the process's share of the processors; without requests, only time that no other process wants."""
        link = self.links[-1]
        if link is not self._weighed and link.report is not None and link.pid is not None:  # it is in its own by then
            self._weighed = link
            self._close_share()
            with contextlib.suppress(OSError):  # which it could not, or this agent is not root
                self._share = ProcessorShare(link.pid)
        if self._share is not None:
            with contextlib.suppress(OSError):  # its process has ended
                self._share.set_background(not has_requests)

    async def stop(self, error: ManyloraError) -> None:
        """End the process; its requests end with the error."""
        self.keeping.cancel()
        self.weigh(True)  # its memory comes free as fast as it can
        await self.fleet.stop(error)
        self._close_share()
        await asyncio.gather(self.keeping, return_exceptions=True)

    def _close_share(self) -> None:
        share, self._share = self._share, None
        if share is not None:
            share.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher:
    """Starts the processes of one function."""

    name: str
    spec: FunctionSpec  # its registration
    host: BackboneHost
    log: FunctionLog  # takes the lines that its processes write
    users: ProcessUsers  # gives each process a user
    timeouts: Timeouts  # bounds of its silence
    observe: Callable[[Observations], None]  # called with the observations of its engine

    async def start(self, begun_from: str) -> tuple[AwakeFunction, dict[str, float]]:
        """Start the function once its backbone is ready; again from another zygote if the zygote ends meanwhile.

        ``begun_from`` is ``BackboneHost.begun_from`` before the start. Return the engine, and the seconds of the stages
        ``backbone`` and ``libraries``, which another function may have begun.

        Errors are those of ``start_from``; ``CapacityError`` if zygotes ended again and again as well.
        """
        now = asyncio.get_running_loop().time
        for attempt in range(1, MAX_ZYGOTES + 1):
            began, zygote, pid = now(), None, None
            try:
                zygote = await self.host.ready()
                waited_s = now() - began
                libraries_s = waited_s if begun_from != "nothing" else min(waited_s, self.host.zygote_s)
                stages = {"backbone": waited_s - libraries_s, "libraries": libraries_s}
                pid = zygote.pid
                return await self.start_from(zygote), stages
            except EngineDead as error:
                if zygote is not None and zygote.pid == pid:
                    raise
                logger.warning("function_start_lost name=%s attempt=%d error=%s", self.name, attempt, error)
        raise CapacityError(
            f"The process that starts functions ended {MAX_ZYGOTES} times while {self.name!r} was starting.",
            retry_after_s=RETRY_AFTER_S,
            status=503,
        )

    async def start_from(self, zygote: Zygote) -> AwakeFunction:
        """Fork the function and load its adapter.

        ``CapacityError`` if it took longer than its timeout; another error if engine or adapter was refused or died.
        """
        self._check_own_folder()
        links: list[FunctionLink] = []
        fleet = Fleet(
            [partial(self._make_link, zygote, self._engine(), links)],
            served_name=self.host.name,
            observe=self.observe,
            policy=FleetPolicy(
                restarts=replace(RESTARTS, hang_timeout_s=self.timeouts.hang_s, start_timeout_s=self.timeouts.start_s),
                resumes=ResumePolicy(
                    max_resumes=3, max_wait_s=60.0, after_hang=False, seed=SystemRandom().getrandbits(63)
                ),
                keeps_required=True,  # without its adapter it is of no use
            ),
        )
        try:
            async with asyncio.timeout(self.timeouts.start_s) as limit:
                await fleet.start([LoraModule(self.name, self.spec.adapter)])
                await fleet.adapters.warm(self.name)
        except TimeoutError:
            await fleet.stop()
            if not limit.expired():  # the system's own, as of a file on a network
                raise
            raise CapacityError(
                f"Function {self.name!r} did not start within {self.timeouts.start_s:g} s; it is started again.",
                retry_after_s=RETRY_AFTER_S,
                status=503,
            ) from None
        except BaseException:
            await fleet.stop()
            raise
        return AwakeFunction(fleet, asyncio.create_task(fleet.run()), links)

    def _make_link(self, zygote: Zygote, engine: EngineSpec, links: list[FunctionLink]) -> FunctionLink:
        """Return the link to a new process; ``links`` keeps the last one, and the one before while it starts."""
        spec, uid = self.spec, self.users.take()
        place = FunctionPlace(
            readable=[spec.adapter],
            uid=uid,
            memory_bytes=spec.memory_bytes,
            cgroup_bytes=spec.cgroup_bytes,
            cgroup_cpus=spec.cgroup_cpus,
        )
        link = FunctionLink(engine, zygote, place, log=self.log, on_gone=partial(self.users.give_back, uid))
        links[:] = [*links[-1:], link]
        return link

    def _engine(self) -> EngineSpec:
        spec = self.spec
        config = EngineConfig(
            model=self.host.backbone.model,
            memory=MemoryConfig(memory_bytes=spec.kv_bytes),
            adapters=AdapterConfig(
                host_bytes=spec.adapter_bytes,
                max_adapter_share=1.0,  # the pool is its own
                keep_host_copies=False,  # there is one adapter, and its files are near
                real_roots=real_roots([spec.adapter], []),  # the tenant writes the folder: its links lead nowhere else
            ),
            scheduler=SchedulerConfig(max_num_seqs=spec.max_batch, max_waiting=spec.max_waiting),
        )
        num_threads = spec.threads or len(os.sched_getaffinity(0))
        return EngineSpec(config=config, served_name=self.host.name, builder="", num_threads=num_threads)

    def _check_own_folder(self) -> None:
        folder = Path(self.spec.adapter).resolve()  # by its links as well
        if folder.is_relative_to(PACKAGE):  # an adapter of the demo
            return
        for shared in shared_folders(self.host.backbone.model):
            if folder.is_relative_to(Path(shared).resolve()):
                raise AdapterError(
                    self.name, f"its folder is in {shared}, of the base or of Python, which every function reads"
                )
