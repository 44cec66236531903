"""Fair shares of tenants: of the tenants that wait, the one that was served least goes next.

::

    tenant    counter                        inner policy, one each (``fair_within``)
    acme      1200  <- least: goes next      fifo, chameleon, sjf ... orders the requests of acme
    beta      1340                           ...
    (gone)    1900     kept until the least counter has reached it

A *virtual counter* for each tenant grows by its service, divided by its weight: tokens of prompts as they are admitted
(those in the prefix cache are free), tokens of answers as they are generated, and the pages of an adapter's load, which
the first request that runs on it pays. *Virtual time* is the highest counter with which a tenant was admitted, or that
was the least of those that wait: it follows them while answers are long and no request is admitted. A tenant that
begins to wait is *lifted* to the virtual time of ``fair_burst_s`` seconds ago: time in which it asked for nothing gives
it a claim to its share of those seconds, and no larger one. So counters of waiting tenants lie within ``U``, the most
service in flight, and ``B``, the advance of virtual time in a burst; for f and g that wait from ``t1`` to ``t2``

    | W_f(t1, t2) / weight_f - W_g(t1, t2) / weight_g |  <=  2 (U + B)        U = max(prompt_price L, output_price M)

for weights of at least 1, with ``L`` tokens of the longest prompt and ``M`` tokens in the pool. Lesser weights divide
their tenant's part. It holds where the policies inside have something to offer, and ``output_price`` is the higher. A
tenant whose requests cannot run, as their adapters are loading, is lifted as well.

Tenants that are further behind virtual time than an eighth of a burst have a *claim*. They go first, and take turns:
among many that ask for less than their share, the one that asked twice would else wait behind all that came once.

The order of waiting requests is not enough: a newcomer would wait until a flood that came before it gives up seats,
pages and steps. So sequences of tenants beyond their share of the running ones are squashed for a tenant below its own,
or with a claim, those that lose the fewest tokens. And while another tenant may come (one did in the last
``fair_burst_s``), tenants beyond their share leave one seat in 32 free, and their prompts are spread over steps, which
are then about as long as decoding alone: a newcomer waits for a short step, and its prompt has the next one for itself.
It is work-conserving but for that seat; a tenant alone has all.

No request starves. Inside a tenant its policy's bound holds. Between tenants, the first in line is that of the least
counter (or after it, while its adapter is loading). If its KV lacks room, no other tenant is offered; for other
refusals it is passed ``MAX_BYPASS`` times (``fifo.py``). Meanwhile only its own running requests raise its counter, and
they end; each other tenant may go before it by a burst. Who gives up a place keeps its share, so squashing ends.

A decision costs a heap's logarithm in the number of tenants, beside a look at each running sequence when seats are
free. Claims are found by a look at each waiting tenant, sixteen times in a burst. A tenant without requests is
forgotten once it would return as one never seen.

Source: Sheng et al., "Fairness in Serving Large Language Models" (OSDI '24), algorithms 2 and 4 (weights), theorem 4.4.
Ours are the burst (and virtual time, after start-time fair queueing); turns among claims; squashing, the spare seat and
the spread of prompts; the policy inside; the charge for loads; the bound on claims of tenants that cannot run;
forgetting; and a pool without reservations, where a pre-empted request pays once.
"""

from __future__ import annotations

from heapq import heappop, heappush
from itertools import islice
from operator import attrgetter

from manylora.core.scheduling.policies.fair_shares import LEAST_CHUNK, OWED, ChargedSequence, FairShares, TenantShare
from manylora.core.scheduling.policies.fifo import LOOK_AHEAD, MAX_BYPASS
from manylora.core.scheduling.policy import Nearness, Outcome, Policy, PolicyContext, QueueStatus
from manylora.core.scheduling.sequence import Sequence

__all__ = ["FairPolicy"]

MOST_SQUASHED = 8  # sequences that give up their places in one step
SPARE = 32  # of so many seats, one is left to tenants with less than their share while they may come
BEYOND = 16  # a tenant is beyond its share by more than one of so many seats


