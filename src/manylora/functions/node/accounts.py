"""The accounts of a node: all time, memory and processor time of its machine, and the requests of its functions.

A function that was replaced may have processes of two tenants for a moment. So an account is a function of a tenant,
and everything that is counted outlives the function's own record here.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterable

from manylora.functions.decisions.billing import MachineState, Taken, Usage, UsageMeter
from manylora.functions.node.backbone_host import BackboneHost
from manylora.functions.node.instance import FunctionInstance, FunctionPhase
from manylora.functions.node.readings import cpu_ns
from manylora.functions.wire import Account

__all__ = ["NodeAccounts", "machine_state"]


class NodeAccounts:
    """Counts the use of this machine, on a clock that never goes back. Only for one thread."""

    def __init__(self) -> None:
        self._origin_ns = time.time_ns() - time.monotonic_ns()
        self._meter = self._new_meter()
        self._cpu_read: dict[int, int] = {}  # by process
        self._counts: dict[str, tuple[int, int]] = {}

    def begin(self, since_ns: int) -> None:
        """Begin to count at the ledger's end, if the clock is behind it."""
        behind_ns = since_ns - self._now_ns()
        if behind_ns > 0:
            self._origin_ns += behind_ns
        self._meter = self._new_meter()

    def change(self, state: MachineState) -> None:
        """Charge the machine's state until now, and begin another."""
        self._meter.change(self._now_ns(), state)

    def count(self, account: str, num_requests: int, num_tokens: int) -> None:
        """Count requests that ended, and their tokens."""
        requests, tokens = self._counts.get(account, (0, 0))
        self._counts[account] = requests + num_requests, tokens + num_tokens

    def read_cpu(self, instance: FunctionInstance) -> None:
        """Charge the processor time that a function has used since the last reading."""
        pid = instance.pid
        if pid is None or (used := cpu_ns(pid)) is None:
            return
        before = self._cpu_read.get(pid, 0)
        self._meter.use_cpu(
            instance.account, used - before if used >= before else used
        )  # or it is a new process of this number
        self._cpu_read[pid] = used

    def take(self, pids: Collection[int | None]) -> tuple[Taken, list[Account]]:
        """Return the use since the last call, by account; processes other than ``pids`` have ended."""
        self._cpu_read = {pid: used for pid, used in self._cpu_read.items() if pid in pids}
        taken = self._meter.take(self._now_ns())
        counts, self._counts = self._counts, {}
        accounts = []
        for account in {**taken.accounts, **counts}:
            tenant, _, name = account.partition(":")
            num_requests, num_tokens = counts.get(account, (0, 0))
            accounts.append(
                Account(
                    name=name,  # of the platform, like its tenant, the empty one
                    tenant=tenant,
                    usage=taken.accounts.get(account, Usage()),
                    num_requests=num_requests,
                    num_tokens=num_tokens,
                )
            )
        return taken, accounts

    def _new_meter(self) -> UsageMeter:
        return UsageMeter(self._now_ns(), num_cpus=len(os.sched_getaffinity(0)))

    def _now_ns(self) -> int:
        return self._origin_ns + time.monotonic_ns()


def machine_state(
    present: Collection[FunctionInstance],
    hosts: Iterable[BackboneHost],
    woken: Collection[FunctionInstance],
    now: float,
) -> MachineState:
    """Return the payers of the machine's time and memory.

    A function pays for its process from its start to its end, whether a request or an order began it. A backbone
    without any belongs to those of the ``woken`` functions on it that have had requests lately: it is held for them.
    """
    own: dict[str, int] = {}
    for one in present:
        if one.phase is not FunctionPhase.WAKING:
            own[one.account] = own.get(one.account, 0) + one.own_bytes
    shared = []
    for host in hosts:
        if host.num_bytes:
            keepers = [one for one in present if one.host is host]
            keepers = keepers or [one for one in woken if one.host is host and one.rate.per_s(now) > 0.0]
            shared.append((host.num_bytes + host.zygote_bytes, list(dict.fromkeys(one.account for one in keepers))))
    return MachineState(  # a function that was replaced may be there twice
        running={0: list(dict.fromkeys(one.account for one in present if one.is_running))},
        awake=list(dict.fromkeys(one.account for one in present)),
        host_bytes=own,
        shared_host_bytes=shared,
    )
