"""Room of callers: bounds on the answers under way, the bodies that arrive, and the answers that wait to be read.

* No tenant has so many answers under way that the queue is full for all, and none exceeds the limits of its own.
* Thousands of clients that each send a megabyte, slowly, do not take all memory.
* Long answers that wait for their clients have a bound together. A whole answer can have a hundred megabytes
  (log-probabilities, echoes of long prompts), and a client that takes a little of it now and then keeps it for hours.
  So beyond the bound the connection of an answer is broken: of the client that has most, the one that has waited for
  longest.
"""

from __future__ import annotations

import contextlib
import heapq
import logging
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from manylora.core.config import SchedulerConfig
from manylora.core.errors import CallerLimit
from manylora.serving.http.errors import HttpError

__all__ = [
    "NO_LIMITS",
    "SHORT_BODY_BYTES",
    "Allowance",
    "ArrivingBody",
    "BodyRoom",
    "CallerLimits",
    "CallerRoom",
    "CallerUse",
    "Places",
    "WaitingAnswers",
    "body_parts",
    "default_body_bytes",
    "room_of_engine",
    "short_body",
    "short_struct",
]

MAX_BODIES_BYTES = 256 << 20
"""Bytes of all bodies longer than ``SHORT_BODY_BYTES`` that arrive at a time; beyond them a body alone is taken."""

MAX_WAITING_BYTES = 256 << 20
"""Bytes of all long answers that wait for their clients; beyond them the slowest readers are left."""

SHORT_BODY_BYTES = 64 * 1024  # a body up to this is taken whatever else arrives: connections bound these

LEAST_BODY_BYTES = 1 << 20
BODY_BYTES_PER_TOKEN = 16  # a token is about four bytes of text, eight as an id, and six or twelve as an escape in JSON
READ_WITHIN_S = 10.0  # time that every client has to read its answer, whatever waits

T = TypeVar("T")

logger = logging.getLogger(__name__)


def default_body_bytes(max_model_len: int) -> int:
    """Return the largest body by default: room for a full context in any notation, and for batches of short prompts."""
    return max(LEAST_BODY_BYTES, BODY_BYTES_PER_TOKEN * max_model_len)


def room_of_engine(scheduler: SchedulerConfig) -> int:
    """Return the most answers of one caller on an engine: all that run, and half of those that wait."""
    return scheduler.max_num_seqs + scheduler.max_waiting // 2


async def body_parts(request: Request, max_bytes: int) -> AsyncIterator[bytes]:
    """Yield the body of a request as it arrives; ``HttpError`` if it is longer (413), or the client has gone (400)."""
    declared = request.headers.get("content-length", "")
    num_bytes = 0
    try:
        if not (declared.isdigit() and int(declared) > max_bytes):
            async for part in request.stream():
                num_bytes += len(part)
                if num_bytes > max_bytes:
                    break
                yield part
            else:
                return
    except ClientDisconnect:
        raise HttpError(400, "The body ended early") from None
    raise HttpError(413, f"The body is larger than {max_bytes} bytes", headers={"Connection": "close"})


async def short_body(request: Request, max_bytes: int) -> bytes:
    """Return the body of a request that needs no room, because few bytes are enough; errors as of ``body_parts``."""
    return b"".join([part async for part in body_parts(request, max_bytes)])


async def short_struct(request: Request, kind: type[T], max_bytes: int) -> T:
    """Return what a short body of JSON says; errors as of ``short_body``, 400 if it is malformed."""
    body = await short_body(request, max_bytes)
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise HttpError(400, f"The body is not as expected: {error}") from None


class _Counts(Counter[str]):
    """Numbers by caller; a caller with none is forgotten."""

    def add(self, caller: str, num: int) -> None:
        """Add a number, which may be negative."""
        self[caller] += num
        if not self[caller]:
            del self[caller]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallerLimits:
    """The limits of a caller of its own; ``None`` for none."""

    requests: int | None = None  # a minute
    tokens: int | None = None  # a minute: of prompts when they are known, of answers when they have ended
    num_answers: int | None = None  # under way
    num_adapters: int | None = None  # distinct ones under way


NO_LIMITS = CallerLimits()


@dataclass(frozen=True, slots=True, kw_only=True)
class CallerUse:
    """What a caller has of its limits now: answers and adapters under way; requests and tokens that do not fill up yet.

    The last two are ``None`` where it has no such limit.
    """

    name: str
    num_answers: int
    num_adapters: int
    requests: float | None
    tokens: float | None
    limits: CallerLimits


