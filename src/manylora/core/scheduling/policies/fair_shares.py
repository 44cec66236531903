"""The tenants of the fair order: their counters, their sequences, and the charges for service.

``fair.py`` has the order, the words and the bound.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heapreplace
from math import inf

from manylora.core.errors import ConfigError
from manylora.core.options import CheckedOptions, option
from manylora.core.scheduling.policy import Policy, PolicyContext
from manylora.core.scheduling.sequence import Sequence

__all__ = ["LEAST_CHUNK", "OWED", "ChargedSequence", "FairOptions", "FairShares", "TenantShare"]

SPREAD_OVER, LEAST_SPREAD = 4, 64  # steps over which prompts are spread, and tokens of them in a step at least
LEAST_CHUNK = 16  # tokens of a prompt in a step at least, and of all that are spread beside prompts that are not
OWED = 0.125  # part of the burst by which a tenant is behind, not merely next
NUM_PAST = 16  # virtual times of the last ``fair_burst_s`` that are kept
LEAST_BURST_S = 1.0  # a shorter burst has this one's looks at the counters, and its time in which others may come


@dataclass(slots=True, eq=False)
class TenantShare:
    """A tenant that has requests, or was served more than one that was never seen."""

    name: str
    policy: Policy  # orders its waiting sequences
    weight: float = 1.0
    counter: float = 0.0  # its service divided by its weight, and what it was lifted
    num_running: int = 0
    serial: int = 0  # order in which tenants of one rank go
    is_listed: bool = False  # whether an entry of the heap, or of those put aside, is its own
    is_indebted: bool = False  # whether an entry of the debts is its own
    step: int = -1  # the last step in which it was offered
    num_refused: int = 0  # in that step


@dataclass(slots=True, eq=False)
class ChargedSequence:
    """A sequence that runs, and what its tenant has paid for."""

    sequence: Sequence
    tenant: TenantShare
    num_paid: int  # its tokens when its tenant was charged for them
    start: float  # its tenant's counter when it was admitted


_Entry = tuple[float, int, TenantShare]  # its rank and serial when it was pushed, and the tenant


@dataclass(frozen=True, slots=True, kw_only=True)
class FairOptions(CheckedOptions):
    """The order inside a tenant, and the prices of service."""

    fair_within: str = option(
        "fifo", panel="Scheduling", plugin="policy", help="Under fair: order of the requests of one tenant."
    )
    prompt_price: float = option(
        1.0, panel="Scheduling", above=0, at_most=1e3, help="Under fair: price of a token of a prompt that is computed."
    )
    output_price: float = option(
        2.0, panel="Scheduling", above=0, at_most=1e3, help="Under fair: price of a token of an answer."
    )
    fair_burst_s: float = option(
        5.0,
        panel="Scheduling",
        flag="--fair-burst",
        unit="s",
        at_least=0,
        at_most=3600,
        help="Under fair: time for whose share a tenant that asked for less may make up at once.",
    )
    load_price: float = option(
        0.25,
        panel="Scheduling",
        at_least=0,
        at_most=1e3,
        help="Under fair: price of the load of an adapter, for each token of KV that its pages would hold.",
    )


@dataclass(slots=True)
class VirtualCounters:
    """The tenants that wait, least counter first, and the debts of others. Counters only rise, so entries may lag.

    *Virtual time* is the highest counter with which a tenant was admitted, or that was the least of those that wait:
    they lie above it, unless they were passed.
    """

    burst_s: float  # a tenant may be behind the virtual time by what that has advanced in so many seconds
    heap: list[_Entry] = field(default_factory=list)
    aside: list[_Entry] = field(default_factory=list)  # refused in this step: nobody offers them until the next
    debts: list[_Entry] = field(default_factory=list)  # a heap of tenants without requests, above the floor
    virtual: float = 0.0
    past: deque[tuple[float, float]] = field(default_factory=deque)  # times, and the virtual time up to each
    floor: float = 0.0  # the virtual time ``burst_s`` ago
    newest: TenantShare | None = None  # the tenant that was admitted last
    looked_at: float = -inf  # when virtual time was last held against the counters
    num_listed: int = 0  # serial of entries: of equal counters, the tenant that waits for longer goes first

    def top(self) -> TenantShare | None:
        """Return the tenant of least counter that waits and was not put aside."""
        heap = self.heap
        while heap:
            rank, serial, tenant = heap[0]
            if not len(tenant.policy):
                heappop(heap)
                tenant.is_listed = False
            elif (rank, serial) != (entry := self.entry(tenant))[:2]:
                heapreplace(heap, entry)
            else:
                return tenant
        return None

    def is_behind(self, tenant: TenantShare) -> bool:
        """Whether a tenant has a claim to more than the next turn."""
        return tenant.counter < self.virtual - OWED * (self.virtual - self.floor)

    def entry(self, tenant: TenantShare) -> _Entry:
        """Return the entry of a tenant: those with a claim first, in turns; then those of least counters."""
        return (-1.0 if self.floor < self.virtual and self.is_behind(tenant) else tenant.counter), tenant.serial, tenant

    def admitted(self, tenant: TenantShare) -> None:
        """Let the other tenants with a claim go before one of them that was admitted."""
        self.newest = tenant
        if self.is_behind(tenant):
            self.num_listed += 1
            tenant.serial = self.num_listed

    def put_aside(self) -> None:
        """Put the top aside until the next step."""
        self.aside.append(heappop(self.heap))

    def restore(self) -> None:
        """Take back those that were put aside."""
        for _, _, tenant in self.aside:
            heappush(self.heap, self.entry(tenant))
        self.aside.clear()

    def advance(self, counter: float, now: float) -> None:
        """Learn that a tenant with that counter was admitted."""
        if counter > self.virtual:
            if not self.past or now - self.past[-1][0] >= self.burst_s / NUM_PAST:
                self.past.append((now, self.virtual))
                self.settle(now)
            self.virtual = counter

    def is_due(self, now: float) -> bool:
        """Whether virtual time was not held against the counters for a while."""
        return now - self.looked_at >= max(LEAST_BURST_S, self.burst_s) / NUM_PAST

    def look(self, now: float) -> None:
        """Hold virtual time against the counters, which answers raise while no request is admitted.

        It reaches the least counter of those that wait; if none waits, that of the tenant admitted last.
        """
        self.looked_at = now
        self.restore()
        least = self.top() or self.newest
        if least is not None:
            self.advance(least.counter, now)

    def settle(self, now: float) -> float:
        """Return the floor at a time in seconds: no tenant that begins to wait, or is passed, is below it."""
        past = self.past
        while past and past[0][0] <= now - self.burst_s:
            past.popleft()
        floor = past[0][1] if past else self.virtual
        if floor != self.floor:
            self.floor = floor
            if floor < self.virtual:  # some may have a claim by now; ranks that rose are corrected at the top
                self.heap = [self.entry(tenant) for _, _, tenant in self.heap]
                heapify(self.heap)
        return floor

    def enter(self, tenant: TenantShare, now: float) -> None:
        """Lift a tenant that begins to wait to the floor."""
        self.restore()
        tenant.counter = max(tenant.counter, self.settle(now))
        if not tenant.is_listed:
            self.num_listed += 1
            tenant.serial, tenant.is_listed = self.num_listed, True
            heappush(self.heap, self.entry(tenant))

    def owes(self, tenant: TenantShare) -> bool:
        """Return whether a tenant without requests would return with more than one never seen; note it if so."""
        if tenant.counter > self.floor and not tenant.is_indebted:
            self.num_listed += 1
            tenant.is_indebted = True
            heappush(self.debts, (tenant.counter, self.num_listed, tenant))
        return tenant.is_indebted

    def settled(self) -> Iterator[TenantShare]:
        """Yield tenants whose debts the floor has reached; each may be forgotten if it has no request."""
        while self.debts and self.debts[0][0] <= self.floor:
            tenant = heappop(self.debts)[2]
            tenant.is_indebted = False
            yield tenant


@dataclass(slots=True)
class PromptSpread:
    """Spreads the prompts of tenants beyond their share over steps, while another tenant may come.

    ::

        one after the other    | 32 decodes | 400 ..... |  | 32 |  | 32 | 250 .. |     who comes meanwhile waits for it
        spread                 | 32 decodes | 64 |  | 32 | 64 |  | 32 | 82 |           no step is long
    """

    for_s: float  # since the last arrival of another tenant
    newest: str = ""  # the tenant of the last request
    newest_at: float = -inf  # when that came
    other_at: float = -inf  # when the last one of another tenant came
    most: int | None = None  # tokens of such prompts in this step, once there are any
    num_given: int = 0
    limits: dict[int, int] = field(default_factory=dict)  # tokens of each in this step, by seq_id

    def came(self, name: str, now: float) -> None:
        """Learn that a request of a tenant came."""
        if name != self.newest:
            self.other_at = self.newest_at
        self.newest, self.newest_at = name, now

    def begin(self) -> None:
        """Begin a step."""
        self.most, self.num_given = None, 0
        self.limits.clear()

    def applies(self, now: float) -> bool:
        """Whether another tenant than the one that came last was here a short while ago."""
        return now - self.other_at <= self.for_s

    def divide(self, prompts: list[Sequence], most: int | None) -> list[Sequence]:
        """Return the prompts that have a part in this step, of ``most`` tokens in all; ``None``: the usual number."""
        num_tokens = sum(one.num_to_run for one in prompts)
        self.most = max(LEAST_SPREAD, num_tokens // SPREAD_OVER) if most is None else most
        for one in prompts:
            if self.num_given < self.most:
                self.limits[one.seq_id] = self.take(one.num_to_run)
        return prompts[: len(self.limits)]

    def take(self, num_tokens: int) -> int:
        """Return the part of a prompt that fits, or the least that is worth a place in the step."""
        if self.most is None:
            self.most = max(LEAST_SPREAD, num_tokens // SPREAD_OVER)
        given = min(num_tokens, max(LEAST_CHUNK, self.most - self.num_given))
        self.num_given += given
        return given


class FairShares(Policy):
    """Keeps the sequences of each tenant, and charges for them."""

    Options = FairOptions

    def __init__(self, context: PolicyContext) -> None:
        options: FairOptions = context.options
        if options.fair_within == "fair" or context.inner is None:
            raise ConfigError(f"Got fair_within = {options.fair_within!r}, expected another policy than fair")
        self._make_inner = context.inner(options.fair_within)
        self._prompt_price, self._output_price = options.prompt_price, options.output_price
        self._load_price = options.load_price * context.block_size  # of a page
        self._tenants: dict[str, TenantShare] = {}
        self._counters = VirtualCounters(options.fair_burst_s)
        self._spread = PromptSpread(max(LEAST_BURST_S, options.fair_burst_s))
        self._running: dict[int, ChargedSequence] = {}  # by seq_id
        self._active: dict[TenantShare, float] = {}  # those with running sequences, and the weights that were summed up
        self._active_weight = 0.0
        self._plural: dict[TenantShare, None] = {}  # those with two or more
        self._num_waiting = 0
        self._now = 0.0

    def __len__(self) -> int:
        return self._num_waiting

    # -- sequences come and go ---------------------------------------------------------------------------------------

    def add(self, sequence: Sequence, now: float) -> None:
        """Add a sequence to those of its tenant, which is lifted if it had none waiting; the newest weight counts."""
        tenant = self._enter(sequence, now)
        self._spread.came(tenant.name, now)
        tenant.policy.add(sequence, now)

    def send_back(self, sequence: Sequence, now: float) -> None:
        """Add a pre-empted sequence again; it has paid for its tokens."""
        self._stop(sequence)
        tenant = self._enter(sequence, now)
        tenant.policy.send_back(sequence, now)

    def remove(self, sequence: Sequence) -> None:
        """Forget a waiting sequence."""
        tenant = self._tenants[sequence.request.tenant]
        tenant.policy.remove(sequence)
        self._left(tenant)

    def finish(self, sequence: Sequence, now: float) -> None:
        """Charge the last tokens of an ended sequence."""
        tenant = self._stop(sequence)
        tenant.policy.finish(sequence, now)
        self._forget(tenant)

    def _enter(self, sequence: Sequence, now: float) -> TenantShare:
        name = sequence.request.tenant
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = TenantShare(name, self._make_inner())
        tenant.weight = sequence.request.weight
        if not len(tenant.policy):
            self._look(now)
            self._counters.enter(tenant, now)
            for one in self._counters.settled():
                if one is not tenant:
                    self._forget(one)
        self._num_waiting += 1
        return tenant

    def _left(self, tenant: TenantShare) -> None:
        self._num_waiting -= 1
        if not len(tenant.policy):
            self._forget(tenant)

    def _stop(self, sequence: Sequence) -> TenantShare:
        running = self._running.pop(sequence.seq_id)
        self._charge_answer(running)
        tenant = running.tenant
        self._count_running(tenant, -1)
        return tenant

    def _count_running(self, tenant: TenantShare, num: int) -> None:
        """Count a sequence that begins (1) or ceases (-1) to run."""
        tenant.num_running += num
        if num > 0 and tenant.num_running == 1:
            self._active[tenant] = tenant.weight
            self._active_weight += tenant.weight
        elif num > 0:
            self._plural[tenant] = None
        elif not tenant.num_running:
            self._active_weight -= self._active.pop(tenant)
        elif tenant.num_running == 1:
            del self._plural[tenant]

    def _forget(self, tenant: TenantShare) -> None:
        """Forget a tenant without requests and debt; remember its debt until the floor has reached it."""
        if tenant.num_running or len(tenant.policy) or self._tenants.get(tenant.name) is not tenant:
            return
        if not self._counters.owes(tenant):
            del self._tenants[tenant.name]

    # -- charges -----------------------------------------------------------------------------------------------------

    def _look(self, now: float) -> None:
        """Let virtual time follow the counters, if it is due: answers may be long, and admissions rare."""
        if self._counters.is_due(now):
            self._charge_answers()
            self._counters.look(now)

    def _charge_answers(self) -> None:
        for running in self._running.values():
            if len(running.sequence.tokens) != running.num_paid:
                self._charge_answer(running)

    def _charge_answer(self, running: ChargedSequence) -> None:
        num_tokens, tenant = len(running.sequence.tokens), running.tenant
        tenant.counter += self._output_price * (num_tokens - running.num_paid) / tenant.weight
        running.num_paid = num_tokens

    def _charge_admission(self, tenant: TenantShare, sequence: Sequence) -> None:
        """Charge a prompt, once, and a load that no other sequence has paid; those passed keep a bounded claim."""
        self._counters.advance(tenant.counter, self._now)
        self._counters.admitted(tenant)
        price = self._load_price * sequence.num_loaded_pages
        if not sequence.num_preemptions:
            price += self._prompt_price * sequence.num_to_run
        tenant.counter += price / tenant.weight
        if self._counters.aside:
            floor = self._counters.settle(self._now)
            for _, _, passed in self._counters.aside:
                passed.counter = max(passed.counter, floor)
