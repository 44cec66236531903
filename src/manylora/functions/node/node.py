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
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from manylora.core.errors import CapacityError, ConfigError, ManyloraError
from manylora.functions.decisions.batching import most_urgent
from manylora.functions.decisions.billing import PLATFORM
from manylora.functions.decisions.holding import hold_name
from manylora.functions.decisions.meter import MachineState, Taken
from manylora.functions.decisions.offload import Held, choose_offload
from manylora.functions.deployment import BackboneSpec, FunctionSpec, NodeSpec, check_folder
from manylora.functions.node.accounts import NodeAccounts
from manylora.functions.node.backbone_host import BackboneHost
from manylora.functions.node.instance import FunctionInstance, FunctionPhase
from manylora.functions.node.launch import Timeouts
from manylora.functions.wire import Account, BackboneState
from manylora.serving.hosting.protocol import Observations
from manylora.serving.metrics.status_report import FunctionState

__all__ = ["FunctionNode"]

FIRST_UID, NUM_UIDS, NUM_RANGES = 1_000_000_000, 2**16, 2**15
"""Users of functions are above those of people, services and most containers, and each agent has a range of its own:
functions of a second one on the machine, or of one that was killed a moment ago, are other users."""

TICK_S = 0.5
READ_MEMORY_EVERY_S = 5.0
ROOM_PATIENCE_S = 10.0
"""Longest wait for memory of a function that wakes."""

LEAST_BYTES = 64 << 20
"""Memory that a process is expected to take before any was read."""

MAX_PRELOADING = 2
"""Processes that are started at once because the controller wants them."""

MAX_LOG_CHARS = 1 << 20
"""Length of functions' lines after which no further function's are taken at once; a report is bounded."""

logger = logging.getLogger(__name__)