@dataclass(slots=True, eq=False)
class Allowance:
    """A limit a minute that fills up evenly: all of it may be taken at once. Times are in seconds."""

    of: str  # ``requests`` or ``tokens``
    _taken: float = 0.0  # what was taken and has not filled up yet, at a time, under a limit
    _at: float = 0.0
    _limit: int = 0

    def taken(self, limit: int, now: float) -> float:
        """Return what is not filled up yet; more than the limit where answers were longer than what was left.

        It takes no longer to fill up under a limit that was lowered meanwhile.
        """
        if limit < self._limit:
            self._taken *= limit / self._limit
        self._limit = limit
        self._taken = max(0.0, self._taken - (now - self._at) * limit / 60.0)
        self._at = now
        return self._taken

    def check(self, limit: int, num: int, now: float) -> None:
        """Raise ``CallerLimit`` unless ``num`` more are left; more than the limit need all of it."""
        over = self.taken(limit, now) + min(num, limit) - limit
        if over > 0:
            raise CallerLimit(
                f"This caller may have {limit} {self.of} a minute, and asks for {num} more than it took already: "
                f"{max(0, limit - math.ceil(self._taken))} are left",
                retry_after_s=over * 60.0 / limit,
            )

    def take(self, limit: int, num: int, now: float) -> None:
        """Take so many; what is not left is owed."""
        self._taken = self.taken(limit, now) + num

    def adopt(self, limit: int, taken: float, now: float) -> None:
        """Count so much as taken, unless it is more already."""
        self._taken = max(self.taken(limit, now), taken)

    def headers(self, limit: int, now: float) -> list[tuple[bytes, bytes]]:
        """Return OpenAI's headers about the limit."""
        taken = self.taken(limit, now)
        values = {"limit": limit, "remaining": max(0, limit - math.ceil(taken)), "reset": f"{taken * 60 / limit:.3f}s"}
        return [(f"x-ratelimit-{name}-{self.of}".encode(), f"{value}".encode()) for name, value in values.items()]


@dataclass(slots=True, eq=False)
class _Caller:
    """What a caller has under way, and what it took in the last minute."""

    num_answers: int = 0
    adapters: Counter[str] = field(default_factory=Counter)
    requests: Allowance = field(default_factory=lambda: Allowance("requests"))
    tokens: Allowance = field(default_factory=lambda: Allowance("tokens"))


class Places:
    """The places of a request's answers; each is given back once, when its answer ends."""

    def __init__(self, room: CallerRoom, name: str, num: int, adapter: str | None) -> None:
        self._room, self._name, self._num, self._adapter = room, name, num, adapter

    def give(self) -> None:
        """Give back the place of an answer that has ended; the last goes back with the adapter."""
        if self._num > 1:
            self._num -= 1
            self._room.give(self._name, 1)

    def close(self, num_tokens: int = 0) -> None:
        """Give back the others; the answers had so many tokens."""
        if self._num:
            self._room.give(self._name, self._num, self._adapter, num_tokens)
            self._num = 0

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return OpenAI's headers about the limits a minute."""
        return self._room.headers(self._name)


