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

from manylora.adapters.folder import real_roots
from manylora.config import AdapterConfig, EngineConfig, MemoryConfig, SchedulerConfig
from manylora.errors import AdapterError, CapacityError, EngineDead, ManyloraError
from manylora.functions.deployment import FunctionSpec
from manylora.hosting.adapter_book import LoraModule
from manylora.hosting.engine_keeper import RestartPolicy
from manylora.hosting.fleet import Fleet
from manylora.hosting.functions.function_process import PACKAGE, shared_folders
from manylora.hosting.functions.zygote import Zygote
from manylora.hosting.link import EngineLink
from manylora.hosting.link_function import FunctionLink, FunctionPlace
from manylora.hosting.node.backbone_host import BackboneHost
from manylora.hosting.protocol import EngineSpec, Observations, StartReport
from manylora.hosting.resumption import ResumePolicy
from manylora.isolation import ProcessorShare

__all__ = ["Awake", "Users", "engine_config", "launch", "launch_until_up"]

START_TIMEOUT_S = 300.0
HANG_TIMEOUT_S = 300.0
RESTARTS = RestartPolicy(max_deaths=4, first_pause_s=0.1, max_pause_s=5.0)

MAX_ZYGOTES = 3
"""Zygotes that may end during one start before its requests are refused."""

RETRY_AFTER_S = 5.0

logger = logging.getLogger(__name__)


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
    users: Users,
    observe: Callable[[Observations], None],
) -> Awake:
    """Fork a function and load its adapter.

    Raises:
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
            FunctionLink(engine, zygote, place, is_busy=lambda: fleet.has_requests, on_gone=lambda: users.give_uid(uid))
        )
        del links[:-2]  # the last one, and the one before it while it starts
        return links[-1]

    fleet = Fleet(
        [make_link],
        served_name=host.name,
        observe=observe,
        restarts=RESTARTS,
        resumes=ResumePolicy(max_resumes=3, patience_s=60.0),
        seed=SystemRandom().getrandbits(63),
        hang_timeout_s=HANG_TIMEOUT_S,
        start_timeout_s=START_TIMEOUT_S,
    )
    try:
        await fleet.start([LoraModule(name, spec.adapter)])
        await fleet.adapters.warm(name)
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
    users: Users,
    observe: Callable[[Observations], None],
) -> Awake:
    """Start a function once its backbone is ready; again from another zygote if the zygote ends meanwhile.

    ``stages`` gets the seconds of ``backbone`` and ``libraries``, which another function may have begun; by
    ``begun_from``, as of ``BackboneHost`` before.

    Raises:
        CapacityError: Zygotes ended again and again.
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
            return await launch(name, spec, host, zygote, users=users, observe=observe)
        except EngineDead as error:
            if zygote.pid == pid:
                raise
            logger.warning("function_start_lost name=%s attempt=%d error=%s", name, attempt, error)
    raise CapacityError(
        f"The process that starts functions ended {MAX_ZYGOTES} times while {name!r} was starting.",
        retry_after_s=RETRY_AFTER_S,
        status=503,
    )