class FunctionNode:
    """Backbones and functions of one machine. For the event loop's thread alone.

    Args:
        folder: Where sockets of backbones are made.
        memory_bytes: Memory for backbones, zygotes and functions, unless the controller's orders set it.
        lifeline: As of ``BackboneHost``.
        timeouts: As of ``launch``.
        on_observed: Called with the name of a backbone and the observations of a function on it.
    """

    def __init__(
        self,
        folder: Path,
        *,
        memory_bytes: int,
        lifeline: int | None,
        timeouts: Timeouts,
        on_observed: Callable[[str, Observations], None],
    ) -> None:
        self.functions: dict[str, FunctionInstance] = {}
        self.hosts: dict[str, BackboneHost] = {}
        self.num_changes = 0
        """Changes of the set of functions."""
        self.memory_bytes = self._default_bytes = memory_bytes
        self.usual_bytes = LEAST_BYTES
        self.timeouts = timeouts
        self._folder = folder
        self._lifeline = lifeline
        self._on_observed = on_observed
        self._spec = NodeSpec()
        self._hold: dict[str, None] = {}
        # A node may have many thousand functions, so that nothing done each second, or for a request, visits them all.
        self._present: dict[FunctionInstance, None] = {}  # those with a process, or about to have one; removed ones too
        self._woken: dict[str, FunctionInstance] = {}  # those that have been present
        self._has_room: dict[FunctionInstance, None] = {}  # those of them that memory is reserved for
        self._uids: Iterator[int] = itertools.count(FIRST_UID + os.getpid() % NUM_RANGES * NUM_UIDS)
        self._free_uids: list[int] = []
        self._making_room = asyncio.Lock()
        self._has_changed = asyncio.Event()
        self._beside: set[asyncio.Task[None]] = set()  # loads, and functions that end
        self._accounts = NodeAccounts()
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
        before, self._hold = self._hold, dict.fromkeys(hold)
        for name, backbone in backbones.items():
            if name not in self.hosts:
                self.hosts[name] = BackboneHost(
                    name, backbone, self._folder, lifeline=self._lifeline, on_change=self.changed
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
            if gone.has_process:
                self._begin(gone.close(error))
        new = {
            name: spec for name, spec in functions.items() if name not in self.functions and spec.backbone in self.hosts
        }
        for name, spec in new.items():
            self.functions[name] = FunctionInstance(name, spec, self.hosts[spec.backbone], self)
        self._begin(asyncio.to_thread(_tell_unreadable, new))
        self.num_changes += 1

    def _preload(self, new: Collection[str]) -> None:
        """Begin to load artefacts that are to be held and are not there; ``new`` are those of the last orders."""
        for name, host in self.hosts.items():
            if hold_name("libraries", name) in self._hold and host.state in ("absent", "loaded"):
                self._begin(self._ready(host))
        num_waking = sum(one.phase is FunctionPhase.WAKING for one in self._present)
        folders = []
        for name in self._hold:
            kind, _, owner = name.partition(":")
            instance = self.functions.get(owner)
            if instance is None or instance.phase is not FunctionPhase.ASLEEP:
                continue
            if kind == "adapter" and name in new:
                folders.append(Path(instance.spec.adapter))
            has_room = self.used_bytes + instance.reserved_bytes <= self.memory_bytes
            if kind == "process" and has_room and num_waking < MAX_PRELOADING:
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
            for instance in list(self._present):
                idle_s = now() - instance.last_used
                if instance.is_idle and not instance.is_held and idle_s >= self._keep_alive_s(instance):
                    self._begin(instance.sleep("idle"))  # one that ends slowly holds up no other
            if now() - self._memory_read_at >= READ_MEMORY_EVERY_S:
                self._memory_read_at = now()
                for instance in list(self._present):
                    instance.read_memory()
                    await asyncio.sleep(0)  # a map of the base takes a millisecond
                for host in self.hosts.values():
                    host.tend()
            self.changed()

    async def stop(self) -> None:
        """End all functions and backbones."""
        error = CapacityError("The node is shutting down.", retry_after_s=10.0, status=503)
        await asyncio.gather(*(one.close(error) for one in list(self._present)))
        await asyncio.gather(*(host.release() for host in self.hosts.values()))
        await asyncio.gather(*self._beside, return_exceptions=True)

    def _keep_alive_s(self, instance: FunctionInstance) -> float:
        own = instance.spec.keep_alive_s
        return self._spec.keep_alive_s if own is None else own

    # -- what functions need (``instance.Node``) ---------------------------------------------------------------------

    def changed(self, instance: FunctionInstance | None = None) -> None:
        """Begin a new state of the account, and let requests leave whose time has come.

        Args:
            instance: The function that has changed; ``None`` for a backbone, or the time.
        """
        if instance is not None:
            if instance.has_process:
                self._present[instance] = None
                if self.functions.get(instance.name) is instance:
                    self._woken[instance.name] = instance
            else:
                self._present.pop(instance, None)
                self._has_room.pop(instance, None)
        self._accounts.change(self._machine_state())
        for one in self._present:
            one.weigh()
        self._has_changed.set()
        waiting = [one for one in self._present if one.has_waiting and one.phase is FunctionPhase.AWAKE]
        if not waiting:
            return
        now = asyncio.get_running_loop().time()
        for instance in most_urgent((one.margin_s(now, 1), one) for one in waiting):
            asyncio.get_running_loop().call_soon(instance.advance)

    def observed(self, instance: FunctionInstance, seen: Observations) -> None:
        """Count the requests that a function's engine has ended, and pass its observations on."""
        if seen.finished:
            num_tokens = sum(one.num_prompt_tokens + one.num_output_tokens for one in seen.finished)
            self._accounts.count(instance.account, len(seen.finished), num_tokens)
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
            CapacityError: All memory is in use, and none came free; or it needs more than there is.
        """
        host = instance.host
        needed = instance.reserved_bytes + (host.num_bytes + host.zygote_bytes or host.expected_bytes)
        if needed > self.memory_bytes:  # others that wake would wait behind it for nothing
            raise CapacityError(
                f"Function {instance.name!r} and its backbone need {needed} bytes, of the node's {self.memory_bytes}",
                retry_after_s=60.0,
                status=503,
            )
        try:
            async with asyncio.timeout(ROOM_PATIENCE_S), self._making_room:  # one at a time, in order
                self._has_room[instance] = None  # those that wait for their turn do not count yet
                while (short := self.used_bytes - self.memory_bytes) > 0:
                    short -= sum(one.reserved_bytes for one in self._has_room if self._is_leaving(one))
                    choice = choose_offload(self._held(instance), short) if short > 0 else None
                    if choice is None:
                        self._has_changed.clear()
                        await self._has_changed.wait()
                        continue
                    for name in choice.names:
                        if self._is_in_use(name):  # a request came while another one left: choose again
                            break
                        await asyncio.shield(self._let_go(name))
        except TimeoutError:
            self._has_room.pop(instance, None)
            lacking = self.used_bytes + instance.reserved_bytes - self.memory_bytes
            reason = f"lacks {lacking} bytes" if lacking > 0 else "stands behind others that wake"
            raise CapacityError(
                f"The node's memory is in use: function {instance.name!r} {reason}", retry_after_s=5.0, status=503
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
                value=sum(one.rate(now) for one in self._woken.values() if one.host is host)
                * (host.load_s + host.zygote_s),
                in_use=host is waking.host or not host.is_ready,
            )
            for host in self.hosts.values()
            if host.num_bytes
        ]
        for one in self._present:
            if self._is_leaving(one):
                continue
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
            return any(one.host.name == owner for one in self._present)
        return (
            owner in self.functions
            and self.functions[owner].phase is FunctionPhase.AWAKE
            and not self.functions[owner].is_idle
        )

    def _is_leaving(self, instance: FunctionInstance) -> bool:
        """Whether its process ends, or is about to: the function was removed."""
        return instance.phase is FunctionPhase.ENDING or self.functions.get(instance.name) is not instance

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
        self._accounts.change(self._machine_state())
        return self._accounts.take([one.pid for one in self._present])

    def read_cpu(self, instance: FunctionInstance) -> None:
        """Charge the processor time that a function has used since the last reading.

        It is the function's own, also while it is held ready. A start that no request waits for is the platform's.
        """
        if instance.pid is not None:
            is_own = instance.phase is not FunctionPhase.WAKING or instance.has_waiting
            self._accounts.read_cpu(instance.account if is_own else PLATFORM, instance.pid)

    def begin_account(self, since_ns: int) -> None:
        """Begin to count at the ledger's end, if the clock is behind it."""
        self._accounts.begin(since_ns)

    def describe(self) -> tuple[list[FunctionState], list[BackboneState]]:
        """Return the states of all functions that differ from a registered one's, and of the backbones."""
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
        return self.states(), backbones

    def take_lines(self) -> dict[str, list[str]]:
        """Return lines that functions have written since the last call; at some length, the rest stays for the next."""
        taken: dict[str, list[str]] = {}
        room = MAX_LOG_CHARS
        for name, one in self._woken.items():
            if room > 0 and (lines := one.take_lines()):
                taken[name] = lines
                room -= sum(map(len, lines))
        return taken

    def states(self, backbone: str | None = None) -> list[FunctionState]:
        """Return the states of functions that have been awake, of one backbone or of all."""
        now = asyncio.get_running_loop().time()
        woken = [one for one in self._woken.values() if backbone in (None, one.host.name)]
        states = [one.describe(now) for one in woken]
        return [one for one in states if one.state != "asleep" or one.num_starts]

    def cancel(self, backbone: str, request_ids: Sequence[str], *, stopped: bool) -> None:
        """Cancel requests of functions of a backbone, wherever they are; as ``Fleet.cancel``."""
        for one in self._present:
            if one.host.name == backbone and one.awake is not None:
                one.awake.fleet.cancel(request_ids, stopped=stopped)
        self.changed()

    def _is_charged(self, instance: FunctionInstance) -> bool:
        """Whether a function that has a process pays for its time and memory.

        Pre-loading pays for itself: a start that no request waits for, and the time beyond the keep-alive.
        """
        if instance.has_waiting or instance.is_running:
            return True
        if instance.phase is FunctionPhase.WAKING:
            return False
        now = asyncio.get_running_loop().time()
        return now - instance.last_used < self._keep_alive_s(instance)

    def _machine_state(self) -> MachineState:
        charged = {one: one.account for one in self._present if self._is_charged(one)}
        own: dict[str, int] = {}
        for one in self._present:
            if one.phase is not FunctionPhase.WAKING:
                account = charged.get(one, PLATFORM)
                own[account] = own.get(account, 0) + one.own_bytes
        shared = [
            (
                host.num_bytes + host.zygote_bytes,
                list(dict.fromkeys(account for one, account in charged.items() if one.host is host)),
            )
            for host in self.hosts.values()
            if host.num_bytes
        ]
        return MachineState(  # a function that was replaced may be there twice
            running=list(dict.fromkeys(account for one, account in charged.items() if one.is_running)),
            awake=list(dict.fromkeys(charged.values())),
            host_bytes=own,
            shared_host_bytes=shared,
        )


def _tell_unreadable(functions: Mapping[str, FunctionSpec]) -> None:
    """Log the functions whose adapters cannot be read; one that is missing now may be there for the first request."""
    for name, spec in functions.items():
        try:
            check_folder(name, spec)
        except (ConfigError, OSError) as error:
            logger.error("function_unreadable name=%s error=%s", name, error)


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