@dataclass(eq=False)
class CallerRoom:
    """Bounds the answers under way of each caller, and what it takes in a minute. For the event loop's thread alone."""

    num_each: int  # most answers of a caller on an engine
    num_engines: Callable[[], int]  # returns the number of engines
    _: KW_ONLY
    limits_of: Callable[[str], CallerLimits] = lambda caller: NO_LIMITS  # returns the limits of a caller of its own
    now: Callable[[], float] = time.monotonic  # returns a time in seconds that never steps back
    _callers: dict[str, _Caller] = field(default_factory=dict)
    # those that have taken their last place, and have given none back since
    _full: set[str] = field(default_factory=set)

    @property
    def is_any_full(self) -> bool:
        """Whether a caller may have no place left, so that each is to be checked."""
        return bool(self._full)

    def check(self, caller: str) -> None:
        """Raise ``CallerLimit`` if a caller has no place or request left, at next to no cost."""
        if (one := self._callers.get(caller)) is not None:
            if caller in self._full:
                self._check_places(one, caller, 1)
            if (most := self.limits_of(caller).requests) is not None:
                one.requests.check(most, 1, self.now())

    def take(self, caller: str, num: int, *, num_tokens: int = 0, adapter: str | None = None) -> Places:
        """Take places for ``num`` answers of a request, all or none; ``CallerLimit`` if a limit is exceeded.

        The prompts have ``num_tokens``. ``adapter`` answers; ``None`` for the base.
        """
        one, limits, now = self._callers.get(caller) or _Caller(), self.limits_of(caller), self.now()
        self._check_places(one, caller, num)
        num_adapters = len(one.adapters) + (adapter is not None and adapter not in one.adapters)
        if limits.num_adapters is not None and num_adapters > limits.num_adapters:
            raise CallerLimit(
                f"This caller has answers of {len(one.adapters)} adapters under way, of {limits.num_adapters} at most: "
                "try again when some have ended"
            )
        if limits.requests is not None:
            one.requests.check(limits.requests, 1, now)
        if limits.tokens is not None:
            one.tokens.check(limits.tokens, num_tokens, now)
        return self.count(caller, num, num_tokens=num_tokens, adapter=adapter)

    def count(
        self, caller: str, num: int, *, num_tokens: int = 0, adapter: str | None = None, takes_allowance: bool = True
    ) -> Places:
        """Take places whatever is left: of a request that another process has let in; arguments as of ``take``.

        Without ``takes_allowance`` the request is in the limits a minute already.
        """
        one, limits, now = self._callers.setdefault(caller, _Caller()), self.limits_of(caller), self.now()
        if limits.tokens is not None and takes_allowance:
            one.tokens.take(limits.tokens, num_tokens, now)
        if limits.requests is not None and takes_allowance:
            one.requests.take(limits.requests, 1, now)
        one.num_answers += num
        if adapter is not None:
            one.adapters[adapter] += 1
        if one.num_answers >= self._most(caller):
            self._full.add(caller)
        return Places(self, caller, num, adapter)

    def give(self, caller: str, num: int, adapter: str | None = None, num_tokens: int = 0) -> None:
        """Take back places; with the last of a request the adapter, and the tokens of its answers."""
        one, limits = self._callers[caller], self.limits_of(caller)
        one.num_answers -= num
        self._full.discard(caller)
        if limits.tokens is not None:
            one.tokens.take(limits.tokens, num_tokens, self.now())
        if adapter is not None:
            one.adapters[adapter] -= 1
            if not one.adapters[adapter]:
                del one.adapters[adapter]
        if not one.num_answers and limits.requests is None and limits.tokens is None:
            del self._callers[caller]

    def taken(self) -> dict[str, tuple[float, float]]:
        """Return the requests and tokens that each caller took of its limits a minute, and that do not fill up yet."""
        now, found = self.now(), dict[str, tuple[float, float]]()
        for name, one in self._callers.items():
            limits = self.limits_of(name)
            requests = 0.0 if limits.requests is None else one.requests.taken(limits.requests, now)
            tokens = 0.0 if limits.tokens is None else one.tokens.taken(limits.tokens, now)
            if requests or tokens:
                found[name] = requests, tokens
        return found

    def adopt(self, taken: Mapping[str, tuple[float, float]]) -> None:
        """Count what callers took by another account, where that is more."""
        now = self.now()
        for name, (requests, tokens) in taken.items():
            one, limits = self._callers.setdefault(name, _Caller()), self.limits_of(name)
            if limits.requests is not None:
                one.requests.adopt(limits.requests, requests, now)
            if limits.tokens is not None:
                one.tokens.adopt(limits.tokens, tokens, now)

    def in_use(self, most: int) -> list[CallerUse]:
        """Return the use of callers that have taken something lately: those with most answers under way."""
        now, found = self.now(), []
        for name, one in heapq.nlargest(most, self._callers.items(), key=lambda item: item[1].num_answers):
            limits = self.limits_of(name)
            found.append(
                CallerUse(
                    name=name,
                    num_answers=one.num_answers,
                    num_adapters=len(one.adapters),
                    requests=None if limits.requests is None else one.requests.taken(limits.requests, now),
                    tokens=None if limits.tokens is None else one.tokens.taken(limits.tokens, now),
                    limits=limits,
                )
            )
        return found

    def headers(self, caller: str) -> list[tuple[bytes, bytes]]:
        """Return OpenAI's headers about the limits a minute of a caller with answers under way."""
        one, limits, now = self._callers.get(caller) or _Caller(), self.limits_of(caller), self.now()
        found = [] if limits.requests is None else one.requests.headers(limits.requests, now)
        return found if limits.tokens is None else [*found, *one.tokens.headers(limits.tokens, now)]

    def _most(self, caller: str) -> int:
        """Return the most answers of a caller."""
        most = self.num_each * max(1, self.num_engines())
        own = self.limits_of(caller).num_answers
        return most if own is None else min(most, own)

    def _check_places(self, one: _Caller, caller: str, num: int) -> None:
        """Raise ``CallerLimit`` unless a caller has so many places left."""
        most = self._most(caller)
        if one.num_answers + num > most:
            raise CallerLimit(
                f"This caller has {one.num_answers} answers under way and asks for {num} more, of {most} at most: "
                "try again when some have ended"
            )


