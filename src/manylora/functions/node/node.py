"""The functions of a node: they share its memory, its device and its backbones, and each second has its account.

The controller's orders say which functions there are and which artefacts to hold ready. Everything that a request waits
for is decided here, so that a node serves while the controller is away.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import os
import stat
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import Any

from manylora.core.adapters.folder import WEIGHT_FILES
from manylora.core.errors import CapacityError, ConfigError, ManyloraError
from manylora.functions.decisions.batching import most_urgent
from manylora.functions.decisions.billing import PriceList, Taken
from manylora.functions.decisions.keeping import IdleGaps
from manylora.functions.decisions.placement import hold_name
from manylora.functions.deployment import BackboneSpec, FunctionSpec, NodeSpec, check_folder
from manylora.functions.node.accounts import NodeAccounts, machine_state
from manylora.functions.node.backbone_host import BackboneHost
from manylora.functions.node.instance import FunctionInstance, FunctionPhase
from manylora.functions.node.launch import AwakeFunction, ProcessUsers, Timeouts
from manylora.functions.node.room import NodeRoom
from manylora.functions.wire import Account
from manylora.serving.hosting.fleet.resumption import ResumeStats
from manylora.serving.hosting.protocol import Observations
from manylora.serving.metrics.status_report import FunctionState

__all__ = ["FunctionNode"]

TICK_S = 0.5
READ_MEMORY_EVERY_S = 5.0

MAX_PRELOADING = 2  # processes that are started at once because the controller wants them

MAX_LOG_CHARS = 1 << 20
"""Length of functions' lines after which no further function's are taken at once; a report is bounded."""

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class FunctionNode:
    """Backbones and functions of one machine. Only for the event loop's thread."""

    folder: Path  # where sockets of backbones are made
    _: KW_ONLY
    memory_bytes: int  # memory for backbones, zygotes and functions, unless the controller's orders set it
    # Descriptor of a pipe with which holders of backbones end; ``None`` to outlive this process.
    parent_pipe: int | None
    timeouts: Timeouts  # bounds of the silence of functions
    functions: dict[str, FunctionInstance] = field(default_factory=dict)
    hosts: dict[str, BackboneHost] = field(default_factory=dict)
    num_changes: int = 0  # changes of the set of functions
    users: ProcessUsers = field(default_factory=ProcessUsers)
    ended_resumes: dict[str, ResumeStats] = field(default_factory=dict)  # of engines that have ended, by backbone
    # Those with a process, or about to have one; removed ones too.
    _present: dict[FunctionInstance, None] = field(default_factory=dict)
    _woken: dict[str, FunctionInstance] = field(default_factory=dict)  # those that have been present
    accounts: NodeAccounts = field(default_factory=NodeAccounts)
    _observers: dict[str, list[Callable[[Observations], None]]] = field(default_factory=dict)
    _spec: NodeSpec = field(default_factory=NodeSpec)
    _prices: PriceList = field(default_factory=PriceList)
    _gaps: IdleGaps = field(default_factory=IdleGaps)  # of the device: no function runs or waits
    _keep_s: float = 0.0  # since the last one began
    _hold: dict[str, None] = field(default_factory=dict)
    _beside: set[asyncio.Task[None]] = field(default_factory=set)  # loads, and functions that end
    _memory_read_at: float = -math.inf
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        self.room = NodeRoom(self.memory_bytes, self.hosts, self.functions, self._woken, self._present.keys())

    # -- orders ------------------------------------------------------------------------------------------------------

    def configure(
        self,
        backbones: Mapping[str, BackboneSpec],
        functions: Mapping[str, FunctionSpec] | None,
        spec: NodeSpec,
        hold: Collection[str],
        prices: PriceList | None = None,
    ) -> None:
        """Follow the controller's orders; what is ``None`` is the same as before."""
        self._spec = spec
        self._prices = prices or self._prices
        self.room.num_bytes = spec.memory_bytes or self.memory_bytes
        before, self._hold = self._hold, dict.fromkeys(hold)
        for name, backbone in backbones.items():
            if name not in self.hosts:
                self.hosts[name] = BackboneHost(
                    name, backbone, self.folder, parent_pipe=self.parent_pipe, on_change=self.changed
                )
        if functions is not None:
            self._set_functions(functions)
        for name in {**before, **self._hold}:
            kind, _, owner = name.partition(":")
            if kind == "process" and owner in self.functions:
                self.functions[owner].is_held = name in self._hold
        self._preload(self._hold.keys() - before.keys())

    def _set_functions(self, functions: Mapping[str, FunctionSpec]) -> None:
        for name in [name for name, one in self.functions.items() if functions.get(name) != one.spec]:
            gone = self.functions.pop(name)
            self._woken.pop(name, None)
            error = CapacityError(
                "The function was removed or replaced while the request waited; please try again.", status=503
            )
            if gone.phase.has_process:
                self._begin(gone.close(error))
        new = {
            name: spec for name, spec in functions.items() if name not in self.functions and spec.backbone in self.hosts
        }
        for name, spec in new.items():
            self.functions[name] = FunctionInstance(name, spec, self.hosts[spec.backbone], self, next(self._numbers))
        self._begin(asyncio.to_thread(_log_unreadable, new))
        self.num_changes += 1

    def _preload(self, new: Collection[str]) -> None:
        """Begin to load artefacts that are to be held and are not there; the last orders are the first with ``new``."""
        for name, host in self.hosts.items():
            if hold_name("libraries", name) in self._hold and host.state in ("absent", "loaded"):
                more_bytes = 0 if host.num_bytes else self.room.bytes_of_base(host)
                if self.room.used_bytes + more_bytes <= self.room.num_bytes:  # else it has left for others
                    self._begin(self._load(host))
        num_waking = sum(one.phase is FunctionPhase.WAKING for one in self._present)
        is_kept = self._spec.keep_alive_s is not None or not self._lets_go(asyncio.get_running_loop().time())
        folders = []
        for name in self._hold:
            kind, _, owner = name.partition(":")
            instance = self.functions.get(owner)
            if instance is None or instance.phase is not FunctionPhase.ASLEEP:
                continue
            if kind == "adapter" and name in new:
                folders.append(Path(instance.spec.adapter))
            has_room = self.room.used_bytes + self.room.bytes_of(instance) <= self.room.num_bytes
            if kind == "process" and is_kept and has_room and num_waking < MAX_PRELOADING:
                num_waking += 1
                instance.wake()
        if folders:
            self._begin(asyncio.to_thread(_read_ahead, folders))

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._beside.add(task)
        task.add_done_callback(self._beside.discard)

    async def _load(self, host: BackboneHost) -> None:
        try:
            await host.ready()
        except (ManyloraError, OSError) as error:
            logger.error("backbone_failed name=%s error=%s", host.name, error)

    # -- life --------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Tend backbones, and put functions to sleep that no request has used for their keep-alive."""
        now = asyncio.get_running_loop().time
        while True:
            await asyncio.sleep(TICK_S)
            for instance in list(self._present):
                if instance.is_idle and self._is_over(instance, now()):
                    self._begin(instance.sleep("idle"))  # one that ends slowly holds up no other
            if now() - self._memory_read_at >= READ_MEMORY_EVERY_S:
                self._memory_read_at = now()
                for instance in list(self._present):
                    self.room.read_memory(instance)
                    await asyncio.sleep(0)  # a map of the base takes a millisecond
                for host in self.hosts.values():
                    host.tend()
            self.changed()

    def _is_over(self, instance: FunctionInstance, now: float) -> bool:
        """Whether an idle function is no longer kept: by its keep-alive, or by the rent of the device and its memory.

        While another function runs, its device costs an idle one nothing.
        """
        own_s, idle_s = instance.spec.keep_alive_s, now - instance.last_used
        if (keep_alive_s := self._spec.keep_alive_s if own_s is None else own_s) is not None:
            return idle_s >= keep_alive_s and not instance.is_held
        if self._lets_go(now):
            return True
        worth_s = self._prices.even_s(instance.cold_start_s, host_bytes=self.room.bytes_of(instance))
        return idle_s >= worth_s and not instance.is_held

    def _lets_go(self, now: float) -> bool:
        """Whether the device is not worth its rent: it has been idle for longer than a start is worth."""
        return self._gaps.since is not None and now - self._gaps.since >= self._keep_s

    def _note_idleness(self, now: float) -> None:
        """Note whether the device has become idle, or is no longer."""
        if any(one.queue or one.is_running for one in self._present):
            self._gaps.end(now)
        elif self._gaps.since is None:
            starts_s = sum(one.cold_start_s for one in self._present if one.rate.per_s(now) > 0.0)  # of each anew
            self._gaps.since, self._keep_s = now, self._gaps.keep_s(self._prices.even_s(starts_s))

    async def stop(self) -> None:
        """End all functions and backbones."""
        error = CapacityError("The node is shutting down.", retry_after_s=10.0, status=503)
        await asyncio.gather(*(one.close(error) for one in list(self._present)))
        await asyncio.gather(*(host.release() for host in self.hosts.values()))
        await asyncio.gather(*self._beside, return_exceptions=True)

    # -- what functions need (``HostNode``) --------------------------------------------------------------------------

    async def reserve(self, instance: FunctionInstance) -> None:
        """Make room for a function that wakes; raises ``CapacityError`` if none comes free."""
        await self.room.reserve(instance)

    def enter(self, instance: FunctionInstance, phase: FunctionPhase) -> None:
        """Charge a function for its phase until now, and set the next one."""
        self.accounts.read_cpu(instance)
        instance.phase = phase
        if phase is FunctionPhase.AWAKE:
            self.room.read_memory(instance)
        self.changed(instance)

    def parted(self, instance: FunctionInstance, engine: AwakeFunction) -> None:
        """Keep what a function's engine has counted, which ends."""
        name, counted = instance.host.name, replace(engine.fleet.resumes, num_waiting=0)
        self.ended_resumes[name] = ResumeStats.sum_of([self.ended_resumes.get(name, ResumeStats()), counted])

    def changed(self, instance: FunctionInstance | None = None) -> None:
        """Begin a new state of the account, and let requests leave whose time has come.

        A function has changed, or without one a backbone, or the time.
        """
        if instance is not None:
            if instance.phase.has_process:
                self._present[instance] = None
                if self.functions.get(instance.name) is instance:
                    self._woken[instance.name] = instance
            else:
                self._present.pop(instance, None)
        now = asyncio.get_running_loop().time()
        self._charge(now)
        self._note_idleness(now)
        waiting = []
        for one in self._present:
            if one.engine is not None:
                one.engine.weigh(bool(one.queue) or one.is_running)
                if one.queue:
                    waiting.append((one.queue.margin_s(now), one))
        self.room.changed(instance)
        for one in most_urgent(waiting):
            asyncio.get_running_loop().call_soon(one.advance)

    def num_running_beside(self, instance: FunctionInstance) -> int:
        """Return the number of other functions that run."""
        return sum(one.is_running for one in self._present if one is not instance)

    def observed(self, instance: FunctionInstance, seen: Observations) -> None:
        """Count the requests that a function's engine has ended, and pass its observations on."""
        if seen.finished:
            num_tokens = sum(one.num_prompt_tokens + one.num_output_tokens for one in seen.finished)
            self.accounts.count(instance.account, len(seen.finished), num_tokens)
        for observe in self._observers.get(instance.host.name, ()):
            observe(seen)

    def subscribe(self, backbone: str, observe: Callable[[Observations], None]) -> None:
        """Call ``observe`` with the observations of functions on a backbone from now on."""
        self._observers.setdefault(backbone, []).append(observe)

    # -- reports -----------------------------------------------------------------------------------------------------

    def take(self) -> tuple[Taken, list[Account]]:
        """Return the use of the machine since the last call, by account."""
        for instance in self._present:
            self.accounts.read_cpu(instance)
        self._charge(asyncio.get_running_loop().time())
        return self.accounts.take([one.pid for one in self._present])

    def _charge(self, now: float) -> None:
        state = machine_state(self._present, self.hosts.values(), self._woken.values(), now)
        self.accounts.change(state)

    def states(self, backbone: str | None = None) -> list[FunctionState]:
        """Return the states of functions that have been awake, of one backbone or of all."""
        now = asyncio.get_running_loop().time()
        woken = [one for one in self._woken.values() if backbone in (None, one.host.name)]
        states = [one.describe(now) for one in woken]
        return [one for one in states if one.state != "asleep" or one.num_starts]

    def take_lines(self) -> dict[str, list[str]]:
        """Return lines that functions have written since the last call; at some length, the rest stays for the next."""
        taken: dict[str, list[str]] = {}
        room = MAX_LOG_CHARS
        for name, one in self._woken.items():
            if room > 0 and one.log is not None and (lines := one.log.take()):
                taken[name] = lines
                room -= sum(map(len, lines))
        return taken

    def cancel(self, backbone: str, request_ids: Sequence[str], *, stopped: bool) -> None:
        """Cancel requests of functions of a backbone, wherever they are; ``stopped``: that is their normal end."""
        for one in self._present:
            if one.host.name == backbone and one.engine is not None:
                one.engine.fleet.requests.cancel(request_ids, stopped=stopped)
        self.changed()


def _log_unreadable(functions: Mapping[str, FunctionSpec]) -> None:
    """Log the functions whose adapters cannot be read; one that is missing now may be there for the first request."""
    for name, spec in functions.items():
        try:
            check_folder(name, spec)
        except (ConfigError, OSError) as error:
            logger.error("function_unreadable name=%s error=%s", name, error)


def _read_ahead(folders: Iterable[Path]) -> None:
    """Ask the kernel for the files of adapters, which are not opened by any parser here."""
    for file in (folder / name for folder in folders for name in WEIGHT_FILES):
        with contextlib.suppress(OSError):
            descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)  # a tenant's pipe has no writer
            try:
                if stat.S_ISREG(os.fstat(descriptor).st_mode):
                    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_WILLNEED)
            finally:
                os.close(descriptor)
