"""The functions of a node: they share its memory, its device and its backbones, and each second has its account.

The controller's orders say which functions there are and what to hold ready. Everything that a request waits for is
decided here, so that a node serves while the controller is away.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import logging
import os
import stat
import time
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from manylora.errors import CapacityError, ManyloraError
from manylora.functions.batching import most_urgent
from manylora.functions.billing import PLATFORM, Usage
from manylora.functions.deployment import BackboneSpec, FunctionSpec, NodeSpec
from manylora.functions.holding import hold_name
from manylora.functions.meter import MachineState, Meter, Taken
from manylora.functions.offload import Held, choose_offload
from manylora.functions.wire import Account, BackboneState, FunctionState
from manylora.hosting.node.backbone_host import BackboneHost
from manylora.hosting.node.instance import FunctionInstance, Phase
from manylora.hosting.node.readings import cpu_ns
from manylora.hosting.protocol import Observations

__all__ = ["FunctionNode"]

FIRST_UID = 1_000_000_000
"""Users of functions count from here: above those of people, services and most containers."""

TICK_S = 0.5
READ_MEMORY_EVERY_S = 5.0
ROOM_PATIENCE_S = 10.0
"""Longest wait for memory of a function that wakes."""

LEAST_BYTES = 64 << 20
"""Memory that a process is expected to take before any was read."""

MAX_PRELOADING = 2
"""Processes that are started at once because the controller wants them."""

logger = logging.getLogger(__name__)


class FunctionNode:
    """Backbones and functions of one machine. For the event loop's thread alone.

    Args:
        folder: Where sockets of backbones are made.
        memory_bytes: Memory for backbones, zygotes and functions, unless the controller's orders set it.
        lifeline: As of ``BackboneHost``.
        on_observed: Called with the name of a backbone and the observations of a function on it.
    """

    def __init__(
        self,
        folder: Path,
        *,
        memory_bytes: int,
        lifeline: int | None,
        on_observed: Callable[[str, Observations], None],
    ) -> None:
        self.functions: dict[str, FunctionInstance] = {}
        self.hosts: dict[str, BackboneHost] = {}
        self.num_changes = 0
        """Changes of the set of functions."""
        self.memory_bytes = self._default_bytes = memory_bytes
        self.usual_bytes = LEAST_BYTES
        self._folder = folder
        self._lifeline = lifeline
        self._on_observed = on_observed
        self._spec = NodeSpec()
        self._hold: frozenset[str] = frozenset()
        self._present: list[FunctionInstance] = []  # those with a process, or about to have one
        self._has_room: dict[FunctionInstance, None] = {}  # those of them that memory is reserved for
        self._uids: Iterator[int] = itertools.count(FIRST_UID)
        self._free_uids: list[int] = []
        self._making_room = asyncio.Lock()
        self._has_changed = asyncio.Event()
        self._beside: set[asyncio.Task[None]] = set()  # loads, and functions that end
        self._origin_ns = time.time_ns() - time.monotonic_ns()
        self._meter = Meter(self._now_ns(), num_cpus=len(os.sched_getaffinity(0)))
        self._cpu_read: dict[int, int] = {}  # by process
        self._memory_read_at = float("-inf")

    # -- orders ------------------------------------------------------------------------------------------------------

    def configure(
        self,
        backbones: Mapping[str, BackboneSpec],
        functions: Mapping[str, FunctionSpec] | None,
        spec: NodeSpec,
        hold: Collection[str],
    ) -> None:
        """Follow the controller's orders; ``functions`` is ``None`` if they are the same as before."""
        self._spec = spec
        self.memory_bytes = spec.memory_bytes or self._default_bytes
        before, self._hold = self._hold, frozenset(hold)
        for name, backbone in backbones.items():
            if name not in self.hosts:
                self.hosts[name] = BackboneHost(
                    name, backbone, self._folder, lifeline=self._lifeline, on_change=self.changed
                )
        if functions is not None:
            self._set_functions(functions)
        for name, instance in self.functions.items():
            instance.is_held = hold_name("process", name) in self._hold
        self._preload(self._hold - before)

    def _set_functions(self, functions: Mapping[str, FunctionSpec]) -> None:
        for name in [name for name, one in self.functions.items() if functions.get(name) != one.spec]:
            gone = self.functions.pop(name)
            error = CapacityError(
                "The function was removed or replaced while the request waited; please try again.", status=503
            )
            self._begin(gone.close(error))
        for name, spec in functions.items():
            if name not in self.functions and spec.backbone in self.hosts:
                self.functions[name] = FunctionInstance(name, spec, self.hosts[spec.backbone], self)
        self.num_changes += 1

    def _preload(self, new: Collection[str]) -> None:
        """Begin to load artefacts that are to be held and are not there; ``new`` are those of the last orders."""
        for name, host in self.hosts.items():
            if hold_name("libraries", name) in self._hold and host.state in ("absent", "loaded"):
                self._begin(self._ready(host))
        num_waking = sum(one.phase is Phase.WAKING for one in self._present)
        folders = []
        for name, instance in self.functions.items():
            if instance.phase is not Phase.ASLEEP:
                continue
            if hold_name("adapter", name) in new:
                folders.append(Path(instance.spec.adapter))
            has_room = self.used_bytes + instance.reserved_bytes <= self.memory_bytes
            if instance.is_held and has_room and num_waking < MAX_PRELOADING:
                num_waking += 1
                instance.wake()
        if folders:
            self._begin(asyncio.to_thread(_read_ahead, folders))

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._beside.add(task)
        task.add_done_callback(self._beside.discard)

    async def _ready(self, host: BackboneHost) -> None:
        try:
            await host.ready()
        except ManyloraError as error:
            logger.error("backbone_failed name=%s error=%s", host.name, error)

    # -- life --------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Tend backbones, and put functions to sleep that no request has used for their keep-alive."""
        now = asyncio.get_running_loop().time
        while True:
            await asyncio.sleep(TICK_S)
            for instance in list(self.functions.values()):
                idle_s = now() - instance.last_used
                if instance.is_idle and not instance.is_held and idle_s >= self._keep_alive_s(instance):
                    await instance.sleep("idle")
            if now() - self._memory_read_at >= READ_MEMORY_EVERY_S:
                self._memory_read_at = now()
                for instance in list(self.functions.values()):
                    instance.read_memory()
                    await asyncio.sleep(0)  # a map of the base takes a millisecond
                for host in self.hosts.values():
                    host.tend()
            self.changed()

    async def stop(self) -> None:
        """End all functions and backbones."""
        error = CapacityError("The node is shutting down.", retry_after_s=10.0, status=503)
        await asyncio.gather(*(one.close(error) for one in self.functions.values()))
        await asyncio.gather(*(host.release() for host in self.hosts.values()))
        await asyncio.gather(*self._beside, return_exceptions=True)

    def _keep_alive_s(self, instance: FunctionInstance) -> float:
        own = instance.spec.keep_alive_s
        return self._spec.keep_alive_s if own is None else own

    # -- what functions need (``instance.Node``) ---------------------------------------------------------------------

    def changed(self) -> None:
        """Begin a new state of the account, and let requests leave whose time has come."""
        self._present = [one for one in self.functions.values() if one.phase in (Phase.WAKING, Phase.AWAKE)]
        self._has_room = {one: None for one in self._present if one in self._has_room}
        self._meter.change(self._now_ns(), self._machine_state())
        self._has_changed.set()
        waiting = [one for one in self._present if one.has_waiting and one.phase is Phase.AWAKE]
        if not waiting:
            return
        now = asyncio.get_running_loop().time()
        for instance in most_urgent((one.margin_s(now, 1), one) for one in waiting):
            asyncio.get_running_loop().call_soon(instance.advance)

    def observed(self, instance: FunctionInstance, seen: Observations) -> None:
        """Pass on the observations of a function's engine."""
        self._on_observed(instance.host.name, seen)

    def num_running_beside(self, instance: FunctionInstance) -> int:
        """Return the number of other functions that run."""
        return sum(one.is_running for one in self._present if one is not instance)

    def num_sharers(self, host: BackboneHost) -> int:
        """Return the number of processes that share the pages of a backbone's zygote, with itself."""
        return 1 + sum(one.host is host and one.pid is not None for one in self._present)

    def take_uid(self) -> int | None:
        """Return a user for a new process; ``None`` unless this one is root."""
        if os.geteuid() != 0:
            return None
        return heapq.heappop(self._free_uids) if self._free_uids else next(self._uids)

    def give_uid(self, uid: int | None) -> None:
        """Take back a user that no process has any more."""
        if uid is not None:
            heapq.heappush(self._free_uids, uid)

    async def reserve(self, instance: FunctionInstance) -> None:
        """Make room for a function that wakes, and for its backbone.

        Raises:
            CapacityError: All memory is in use, and none came free.
        """
        try:
            async with asyncio.timeout(ROOM_PATIENCE_S), self._making_room:  # one at a time, in order
                self._has_room[instance] = None  # those that wait for their turn do not count yet
                while (short := self.used_bytes - self.memory_bytes) > 0:
                    choice = choose_offload(self._held(instance), short)
                    if choice is None:
                        self._has_changed.clear()
                        await self._has_changed.wait()
                        continue
                    for name in choice.names:
                        if self._is_in_use(name):  # a request came while another one left: choose again
                            break
                        await asyncio.shield(self._let_go(name))
        except TimeoutError:
            lacking = self.used_bytes - self.memory_bytes
            self._has_room.pop(instance, None)
            raise CapacityError(
                f"The node's memory is in use: function {instance.name!r} lacks {lacking} bytes",
                retry_after_s=5.0,
                status=503,
            ) from None

    @property
    def used_bytes(self) -> int:
        """Memory of backbones, zygotes and functions that are awake or waking."""
        needed = {one.host.name for one in self._has_room}
        bases = sum(
            host.num_bytes + host.zygote_bytes or (host.expected_bytes if name in needed else 0)
            for name, host in self.hosts.items()
        )
        return bases + sum(one.reserved_bytes for one in self._has_room)

    def _held(self, waking: FunctionInstance) -> list[Held]:
        """Return all that is in memory, for the choice of what leaves it."""
        now = asyncio.get_running_loop().time()
        held = [
            Held(
                name=hold_name("backbone", host.name),
                num_bytes=host.num_bytes + host.zygote_bytes,
                value=sum(one.rate(now) for one in self.functions.values() if one.host is host)
                * (host.load_s + host.zygote_s),
                in_use=host is waking.host or not host.is_ready,
            )
            for host in self.hosts.values()
            if host.num_bytes
        ]
        for one in self._present:
            held.append(
                Held(
                    name=hold_name("process", one.name),
                    num_bytes=one.reserved_bytes,
                    value=one.rate(now) * one.cold_start_s,
                    parent=hold_name("backbone", one.host.name),
                    in_use=not one.is_idle,
                )
            )
        return held

    def _is_in_use(self, name: str) -> bool:
        kind, _, owner = name.partition(":")
        if kind == "backbone":
            return any(one.host.name == owner and one in self._present for one in self.functions.values())
        return (
            owner in self.functions and self.functions[owner].phase is Phase.AWAKE and not self.functions[owner].is_idle
        )

    async def _let_go(self, name: str) -> None:
        kind, _, owner = name.partition(":")
        logger.info("offloaded name=%s", name)
        if kind == "backbone":
            await self.hosts[owner].release()
        elif owner in self.functions:
            await self.functions[owner].sleep("offloaded")

    # -- accounts ----------------------------------------------------------------------------------------------------

    def take(self) -> tuple[Taken, list[Account]]:
        """Return the use of the machine since the last call, by account."""
        for instance in self._present:
            self.read_cpu(instance)
        pids = {one.pid for one in self._present}
        self._cpu_read = {pid: used for pid, used in self._cpu_read.items() if pid in pids}
        self._meter.change(self._now_ns(), self._machine_state())
        taken = self._meter.take(self._now_ns())
        accounts = []
        counts = {name: counts for name, one in self.functions.items() if any(counts := one.take_counts())}
        for name in {**taken.accounts, **counts}:
            known = self.functions.get(name)
            num_requests, num_tokens = counts.get(name, (0, 0))
            accounts.append(
                Account(
                    name=name,
                    tenant="" if known is None else known.spec.tenant,
                    usage=taken.accounts.get(name, Usage()),
                    num_requests=num_requests,
                    num_tokens=num_tokens,
                )
            )
        return taken, accounts

    def read_cpu(self, instance: FunctionInstance) -> None:
        """Count the processor time that a function has used since the last reading."""
        if instance.pid is not None and (used := cpu_ns(instance.pid)) is not None:
            account = instance.name if self._is_charged(instance) else PLATFORM
            self._meter.use_cpu(account, used - self._cpu_read.get(instance.pid, 0))
            self._cpu_read[instance.pid] = used

    def begin_account(self, since_ns: int) -> None:
        """Begin to count at the ledger's end, if the clock is behind it."""
        behind_ns = since_ns - self._now_ns()
        if behind_ns > 0:
            self._origin_ns += behind_ns
        self._meter = Meter(self._now_ns(), num_cpus=len(os.sched_getaffinity(0)))

    def describe(self) -> tuple[list[FunctionState], list[BackboneState]]:
        """Return the states of all functions that differ from a registered one's, and of the backbones."""
        now = asyncio.get_running_loop().time()
        states = [one.describe(now) for one in self.functions.values()]
        backbones = [
            BackboneState(
                name=host.name,
                state=host.state,
                pid=host.pid,
                zygote_pid=host.zygote_pid,
                num_bytes=host.num_bytes,
                zygote_bytes=host.zygote_bytes,
                load_s=host.load_s,
                zygote_s=host.zygote_s,
            )
            for host in self.hosts.values()
        ]
        return [one for one in states if one.state != "asleep" or one.num_starts], backbones

    def _is_charged(self, instance: FunctionInstance) -> bool:
        """Whether a function that is awake pays; one that is held ready beyond its keep-alive is the platform's."""
        if not instance.is_idle:
            return True
        now = asyncio.get_running_loop().time()
        return now - instance.last_used < self._keep_alive_s(instance)

    def _machine_state(self) -> MachineState:
        present = self._present
        charged = [one for one in present if self._is_charged(one)]
        awake = [one.name for one in charged]
        own: dict[str, int] = dict.fromkeys(awake, 0)
        for one in present:
            account = one.name if one.name in own else PLATFORM
            if one.phase is Phase.AWAKE:
                own[account] = own.get(account, 0) + one.own_bytes
        shared = [
            (host.num_bytes + host.zygote_bytes, [one.name for one in charged if one.host is host])
            for host in self.hosts.values()
            if host.num_bytes
        ]
        return MachineState(
            running=[one.name for one in charged if one.is_running],
            awake=awake,
            host_bytes=own,
            shared_host_bytes=shared,
        )

    def _now_ns(self) -> int:
        return self._origin_ns + time.monotonic_ns()


def _read_ahead(folders: Iterable[Path]) -> None:
    """Ask the kernel for the files of adapters, which are not opened by any parser here."""
    for file in itertools.chain.from_iterable(folder.glob("*.safetensors") for folder in folders):
        with contextlib.suppress(OSError):
            descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)  # a tenant's pipe has no writer
            try:
                if stat.S_ISREG(os.fstat(descriptor).st_mode):
                    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_WILLNEED)
            finally:
                os.close(descriptor)
