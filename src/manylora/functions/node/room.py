"""The memory of a node: what is in it, and what leaves it when a function wakes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from manylora.core.errors import CapacityError
from manylora.functions.decisions.offload import Held, choose_offload
from manylora.functions.decisions.placement import hold_name
from manylora.functions.node.backbone_host import BackboneHost
from manylora.functions.node.instance import FunctionInstance, FunctionPhase
from manylora.functions.node.readings import memory_of

__all__ = ["NodeRoom"]

MAX_WAIT_S = 10.0  # longest wait for memory of a function that wakes
LEAST_BYTES = 64 << 20  # memory that a process is expected to take before any was read, and at least

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class NodeRoom:
    """Memory for backbones, zygotes and functions. Only for the event loop's thread."""

    num_bytes: int
    hosts: Mapping[str, BackboneHost]
    functions: Mapping[str, FunctionInstance]
    woken: Mapping[str, FunctionInstance]  # functions that have been awake
    # Functions with a process, or about to have one; removed ones too, until their process has ended.
    present: Collection[FunctionInstance]
    # The least that a process took, once one was read: what others need is no matter of the largest one.
    _usual_bytes: int | None = None
    _zygote_bytes: int = 0  # the most that a zygote took
    _reserved: dict[FunctionInstance, None] = field(default_factory=dict)  # functions that memory is reserved for
    _making_room: asyncio.Lock = field(default_factory=asyncio.Lock)
    _has_changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def used_bytes(self) -> int:
        """Memory of backbones, zygotes and functions that are awake or waking."""
        needed = {one.host.name for one in self._reserved}
        here = [host for name, host in self.hosts.items() if host.num_bytes or name in needed]
        return sum(map(self.bytes_of_base, here)) + sum(map(self.bytes_of, self._reserved))

    def bytes_of_base(self, host: BackboneHost) -> int:
        """Return the memory of a backbone and its zygote, or what they are expected to take: zygotes are much alike."""
        return (host.num_bytes or host.expected_bytes) + (host.zygote_bytes or self._zygote_bytes)

    def bytes_of(self, instance: FunctionInstance) -> int:
        """Return the memory that a process takes, or is expected to; at least its full pool and its adapter."""
        spec = instance.spec
        usual_bytes = max(LEAST_BYTES, self._usual_bytes or 0)
        return max(instance.own_bytes or usual_bytes, spec.kv_bytes + spec.adapter_bytes)

    def read_memory(self, instance: FunctionInstance) -> None:
        """Read the memory of a function's process."""
        pid, host = instance.pid, instance.host
        if instance.engine is None or pid is None:
            return
        num_sharers = 1 + sum(one.host is host and one.pid is not None for one in self.present)  # and the zygote
        reading = memory_of(pid, num_sharers, host.zygote_bytes, host.num_bytes)
        if reading is not None:
            instance.pss_bytes, instance.own_bytes = reading.pss, reading.own
            self._usual_bytes = min(self._usual_bytes or reading.own, reading.own)

    def changed(self, instance: FunctionInstance | None) -> None:
        """Let the functions that wait for memory look again, after something on the node ended or is no longer used."""
        if instance is not None and not instance.phase.has_process:
            self._reserved.pop(instance, None)
        self._zygote_bytes = max([self._zygote_bytes, *(one.zygote_bytes for one in self.hosts.values())])
        self._has_changed.set()

    async def reserve(self, instance: FunctionInstance) -> None:
        """Make room for a function that wakes, and for its backbone.

        ``CapacityError`` if all memory is in use, and none came free; or it needs more than there is.
        """
        host = instance.host
        base = self.bytes_of_base(host)
        if (
            self.bytes_of(instance) + base > self.num_bytes
        ):  # by the memory that processes took before, which may be less
            instance.own_bytes = LEAST_BYTES
        needed = self.bytes_of(instance) + base
        if needed > self.num_bytes:  # others that wake would wait behind it for nothing
            raise CapacityError(
                f"Function {instance.name!r} and its backbone need {needed} bytes, of the node's {self.num_bytes}",
                retry_after_s=60.0,
                status=503,
            )
        try:
            async with asyncio.timeout(MAX_WAIT_S), self._making_room:  # one at a time, in order
                self._reserved[instance] = None  # those that wait for their turn do not count yet
                while (short := self.used_bytes - self.num_bytes) > 0:
                    short -= sum(self.bytes_of(one) for one in self._reserved if self._is_leaving(one))
                    choice = choose_offload(self._held(instance), short) if short > 0 else None
                    if choice is None:
                        self._has_changed.clear()
                        await self._has_changed.wait()
                        continue
                    for name in choice.names:
                        if self._is_in_use(name):  # a request came while another one left: choose again
                            break
                        await asyncio.shield(self._offload(name))
        except TimeoutError:
            self._reserved.pop(instance, None)
            lacking = self.used_bytes + self.bytes_of(instance) - self.num_bytes
            reason = f"lacks {lacking} bytes" if lacking > 0 else "stands behind others that wake"
            raise CapacityError(
                f"The node's memory is in use: function {instance.name!r} {reason}", retry_after_s=5.0, status=503
            ) from None

    def _held(self, waking: FunctionInstance) -> list[Held]:
        """Return all that is in memory, for the choice of what leaves it."""
        now = asyncio.get_running_loop().time()
        left = [one.host for one in self.present if self._is_leaving(one)]  # once their processes have ended
        held = [
            Held(
                name=hold_name("backbone", host.name),
                num_bytes=host.num_bytes + host.zygote_bytes,
                value=sum(one.rate.per_s(now) for one in self.woken.values() if one.host is host)
                * (host.load_s + host.zygote_s),
                in_use=host is waking.host or host in left or not host.is_ready,
            )
            for host in self.hosts.values()
            if host.num_bytes
        ]
        return held + [
            Held(
                name=hold_name("process", one.name),
                num_bytes=self.bytes_of(one),
                value=one.rate.per_s(now) * one.cold_start_s,
                parent=hold_name("backbone", one.host.name),
                in_use=not one.is_idle,
            )
            for one in self.present
            if not self._is_leaving(one)
        ]

    def _is_in_use(self, name: str) -> bool:
        kind, _, owner = name.partition(":")
        if kind == "backbone":
            return any(one.host.name == owner for one in self.present)
        found = self.functions.get(owner)
        return found is not None and found.phase is FunctionPhase.AWAKE and not found.is_idle

    def _is_leaving(self, instance: FunctionInstance) -> bool:
        """Whether its process ends, or is about to: the function was removed."""
        return instance.phase is FunctionPhase.ENDING or self.functions.get(instance.name) is not instance

    async def _offload(self, name: str) -> None:
        kind, _, owner = name.partition(":")
        logger.info("offloaded name=%s", name)
        if kind == "backbone":
            await self.hosts[owner].release()
        elif owner in self.functions:
            await self.functions[owner].sleep("offloaded")
