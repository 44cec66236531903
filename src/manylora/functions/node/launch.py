"""Start the process of a function from a zygote: its engine, its place, its adapter."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import SystemRandom
from typing import Protocol

from manylora.core.adapters.folder import real_roots
from manylora.core.config import AdapterConfig, EngineConfig, MemoryConfig, SchedulerConfig, ServerConfig
from manylora.core.errors import AdapterError, CapacityError, EngineDead, ManyloraError
from manylora.core.isolation import ProcessorShare
from manylora.functions.deployment import FunctionSpec
from manylora.functions.node.backbone_host import BackboneHost
from manylora.functions.processes.function_log import FunctionLog
from manylora.functions.processes.function_process import PACKAGE, shared_folders
from manylora.functions.processes.link import FunctionLink
from manylora.functions.processes.messages import FunctionPlace
from manylora.functions.processes.zygote import Zygote
from manylora.serving.hosting.fleet.adapter_book import LoraModule
from manylora.serving.hosting.fleet.fleet import Fleet
from manylora.serving.hosting.fleet.keeper import RestartPolicy
from manylora.serving.hosting.fleet.resumption import ResumePolicy
from manylora.serving.hosting.links.link import EngineLink
from manylora.serving.hosting.protocol import EngineSpec, Observations, StartReport

__all__ = ["Awake", "Timeouts", "Users", "engine_config", "launch", "launch_until_up"]

RESTARTS = RestartPolicy(max_deaths=4, first_pause_s=0.1, max_pause_s=5.0)

MAX_ZYGOTES = 3
"""Zygotes that may end during one start before its requests are refused."""

RETRY_AFTER_S = 5.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Bounds of a function's silence.

    Args:
        hang_s: Seconds without progress after which its process is killed and started again; a request waits no longer
            for the process. ``None`` for never.
        start_s: Seconds for a process to start and to read the adapter; ``None`` for any time.
    """

    hang_s: float | None
    start_s: float | None

    @classmethod
    def of(cls, config: ServerConfig) -> Timeouts:
        """Return those of a server, where 0 is never."""
        return cls(hang_s=config.hang_timeout_s or None, start_s=config.start_timeout_s or None)


class Users(Protocol):
    """The users of processes: each process has one of its own, until it has ended."""

    def take_uid(self) -> int | None:
        """Return a user for a new process; ``None`` without the right to change users."""
        ...

    def give_uid(self, uid: int | None) -> None:
        """Return a user that no process has any more."""
        ...


@dataclass(slots=True, eq=False)
class Awake:
    """A function's engine.

    Args:
        fleet: The engine, restarted when it dies.
        keeping: Watches it.
        links: The links of its processes, the last one alive.
    """

    fleet: Fleet
    keeping: asyncio.Task[None]
    links: list[FunctionLink]
    _share: ProcessorShare | None = field(default=None, init=False)
    _weighed: FunctionLink | None = field(default=None, init=False)

    @property
    def pid(self) -> int | None:
        """Its process."""
        return self.fleet.pids[0]

    @property
    def num_in_flight(self) -> int:
        """Requests with the engine, or between two of its processes."""
        return sum(one.num_in_flight for one in self.fleet.replicas()) + self.fleet.resumes.num_waiting

    @property
    def report(self) -> StartReport | None:
        """The start of the last process that was ready, and its measures."""
        return next((link.report for link in reversed(self.links) if link.report is not None), None)

    def weigh(self, has_requests: bool) -> None:
        """Give its process a share of the processors, or without requests the time alone that no other one wants."""
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
        """End it; its requests end with the error."""
        self.keeping.cancel()
        self.weigh(True)  # its memory comes free as fast as it can
        await self.fleet.stop(error)
        self._close_share()
        await asyncio.gather(self.keeping, return_exceptions=True)

    def _close_share(self) -> None:
        share, self._share = self._share, None
        if share is not None:
            share.close()


def engine_config(spec: FunctionSpec, host: BackboneHost) -> EngineConfig:
    """Return the configuration of a function's engine."""
    return EngineConfig(
        model=host.backbone.model,
        memory=MemoryConfig(memory_bytes=spec.kv_bytes),
        adapters=AdapterConfig(
            host_bytes=spec.adapter_bytes,
            max_adapter_share=1.0,  # the pool is its own
            keep_host_copies=False,  # there is one adapter, and its files are near
            real_roots=real_roots([spec.adapter], []),  # the tenant writes the folder: its links lead nowhere else
        ),
        scheduler=SchedulerConfig(max_num_seqs=spec.max_batch, max_waiting=spec.max_waiting),
    )


