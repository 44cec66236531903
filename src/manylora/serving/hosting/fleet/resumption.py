"""Send the requests of a lost engine to engines that serve, and end those that engines die on.

::

    lost ----> waiting -----------> placed, all together
       |                              |
       +-----> suspects, one by one --+---> its next token: no suspect any more
       |
       +-----> ended: too often resumed, twice under suspicion, or no engine left

An engine that dies took all its requests with it, and at most one of them is to blame. A request that had a token from
the engine has run on it and is not suspected. One without is *suspected*: it goes on only after the others, and the
next suspect waits until it has its token. So a suspect that meets a second death was the only suspect there, and ends
with ``PoisonRequest``. An engine that was killed from outside leaves no suspects. The decision and its limits are in
docs/adr/0033.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence, Sized
from dataclasses import dataclass, field

from manylora.core.errors import CapacityError, EngineDead, ManyloraError, PoisonRequest
from manylora.serving.hosting.links.in_flight import EngineLoss, InFlightRequest

__all__ = ["ResumePolicy", "ResumeStats", "Resumer"]

logger = logging.getLogger(__name__)

MAX_STRIKES = 2

HUNG_RETRY_S = 5.0  # seconds after which to try an engine again that hung and is restarted


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePolicy:
    """When a request goes on elsewhere."""

    max_resumes: int = 3  # most engines that a request may lose and still go on; 0 ends it at the first loss
    max_wait_s: float = 30.0  # longest wait for an engine when none serves, in seconds
    # Whether it goes on after an engine that hung, which it has waited for already; if not, its caller is asked to try
    # again.
    after_hang: bool = True
    # Seeds the draws of requests that bring no seed: they are made before the first engine, so that an answer goes on
    # with the same draws. ``None`` leaves the draws to each engine.
    seed: int | None = None


@dataclass(slots=True)
class ResumeStats:
    """Counters since the start, and the requests that wait now."""

    num_resumes: int = 0  # times that a request was given to another engine
    num_resumed: int = 0  # requests that got a token from another engine at least once
    num_ended: int = 0  # requests that ended instead, for any reason
    num_poison: int = 0  # those that ended under suspicion
    longest_pause_s: float = 0.0  # longest time from a request's last token before a loss to the next, in seconds
    num_waiting: int = 0  # requests that wait for an engine

    @classmethod
    def sum_of(cls, parts: Iterable[ResumeStats]) -> ResumeStats:
        """Return the sums of counters, and the longest pause."""
        total = cls()
        for part in parts:
            total = cls(
                num_resumes=total.num_resumes + part.num_resumes,
                num_resumed=total.num_resumed + part.num_resumed,
                num_ended=total.num_ended + part.num_ended,
                num_poison=total.num_poison + part.num_poison,
                longest_pause_s=max(total.longest_pause_s, part.longest_pause_s),
                num_waiting=total.num_waiting + part.num_waiting,
            )
        return total


@dataclass(eq=False)
class Resumer:
    """The requests between two engines. For the event loop's thread alone."""

    # Submits requests to engines that serve; the awaited result is the errors of those that were refused, by id. It
    # gives them to ``lose`` again if their engine is lost before its answer.
    place: Callable[[Sequence[InFlightRequest]], Awaitable[dict[str, ManyloraError]]]
    # Returns the engines that take the rest of answers, none if none does; raises ``EngineDead`` if none will again.
    going_on: Callable[[], Sized]
    policy: ResumePolicy
    stats: ResumeStats = field(default_factory=ResumeStats)
    _waiting: dict[str, InFlightRequest] = field(default_factory=dict)
    _suspects: dict[str, InFlightRequest] = field(default_factory=dict)
    _on_probation: InFlightRequest | None = None
    _closed_at: float | None = None  # since when no engine serves, in seconds
    _woken: asyncio.Event = field(default_factory=asyncio.Event)
    _sender: asyncio.Task[None] | None = None
    _placing: set[asyncio.Task[None]] = field(default_factory=set)

    def lose(self, requests: Iterable[InFlightRequest], loss: EngineLoss) -> None:
        """Take over the requests of an engine that is lost."""
        for one in requests:
            if one is self._on_probation:
                self._on_probation = None
            one.lost(loss)
            error = self._verdict(one, loss)
            if error is not None:
                self._end(one, error)
                continue
            one.on_next_output = self._note_output
            (self._suspects if one.strikes else self._waiting)[one.request_id] = one
        self._count()
        if (self._waiting or self._suspects) and self._sender is None:
            self._sender = asyncio.create_task(self._send_on())
        self._woken.set()

    async def carry(
        self, requests: Sequence[InFlightRequest], loss: EngineLoss, *, each: bool
    ) -> dict[str, ManyloraError]:
        """Take over requests that were submitted to an engine that was lost before its answer; return as ``submit``.

        ``EngineDead`` if no engine took a request; unless ``each``, the first error of a request.
        """
        loop = asyncio.get_running_loop()
        answers = []
        for one in requests:
            one.lost_at = loop.time()
            one.settled = loop.create_future()
            answers.append(one.settled)
        self.lose(requests, loss)
        refused: dict[str, ManyloraError] = {}
        for one, result in zip(requests, await asyncio.gather(*answers, return_exceptions=True), strict=True):
            if isinstance(result, ManyloraError) and each and not isinstance(result, EngineDead):
                refused[one.request_id] = result
            elif result is not None:
                raise result
        return refused

    def cancel(self, request_ids: Iterable[str]) -> None:
        """Forget requests that wait, or are on probation."""
        for request_id in request_ids:
            self._forget(request_id)
            if self._on_probation is not None and self._on_probation.request_id == request_id:
                self._on_probation = None
                self._woken.set()
        self._count()

    def wake(self) -> None:
        """Look again: an engine begins to serve, or will not serve again."""
        self._woken.set()

    def close(self, error: ManyloraError) -> None:
        """End every request that waits."""
        self._end_all(error)
        for task in [self._sender, *self._placing]:
            if task is not None:
                task.cancel()

    # -- sending on --------------------------------------------------------------------------------------------------

    async def _send_on(self) -> None:
        """Place requests while any waits."""
        try:
            while self._waiting or self._suspects:
                self._woken.clear()
                try:
                    is_open = bool(self.going_on())
                except EngineDead:
                    self._end_all(_ended("no engine is left"))
                    break
                if not is_open:
                    await self._wait_for_engine()
                    continue
                self._closed_at = None
                if self._waiting:
                    self._send(list(self._waiting.values()))
                elif self._on_probation is None:
                    self._on_probation = next(iter(self._suspects.values()))
                    self._send([self._on_probation])
                else:
                    await self._woken.wait()
        finally:
            self._sender = self._closed_at = None

    def _send(self, requests: list[InFlightRequest]) -> None:
        """Submit requests; an engine that does not answer must not hold up the others."""
        for one in requests:
            self._forget(one.request_id)
        self.stats.num_resumes += len(requests)
        self._count()
        logger.warning("requests_resumed num=%d", len(requests))
        task = asyncio.create_task(self._settle(requests, self.place(requests)))
        self._placing.add(task)
        task.add_done_callback(self._placing.discard)

    async def _settle(self, requests: list[InFlightRequest], answer: Awaitable[dict[str, ManyloraError]]) -> None:
        refused = await answer
        for one in requests:
            error = refused.get(one.request_id)
            if error is not None:
                self._end(one, error)

    async def _wait_for_engine(self) -> None:
        """Wait for a change; end every request when no engine has served for too long."""
        now = asyncio.get_running_loop().time()
        if self._closed_at is None:
            self._closed_at = now
        left_s = self._closed_at + self.policy.max_wait_s - now
        try:
            await asyncio.wait_for(self._woken.wait(), max(0.0, left_s))
        except TimeoutError:
            self._end_all(_ended(f"no other served within {self.policy.max_wait_s:g} s"))

    def _note_output(self, one: InFlightRequest) -> None:
        """A request that was sent on has an output."""
        if not one.is_resumed:
            one.is_resumed = True
            self.stats.num_resumed += 1
        self.stats.longest_pause_s = max(self.stats.longest_pause_s, asyncio.get_running_loop().time() - one.lost_at)
        if one is self._on_probation:
            self._on_probation = None
            self._woken.set()

    # -- ends --------------------------------------------------------------------------------------------------------

    def _verdict(self, one: InFlightRequest, loss: EngineLoss) -> ManyloraError | None:
        """Return the error that ends a request whose engine was lost, or ``None``: it may go on."""
        most = self.policy.max_resumes
        if not most:
            return loss.error
        if loss.is_hang and not self.policy.after_hang:
            return CapacityError(f"{one.request.model!r}: {loss.error}", retry_after_s=HUNG_RETRY_S, status=503)
        if len(one.strikes) >= MAX_STRIKES:
            self.stats.num_poison += 1
            for strike in one.strikes:
                strike.is_explained = True
            logger.error("poison_request id=%s model=%r", one.request_id, one.request.model)
            return PoisonRequest(
                f"{MAX_STRIKES} engines died when they began to work on this request; it is not tried again "
                f"(last: {loss.error})"
            )
        if one.num_resumes > most:
            return EngineDead(f"This request lost {one.num_resumes} engines, and may lose {most} (last: {loss.error})")
        return None

    def _end_all(self, error: ManyloraError) -> None:
        for one in [*self._waiting.values(), *self._suspects.values()]:
            self._end(one, error)
        self._count()

    def _end(self, one: InFlightRequest, error: ManyloraError) -> None:
        self.stats.num_ended += 1
        one.on_next_output = None
        self._forget(one.request_id)
        if one is self._on_probation:
            self._on_probation = None
            self._woken.set()
        one.fail(error)

    def _forget(self, request_id: str) -> None:
        self._waiting.pop(request_id, None)
        self._suspects.pop(request_id, None)

    def _count(self) -> None:
        self.stats.num_waiting = len(self._waiting) + len(self._suspects)


def _ended(reason: str) -> EngineDead:
    return EngineDead(f"The engine died while it worked on this request, and {reason}.")