class FairPolicy(FairShares):
    """Offers the sequences of the tenant with the least counter, in the order of its own policy."""

    def __init__(self, context: PolicyContext) -> None:
        super().__init__(context)
        self._nearness = context.nearness
        self._num_tokens = context.config.max_num_batched_tokens
        self._num_seats = min(context.config.max_num_seqs, self._num_tokens)
        self._num_spare = self._num_seats // SPARE
        self._squashes = type(self._make_inner()).squash is not Policy.squash
        self._step = 0
        self._is_paid = True  # whether answers were charged in this step
        self._offering: TenantShare | None = None  # the tenant of the last offer
        self._only: TenantShare | None = None  # it lacks room, or was passed too often: no other tenant is offered
        self._is_over = False  # whether no sequence is offered any more in this step
        self._holder: TenantShare | None = None  # its first in line is ours
        self._has_refused = False  # in this step, for another reason than a load
        self._passed: list[tuple[TenantShare, Sequence]] = []  # refused in this step, and not for a load

    # -- a step ------------------------------------------------------------------------------------------------------

    def squash(self, now: float) -> list[Sequence]:
        """Return sequences whose places are for the next tenants, and what the policies inside name."""
        self._now = now
        self._look(now)
        self._spread.begin()
        squashed = self._over_share() if self._num_waiting and len(self._tenants) > 1 else []
        if self._squashes:
            tenants = dict.fromkeys(one.tenant for one in self._running.values() if len(one.tenant.policy))
            squashed += [one for tenant in tenants for one in tenant.policy.squash(now) if one not in squashed]
        return squashed

    def _over_share(self) -> list[Sequence]:
        """Return the sequences admitted last of tenants with two or more places, and more than their share.

        As many as the next tenants have requests and lack places of their share, a first one at least, and those that
        are owed more. The others keep their share, so that no two tenants take places from each other in turn.
        """
        is_short = self._only is not None  # of pages: the places of one may be enough for several
        num_free = 0 if is_short else self._num_seats - len(self._running)
        most = 1 if is_short else MOST_SQUASHED
        squashed: list[Sequence] = []
        if not self._plural or num_free >= min(most, self._num_waiting):
            return squashed
        self._charge_answers()
        self._counters.restore()
        self._counters.top()
        left: dict[TenantShare, int] = {}
        for tenant in self._next_tenants(most):
            total = self._active_weight + (0.0 if tenant in self._active else tenant.weight)
            place = len(self._running) / total  # places of a weight of 1
            lacks = max(1, int(place * tenant.weight)) - tenant.num_running
            for one in filter(self._is_near, tenant.policy.upcoming(most)):
                if num_free:
                    num_free, lacks = num_free - 1, lacks - 1
                    continue
                left = left or {other: other.num_running for other in self._plural}
                giver = max(left, key=lambda other: left[other] - place * self._active[other])
                is_beyond = left[giver] - 1 >= place * self._active[giver]
                if len(squashed) == most or left[giver] < 2 or giver is tenant or giver.counter < tenant.counter:
                    return squashed
                if not (lacks > 0 and is_beyond) and not self._is_owed(tenant, one, giver):
                    break
                left[giver] -= 1
                lacks -= 1
                its = (each.sequence for each in reversed(self._running.values()) if each.tenant is giver)
                # Its tokens are computed again: of those with the fewest, the last.
                squashed.append(min((each for each in its if each not in squashed), key=attrgetter("num_computed")))
        return squashed

    def _is_owed(self, tenant: TenantShare, sequence: Sequence, giver: TenantShare) -> bool:
        """Whether a tenant is behind another by more than what they take from each other in turns."""
        turn = 2 * self._prompt_price * sequence.num_to_run / tenant.weight
        counters = self._counters
        return giver.counter - tenant.counter > max(turn, OWED * (counters.virtual - counters.floor))

    def prompts(self, sequences: list[Sequence]) -> list[Sequence]:
        """Return prompts by their tenants' counters at admission; those of tenants beyond their share last, and spread.

        They leave the step to the others, and to the next tenant if it is likely to be admitted: a seat is free, its
        adapter is there and the last step had the pages.
        """
        running, spread = self._running, self._spread
        ordered = sorted(sequences, key=lambda one: running[one.seq_id].start)
        if not spread.applies(self._now):
            return ordered
        first: list[Sequence] = []
        spreading: list[Sequence] = []
        for one in ordered:
            (spreading if self._is_beyond(running[one.seq_id].tenant) else first).append(one)
        coming = sum(one.num_to_run for one in (*first, *self._coming()))
        room = self._num_tokens - (len(running) - len(sequences)) - coming if first else LEAST_CHUNK
        return first + spread.divide(spreading, min(LEAST_CHUNK, room) if coming else None)

    def _coming(self) -> list[Sequence]:
        """Return the next sequence if it is likely to be admitted in this step, and is not to be spread."""
        if self._only is not None or len(self._running) >= self._num_seats or self._counters.aside:
            return []
        tenant = self._counters.top()
        if tenant is None or self._is_beyond(tenant):
            return []
        return [one for one in tenant.policy.upcoming(1) if self._is_near(one)]

    def chunk(self, sequence: Sequence) -> int:
        """Return a part of the prompt of a tenant beyond its share, while another tenant may come; else all of it."""
        spread, num_tokens = self._spread, sequence.num_to_run
        if (limit := spread.limits.get(sequence.seq_id)) is not None:
            return limit
        if not spread.applies(self._now) or not self._is_beyond(self._running[sequence.seq_id].tenant):
            return num_tokens
        return spread.take(num_tokens)

    def _is_beyond(self, tenant: TenantShare) -> bool:
        """Whether a tenant has more than its share of the running sequences, and more waiting, and is not owed it."""
        if tenant not in self._plural or not len(tenant.policy):
            return False
        if self._counters.is_behind(tenant):
            return False
        if len(self._active) == 1:
            return True
        share = len(self._running) * tenant.weight / self._active_weight
        return tenant.num_running - share > self._num_seats / BEYOND

    def _leaves_seats(self, tenant: TenantShare) -> bool:
        """Whether the last seats are not for a tenant, since it has more than its share and another may come."""
        if self._num_seats - len(self._running) > self._num_spare or not self._spread.applies(self._now):
            return False
        return self._is_beyond(tenant)

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

    def _begin_inner(self, tenant: TenantShare) -> None:
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
            if self._only is None and self._leaves_seats(tenant):  # until the next step
                self._counters.put_aside()
                continue
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

    def _admitted(self, tenant: TenantShare, sequence: Sequence) -> None:
        self._running[sequence.seq_id] = ChargedSequence(sequence, tenant, len(sequence.tokens), tenant.counter)
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

    def _next_tenants(self, count: int) -> list[TenantShare]:
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