class BodyRoom:
    """The bytes of long bodies, and of each caller's.

    A caller may have as many as would still be free: one alone has half of the room, two have a third each. So there is
    room for one more caller, whatever the others send. One body alone may be longer than all the room, as far as its
    own bound goes.
    """

    def __init__(self, most_bytes: int = MAX_BODIES_BYTES) -> None:
        self._most_bytes = most_bytes
        self._bytes_of = _Counts()
        self.num_bytes = 0

    def enter(self, caller_of: Callable[[], str]) -> ArrivingBody:
        """Return a body that begins to arrive; its caller is asked for if it is long."""
        return ArrivingBody(self, caller_of)

    def take(self, caller: str, num_bytes: int, held: int) -> None:
        """Count more bytes of a body, which holds ``held`` already; ``HttpError`` (429) if others leave no room."""
        is_alone = self.num_bytes == held
        if not is_alone and self._bytes_of[caller] + num_bytes > self._most_bytes - self.num_bytes - num_bytes:
            raise HttpError(
                429,
                "The server has as many long bodies as it takes; please try again.",
                headers={"Retry-After": "1"},  # no "close": the rest is read and dropped, so the client sees this
            )
        self.count(caller, num_bytes)

    def count(self, caller: str, num_bytes: int) -> None:
        """Add the bytes of a body that arrived; a negative number when a body has ended."""
        self._bytes_of.add(caller, num_bytes)
        self.num_bytes += num_bytes


class ArrivingBody:
    """One body; counted from the part on that makes it long, until it is closed."""

    def __init__(self, room: BodyRoom, caller_of: Callable[[], str]) -> None:
        self._room = room
        self._caller_of = caller_of
        self._caller = ""
        self._held = 0

    def grow(self, num_bytes: int) -> None:
        """Count up to ``num_bytes`` of it; ``HttpError`` (429) if the other bodies leave no room."""
        if num_bytes > SHORT_BODY_BYTES:
            if not self._held:
                self._caller = self._caller_of()
            self._room.take(self._caller, num_bytes - self._held, self._held)
            self._held = num_bytes

    def close(self) -> None:
        """Count the bytes of the body no more."""
        if self._held:
            self._room.count(self._caller, -self._held)
            self._held = 0


@dataclass(frozen=True, slots=True, eq=False)
class _Held:
    caller: str
    num_bytes: int
    since_s: float
    break_off: Callable[[], None]


class WaitingAnswers:
    """The long answers that are made and not taken yet. For the event loop's thread alone.

    Answers that clients have had less than ``READ_WITHIN_S`` to take come beside ``most_bytes``.
    """

    def __init__(self, most_bytes: int = MAX_WAITING_BYTES, now_s: Callable[[], float] = time.monotonic) -> None:
        self._most_bytes = most_bytes
        self._now_s = now_s
        self._held: dict[_Held, None] = {}  # the longest first
        self._bytes_of = _Counts()
        self.num_bytes = 0

    @contextlib.contextmanager
    def hold(self, caller_of: Callable[[], str], num_bytes: int, break_off: Callable[[], None]) -> Iterator[None]:
        """Count an answer while inside; ``caller_of`` is called if it is long, ``break_off`` breaks its connection."""
        if num_bytes <= SHORT_BODY_BYTES:
            yield
            return
        one = _Held(caller_of(), num_bytes, self._now_s(), break_off)
        self._held[one] = None
        self._count(one, num_bytes)
        self._make_room()
        try:
            yield
        finally:
            self._drop(one)

    def _make_room(self) -> None:
        while self.num_bytes > self._most_bytes:
            caller = max(self._bytes_of, key=self._bytes_of.__getitem__)
            oldest = next(one for one in self._held if one.caller == caller)
            if (waited_s := self._now_s() - oldest.since_s) < READ_WITHIN_S:
                return
            logger.info("answer_given_up num_bytes=%d waited_s=%.0f", oldest.num_bytes, waited_s)
            self._drop(oldest)
            oldest.break_off()

    def _drop(self, one: _Held) -> None:
        if one in self._held:
            del self._held[one]
            self._count(one, -one.num_bytes)

    def _count(self, one: _Held, num_bytes: int) -> None:
        self._bytes_of.add(one.caller, num_bytes)
        self.num_bytes += num_bytes
