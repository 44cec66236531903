"""Fair shares of tenants: of the tenants that wait, the one that was served least goes next.

::

    tenant    counter                        inner policy, one each (``fair_within``)
    acme      1200  <- least: goes next      fifo, chameleon, sjf ... orders the requests of acme
    beta      1340                           ...
    (gone)    1900     kept until the least counter has reached it

A *virtual counter* for each tenant grows by its service, divided by its weight: tokens of prompts as they are admitted
(those in the prefix cache are free), tokens of answers as they are generated, and the pages of an adapter's load, which
the first request that runs on it pays. *Virtual time* is the highest counter with which a tenant was admitted. A tenant
that begins to wait is *lifted* to the virtual time of ``fair_burst_s`` seconds ago: time in which it asked for nothing
gives it a claim to its share of those seconds, and no larger one. So counters of waiting tenants lie within ``U``, the
most service in flight, and ``B``, the advance of virtual time in a burst; for f and g that wait from ``t1`` to ``t2``

    | W_f(t1, t2) / weight_f - W_g(t1, t2) / weight_g |  <=  2 (U + B)        U = max(prompt_price L, output_price M)

for weights of at least 1, with ``L`` tokens of the longest prompt and ``M`` tokens in the pool. Lesser weights divide
their tenant's part. It holds where the policies inside have something to offer, and ``output_price`` is the higher. A
tenant whose requests cannot run, as their adapters are loading, is lifted as well.

The order of waiting requests is not enough: a newcomer would wait until a flood that came before it gives up seats,
pages and steps. So sequences of tenants beyond their share of the running ones are squashed for a tenant below its own,
and prompts share a step in the order of their tenants' counters. It is work-conserving: a tenant alone has all seats.

No request starves. Inside a tenant its policy's bound holds. Between tenants, the first in line is that of the least
counter (or after it, while its adapter is loading). If its KV lacks room, no other tenant is offered; for other
refusals it is passed ``MAX_BYPASS`` times (``fifo.py``). Meanwhile only its own running requests raise its counter, and
they end; each other tenant may go before it by a burst. Who gives up a place keeps its share, so squashing ends.

A decision costs a heap's logarithm in the number of tenants, beside a look at each running sequence when seats are
free. A tenant without requests is forgotten once it would return as one never seen.

Source: Sheng et al., "Fairness in Serving Large Language Models" (OSDI '24), algorithms 2 and 4 (weights), theorem 4.4.
Ours are the burst (and virtual time, after start-time fair queueing); squashing and the order of prompts; the policy
inside; the charge for loads; the bound on claims of tenants that cannot run; forgetting; and a pool without
reservations, where a pre-empted request pays once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush, heapreplace
from itertools import islice

from manylora.core.errors import ConfigError
from manylora.core.options import CheckedOptions, option
from manylora.core.scheduling.policies.fifo import LOOK_AHEAD, MAX_BYPASS
from manylora.core.scheduling.policy import Nearness, Outcome, Policy, PolicyContext, QueueStatus
from manylora.core.scheduling.sequence import Sequence

__all__ = ["FairPolicy"]

MOST_SQUASHED = 8  # sequences that give up their places in one step
NUM_PAST = 16  # virtual times of the last ``fair_burst_s`` that are kept


@dataclass(slots=True, eq=False)
class _Tenant:
    name: str
    policy: Policy  # orders its waiting sequences
    weight: float = 1.0
    counter: float = 0.0  # its service divided by its weight, and what it was lifted
    num_running: int = 0
    is_listed: bool = False  # whether an entry of the heap, or of those put aside, is its own
    is_indebted: bool = False  # whether an entry of the debts is its own
    step: int = -1  # the last step in which it was offered
    num_refused: int = 0  # in that step


@dataclass(slots=True, eq=False)
class _Running:
    sequence: Sequence
    tenant: _Tenant
    num_paid: int  # its tokens when its tenant was charged for them
    start: float  # its tenant's counter when it was admitted


_Entry = tuple[float, int, _Tenant]  # its counter when it was pushed, serial, tenant


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
class _Counters:
    """The tenants that wait, least counter first, and the debts of others. Counters only rise, so entries may lag.

    *Virtual time* is the highest counter with which a tenant was admitted: those that wait lie above it, unless they
    were passed.
    """

    burst_s: float  # a tenant may be behind the virtual time by what that has advanced in so many seconds
    heap: list[_Entry] = field(default_factory=list)
    aside: list[_Entry] = field(default_factory=list)  # refused in this step: nobody offers them until the next
    debts: list[_Entry] = field(default_factory=list)  # a heap of tenants without requests, above the floor
    virtual: float = 0.0
    past: deque[tuple[float, float]] = field(default_factory=deque)  # times, and the virtual time up to each
    floor: float = 0.0  # the virtual time ``burst_s`` ago
    num_listed: int = 0  # serial of entries: of equal counters, the tenant that waits for longer goes first

    def top(self) -> _Tenant | None:
        """Return the tenant of least counter that waits and was not put aside."""
        heap = self.heap
        while heap:
            counter, serial, tenant = heap[0]
            if not len(tenant.policy):
                heappop(heap)
                tenant.is_listed = False
            elif counter != tenant.counter:
                heapreplace(heap, (tenant.counter, serial, tenant))
            else:
                return tenant
        return None

    def put_aside(self) -> None:
        """Put the top aside until the next step."""
        self.aside.append(heappop(self.heap))

    def restore(self) -> None:
        """Take back those that were put aside."""
        for _, serial, tenant in self.aside:
            heappush(self.heap, (tenant.counter, serial, tenant))
        self.aside.clear()

    def advance(self, counter: float, now: float) -> None:
        """Learn that a tenant with that counter was admitted."""
        if counter > self.virtual:
            if not self.past or now - self.past[-1][0] >= self.burst_s / NUM_PAST:
                self.past.append((now, self.virtual))
                self.settle(now)
            self.virtual = counter

    def settle(self, now: float) -> float:
        """Return the floor at a time in seconds: no tenant that begins to wait, or is passed, is below it."""
        past = self.past
        while past and past[0][0] <= now - self.burst_s:
            past.popleft()
        self.floor = past[0][1] if past else self.virtual
        return self.floor

    def enter(self, tenant: _Tenant, now: float) -> None:
        """Lift a tenant that begins to wait to the floor."""
        self.restore()
        tenant.counter = max(tenant.counter, self.settle(now))
        if not tenant.is_listed:
            self.num_listed += 1
            tenant.is_listed = True
            heappush(self.heap, (tenant.counter, self.num_listed, tenant))

    def owes(self, tenant: _Tenant) -> bool:
        """Return whether a tenant without requests would return with more than one never seen; note it if so."""
        if tenant.counter > self.floor and not tenant.is_indebted:
            self.num_listed += 1
            tenant.is_indebted = True
            heappush(self.debts, (tenant.counter, self.num_listed, tenant))
        return tenant.is_indebted

    def settled(self) -> Iterator[_Tenant]:
        """Yield tenants whose debts the floor has reached; each may be forgotten if it has no request."""
        while self.debts and self.debts[0][0] <= self.floor:
            tenant = heappop(self.debts)[2]
            tenant.is_indebted = False
            yield tenant


class FairPolicy(Policy):
    """Offers the sequences of the tenant with the least counter, in the order of its own policy."""

    Options = FairOptions

    def __init__(self, context: PolicyContext) -> None:
        options: FairOptions = context.options
        if options.fair_within == "fair" or context.inner is None:
            raise ConfigError(f"Got fair_within = {options.fair_within!r}, expected another policy than fair")
        self._make_inner = context.inner(options.fair_within)
        self._nearness = context.nearness
        self._num_seats = min(context.config.max_num_seqs, context.config.max_num_batched_tokens)
        self._squashes = type(self._make_inner()).squash is not Policy.squash
        self._prompt_price, self._output_price = options.prompt_price, options.output_price
        self._load_price = options.load_price * context.block_size  # of a page
        self._tenants: dict[str, _Tenant] = {}
        self._counters = _Counters(options.fair_burst_s)
        self._running: dict[int, _Running] = {}  # by seq_id
        self._active: dict[_Tenant, float] = {}  # those with running sequences, and the weights that were summed up
        self._active_weight = 0.0
        self._plural: dict[_Tenant, None] = {}  # those with two or more
        self._num_waiting = self._step = 0
        self._now = 0.0
        self._has_left_out = False  # prompts, in this step
        self._is_paid = True  # whether answers were charged in this step
        self._offering: _Tenant | None = None  # the tenant of the last offer
        self._only: _Tenant | None = None  # it lacks room, or was passed too often: no other tenant is offered
        self._is_over = False  # whether no sequence is offered any more in this step
        self._holder: _Tenant | None = None  # its first in line is ours
        self._has_refused = False  # in this step, for another reason than a load
        self._passed: list[tuple[_Tenant, Sequence]] = []  # refused in this step, and not for a load

    def __len__(self) -> int:
        return self._num_waiting

    # -- sequences come and go ---------------------------------------------------------------------------------------

    def add(self, sequence: Sequence, now: float) -> None:
        """Add a sequence to those of its tenant, which is lifted if it had none waiting; the newest weight counts."""
        tenant = self._enter(sequence, now)
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

    def _enter(self, sequence: Sequence, now: float) -> _Tenant:
        name = sequence.request.tenant
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = _Tenant(name, self._make_inner())
        tenant.weight = sequence.request.weight
        if not len(tenant.policy):
            self._counters.enter(tenant, now)
            for one in self._counters.settled():
                if one is not tenant:
                    self._forget(one)
        self._num_waiting += 1
        return tenant

    def _left(self, tenant: _Tenant) -> None:
        self._num_waiting -= 1
        if not len(tenant.policy):
            self._forget(tenant)

    def _stop(self, sequence: Sequence) -> _Tenant:
        running = self._running.pop(sequence.seq_id)
        self._charge_answer(running)
        tenant = running.tenant
        self._count_running(tenant, -1)
        return tenant

    def _count_running(self, tenant: _Tenant, num: int) -> None:
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

    def _forget(self, tenant: _Tenant) -> None:
        """Forget a tenant without requests and debt; remember its debt until the floor has reached it."""
        if tenant.num_running or len(tenant.policy) or self._tenants.get(tenant.name) is not tenant:
            return
        if not self._counters.owes(tenant):
            del self._tenants[tenant.name]

    # -- charges -----------------------------------------------------------------------------------------------------

    def _charge_answers(self) -> None:
        for running in self._running.values():
            if len(running.sequence.tokens) != running.num_paid:
                self._charge_answer(running)

    def _charge_answer(self, running: _Running) -> None:
        num_tokens, tenant = len(running.sequence.tokens), running.tenant
        tenant.counter += self._output_price * (num_tokens - running.num_paid) / tenant.weight
        running.num_paid = num_tokens

    def _charge_admission(self, tenant: _Tenant, sequence: Sequence) -> None:
        """Charge a prompt, once, and a load that no other sequence has paid; those passed keep a bounded claim."""
        self._counters.advance(tenant.counter, self._now)
        price = self._load_price * sequence.num_loaded_pages
        if not sequence.num_preemptions:
            price += self._prompt_price * sequence.num_to_run
        tenant.counter += price / tenant.weight
        if self._counters.aside:
            floor = self._counters.settle(self._now)
            for _, _, passed in self._counters.aside:
                passed.counter = max(passed.counter, floor)

    # -- a step ------------------------------------------------------------------------------------------------------

    def squash(self, now: float) -> list[Sequence]:
        """Return sequences whose places are for the next tenants, and what the policies inside name."""
        squashed = self._over_share() if self._num_waiting else []
        if self._squashes:
            tenants = dict.fromkeys(one.tenant for one in self._running.values() if len(one.tenant.policy))
            squashed += [one for tenant in tenants for one in tenant.policy.squash(now) if one not in squashed]
        return squashed

    def _over_share(self) -> list[Sequence]:
        """Return the sequences admitted last of tenants with two or more places, and more than their share.

        As many as the next tenants have requests and lack places of their share, a first one at least. Those that give
        keep their share, so that no two tenants take places from each other in turn.
        """
        is_short = self._only is not None  # of pages: the places of one may be enough for several
        num_free = 0 if is_short else self._num_seats - len(self._running)
        most = 1 if is_short else MOST_SQUASHED
        squashed: list[Sequence] = []
        if not self._plural or num_free >= min(most, self._num_waiting):
            return squashed
        self._counters.restore()
        self._counters.top()
        left: dict[_Tenant, int] = {}
        for tenant in self._next_tenants(most):
            total = self._active_weight + (0.0 if tenant in self._active else tenant.weight)
            place = len(self._running) / total  # places of a weight of 1
            lacks = max(1, int(place * tenant.weight)) - tenant.num_running
            if lacks < 0 and tenant.num_running > 1 and len(tenant.policy):
                return squashed  # it is beyond its share itself, and next: it would take back what it gives
            for _ in filter(self._is_near, tenant.policy.upcoming(lacks)):
                if num_free:
                    num_free -= 1
                    continue
                left = left or {one: one.num_running for one in self._plural}
                giver = max(left, key=lambda one: left[one] - place * self._active[one])
                if len(squashed) == most or left[giver] < 2 or left[giver] - 1 < place * self._active[giver]:
                    return squashed
                left[giver] -= 1
                its = (one.sequence for one in reversed(self._running.values()) if one.tenant is giver)
                squashed.append(next(one for one in its if one not in squashed))
        return squashed

    def prompts(self, sequences: list[Sequence]) -> list[Sequence]:
        """Return prompts by their tenants' counters at admission; the next tenant goes before those with more.

        These are left out, not twice in a row, if it is likely to be admitted: a seat is free, its adapter is there and
        the last step had the pages.
        """
        counters, running = self._counters, self._running
        has_room = self._only is None and len(running) < self._num_seats
        tenant = counters.top() if has_room and not counters.aside else None
        ordered = sorted(sequences, key=lambda one: running[one.seq_id].start)
        was_left_out, self._has_left_out = self._has_left_out, False
        if tenant is None or was_left_out:
            return ordered
        if not all(map(self._is_near, tenant.policy.upcoming(1))):
            return ordered
        kept = [one for one in ordered if running[one.seq_id].start <= tenant.counter]
        self._has_left_out = len(kept) < len(ordered)
        return kept

    def _is_near(self, sequence: Sequence) -> bool:
        return self._nearness(sequence) is Nearness.DEVICE

    def begin(self, now: float) -> None:
        """Offer all tenants again; answers are charged with the first offer, as most steps have no seat."""
        self._now = now
        self._step += 1
        self._counters.restore()
        self._is_paid = self._has_refused = self._is_over = False
        self._only = None
        self._passed.clear()
        if (tenant := self._counters.top()) is not None:
            self._begin_inner(tenant)
            self._holder = tenant

    def _begin_inner(self, tenant: _Tenant) -> None:
        if tenant.step != self._step:
            tenant.step, tenant.num_refused = self._step, 0
            tenant.policy.begin(self._now)

    @property
    def first_in_line(self) -> Sequence | None:
        """The first in line of the tenant of least counter; of a later one, if those before lack only a load."""
        return self._holder.policy.first_in_line if self._holder is not None else None

    def offer(self) -> Sequence | None:
        """Return the next sequence of the tenant of least counter that has more to offer."""
        if not self._is_paid:
            self._charge_answers()
            self._is_paid = True
        while not self._is_over and (tenant := self._only or self._counters.top()) is not None:
            self._begin_inner(tenant)
            if not self._has_refused:
                self._holder = tenant
            self._offering = tenant
            sequence = tenant.policy.offer()
            if sequence is not None:
                return sequence
            if self._only is not None:
                return None
            self._counters.put_aside()
        return None

    def report(self, sequence: Sequence, outcome: Outcome) -> None:
        """Charge the tenant for an admission; of a refused one, decide whether other tenants may pass."""
        tenant = self._offering
        assert tenant is not None
        tenant.policy.report(sequence, outcome)
        if outcome is Outcome.ADMITTED:
            self._admitted(tenant, sequence)
            return
        tenant.num_refused += 1
        is_passed_on = tenant.num_refused >= LOOK_AHEAD // max(1, len(self._counters.heap) + len(self._counters.aside))
        if outcome is not Outcome.ADAPTER_LOADING:
            self._has_refused = True
            if outcome is Outcome.NO_PAGES or sequence.num_bypassed >= MAX_BYPASS:
                self._only = tenant
            else:
                self._passed.append((tenant, sequence))
        if is_passed_on and self._only is None:
            self._counters.put_aside()

    def _admitted(self, tenant: _Tenant, sequence: Sequence) -> None:
        self._running[sequence.seq_id] = _Running(sequence, tenant, len(sequence.tokens), tenant.counter)
        self._count_running(tenant, 1)
        self._charge_admission(tenant, sequence)
        for other, older in self._passed:
            if other is not tenant:
                older.passed()
                self._is_over |= older.num_bypassed >= MAX_BYPASS
        self._left(tenant)

    # -- looks -------------------------------------------------------------------------------------------------------

    def upcoming(self, count: int) -> list[Sequence]:
        """Return the next sequences of the next tenants in turn, so that no tenant fills the look-ahead alone."""
        fronts = [tenant.policy.upcoming(count) for tenant in self._next_tenants(count)]
        found = [front[place] for place in range(count) for front in fronts if place < len(front)]
        return found[:count]

    def _next_tenants(self, count: int) -> list[_Tenant]:
        """Return about the first ``count`` tenants: entries may lag, and prefetching only guesses."""
        found = [tenant for _, _, tenant in islice(self._counters.aside, count)]
        heap = self._counters.heap
        border = [(*heap[0][:2], 0)] if heap else []  # indices in the heap, least entry first
        while border and len(found) < count:
            _, _, index = heappop(border)
            found.append(heap[index][2])
            for child in (2 * index + 1, 2 * index + 2):
                if child < len(heap):
                    heappush(border, (*heap[child][:2], child))
        return found

    def queues(self) -> tuple[QueueStatus, ...]:
        """Return the queues inside a tenant that is alone, else one of all."""
        if len(self._tenants) == 1:
            return next(iter(self._tenants.values())).policy.queues()
        return (QueueStatus(num_waiting=self._num_waiting, num_running=len(self._running)),)