async def launch(
    name: str,
    spec: FunctionSpec,
    host: BackboneHost,
    zygote: Zygote,
    *,
    log: FunctionLog,
    users: Users,
    timeouts: Timeouts,
    observe: Callable[[Observations], None],
) -> Awake:
    """Fork a function and load its adapter.

    Raises:
        CapacityError: It took longer than its timeout.
        ManyloraError: Its engine or its adapter was refused, or it died.
    """
    _check_own_folder(name, spec, host)
    engine = EngineSpec(
        config=engine_config(spec, host),
        served_name=host.name,
        builder="",
        num_threads=spec.threads or len(os.sched_getaffinity(0)),
    )
    links: list[FunctionLink] = []

    def make_link() -> EngineLink:
        uid = users.take_uid()
        place = FunctionPlace(
            readable=[spec.adapter],
            uid=uid,
            memory_bytes=spec.memory_bytes,
            cgroup_bytes=spec.cgroup_bytes,
            cgroup_cpus=spec.cgroup_cpus,
        )
        links.append(
            FunctionLink(
                engine,
                zygote,
                place,
                log=log,
                on_gone=lambda: users.give_uid(uid),
            )
        )
        del links[:-2]  # the last one, and the one before it while it starts
        return links[-1]

    fleet = Fleet(
        [make_link],
        served_name=host.name,
        observe=observe,
        restarts=RESTARTS,
        resumes=ResumePolicy(max_resumes=3, patience_s=60.0, after_hang=False),
        seed=SystemRandom().getrandbits(63),
        hang_timeout_s=timeouts.hang_s,
        start_timeout_s=timeouts.start_s,
        keeps_required=True,  # without its adapter it is of no use
    )
    try:
        async with asyncio.timeout(timeouts.start_s):
            await fleet.start([LoraModule(name, spec.adapter)])
            await fleet.adapters.warm(name)
    except TimeoutError:
        await fleet.stop()
        raise CapacityError(
            f"Function {name!r} did not start within {timeouts.start_s:g} s; it is started again.",
            retry_after_s=RETRY_AFTER_S,
            status=503,
        ) from None
    except BaseException:
        with contextlib.suppress(asyncio.CancelledError):
            await fleet.stop()
        raise
    return Awake(fleet, asyncio.create_task(fleet.run()), links)


def _check_own_folder(name: str, spec: FunctionSpec, host: BackboneHost) -> None:
    folder = Path(spec.adapter).resolve()  # by its links as well
    if folder.is_relative_to(PACKAGE):  # an adapter of the demo
        return
    for shared in shared_folders(host.backbone.model):
        if folder.is_relative_to(Path(shared).resolve()):
            raise AdapterError(name, f"its folder is in {shared}, of the base or of Python, which every function reads")


async def launch_until_up(
    name: str,
    spec: FunctionSpec,
    host: BackboneHost,
    stages: dict[str, float],
    begun_from: str,
    *,
    log: FunctionLog,
    users: Users,
    timeouts: Timeouts,
    observe: Callable[[Observations], None],
) -> Awake:
    """Start a function once its backbone is ready; again from another zygote if the zygote ends meanwhile.

    ``stages`` gets the seconds of ``backbone`` and ``libraries``, which another function may have begun; by
    ``begun_from``, as of ``BackboneHost`` before.

    Raises:
        CapacityError: Zygotes ended again and again, or as of ``launch``.
        ManyloraError: As of ``launch``.
    """
    now = asyncio.get_running_loop().time
    for attempt in range(1, MAX_ZYGOTES + 1):
        began = now()
        zygote = await host.ready()
        waited_s = now() - began
        libraries_s = waited_s if begun_from != "nothing" else min(waited_s, host.zygote_s)
        stages |= {"backbone": waited_s - libraries_s, "libraries": libraries_s}
        pid = zygote.pid
        try:
            return await launch(name, spec, host, zygote, log=log, users=users, timeouts=timeouts, observe=observe)
        except EngineDead as error:
            if zygote.pid == pid:
                raise
            logger.warning("function_start_lost name=%s attempt=%d error=%s", name, attempt, error)
    raise CapacityError(
        f"The process that starts functions ended {MAX_ZYGOTES} times while {name!r} was starting.",
        retry_after_s=RETRY_AFTER_S,
        status=503,
    )
