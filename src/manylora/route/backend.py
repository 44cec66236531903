"""One server behind the router: its address and connections, its health, its reports, and the router's requests there.

Health has hysteresis and is told the time and every sign of life. A backend that streams tokens is alive, whatever its
health route answers: polls that fail count only while it sends no bytes. A request without an answer (no connection,
lost) counts always, and an answered request clears the count. A refusal (429, 503) is an answer: back-pressure on one
request, and no sign about the next. A backend that sent nothing to any request for a whole time limit is out at once:
each such sign takes minutes.

::

    JOINING --good poll--> UP --`fall` failures in a row--> DOWN --`rise` good polls in a row--> UP

A backend that failed on requests while its polls were good is held out, twice as long each time up to a bound. It is in
again once a request of the router's own was answered.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from time import monotonic
from typing import Protocol

import msgspec

from manylora.core.routing import ReplicaView
from manylora.route.config import ProxyConfig, is_key
from manylora.route.report import BackendMetrics, Card, ReportedTimes, ServerKind
from manylora.route.upstream.address import Address, request_head
from manylora.route.upstream.connection import Failure
from manylora.route.upstream.pool import Pool, fetch

__all__ = ["Attempt", "Backend", "BackendState", "Health"]

HOLD_S = 2.0  # first time that a backend is held out after it failed on requests, in seconds
MOST_HOLD_S = 60.0
LEAST_SHARE = 0.02  # share of its full load that a backend may have at the beginning of its slow start
STALE_POLLS = 5  # age of metrics, in polls, from which they say nothing about residency

logger = logging.getLogger(__name__)


class BackendState(Enum):
    """Whether a backend gets requests."""

    JOINING = "joining"
    UP = "up"
    DOWN = "down"


@dataclass(eq=False, kw_only=True)
class Health:
    """The state of one backend; ``num_joins`` counts the times that it came up."""

    fall: int  # failures in a row after which it is down
    rise: int  # good polls in a row after which it is up again
    slow_start_s: float  # time over which it gets its share of requests, in seconds
    is_warm: bool  # whether its first requests need no slow start, as when the router itself starts
    state: BackendState = BackendState.JOINING
    reason: str = ""
    num_joins: int = 0
    _num_failed_polls: int = 0
    _num_failed: int = 0
    _num_good_polls: int = 0
    _num_reads_seen: int = 0
    _up_since: float | None = None  # ``None`` without a slow start
    _hold_s: float = 0.0
    _held_until: float = 0.0
    _needs_probe: bool = False

    @property
    def is_up(self) -> bool:
        """Whether the backend gets requests."""
        return self.state is BackendState.UP

    def poll_succeeded(self, now: float) -> bool:
        """Count a good poll; return whether the backend has come up by it."""
        self._num_failed_polls = 0
        self._num_good_polls += 1
        if self.state is BackendState.UP:
            if self._up_since is not None and now - self._up_since > MOST_HOLD_S:
                self._hold_s = 0.0
            return False
        needed = 1 if self.state is BackendState.JOINING else self.rise
        if self._num_good_polls < needed or self._needs_probe:
            return False
        self._up_since = None if self.is_warm else now
        self.is_warm = False
        self._num_failed = 0
        self.state, self.reason = BackendState.UP, ""
        self.num_joins += 1
        return True

    def poll_failed(self, num_reads: int, reason: str) -> bool:
        """Count a failed poll, unless bytes came since the poll before; return whether the backend is lost.

        It is lost again each time that as many polls fail: requests may be tried on a backend that is down.
        ``num_reads`` counts the reads of all its answers so far.
        """
        self._num_good_polls = 0
        self.is_warm = False
        if num_reads != self._num_reads_seen:
            self._num_reads_seen = num_reads
            self._num_failed_polls = 0
            return False
        self._num_failed_polls += 1
        if self._num_failed_polls < self.fall:
            return False
        self._num_failed_polls = 0
        self._go_down(reason)
        return True

    def failed(self, now: float, reason: str) -> bool:
        """Count a request without an answer; return whether the backend has gone down by it."""
        self._num_failed += 1
        return self._num_failed >= self.fall and self.stalled(now, reason)

    def stalled(self, now: float, reason: str) -> bool:
        """Take the backend out until a probe is answered; return whether it has gone down by this."""
        if not self._go_down(reason):
            return False
        self.probe_failed(now)
        return True

    def wants_probe(self, now: float) -> bool:
        """Whether a request must be answered before the backend is up, and may be sent now."""
        return self._needs_probe and now >= self._held_until

    def probe_failed(self, now: float) -> None:
        """Hold the backend out, for longer than before."""
        self._needs_probe = True
        self._hold_s = min(MOST_HOLD_S, max(HOLD_S, 2 * self._hold_s))
        self._held_until = now + self._hold_s

    def answered(self) -> None:
        """Learn that a request or a probe was answered."""
        self._num_failed = 0
        self._needs_probe = False

    def share(self, now: float) -> float:
        """Return the share of its full load that the backend may have, above 0 and up to 1: less in a slow start."""
        if self._up_since is None or self.slow_start_s == 0:
            return 1.0
        return min(1.0, max(LEAST_SHARE, (now - self._up_since) / self.slow_start_s))

    def _go_down(self, reason: str) -> bool:
        self.reason = reason
        if self.state is not BackendState.UP:
            return False
        self.state = BackendState.DOWN
        self._num_good_polls = 0
        return True


class Attempt(Protocol):
    """An attempt of a client's request at a backend."""

    @property
    def has_begun(self) -> bool:
        """Whether bytes of the answer's body came: it can no more be sent elsewhere."""

    def cancel(self, failure: Failure) -> None:
        """End it."""


class Backend:
    """One server behind the router; ``is_warm`` as for ``Health``. For the event loop's thread alone."""

    def __init__(self, address: Address, config: ProxyConfig, *, is_warm: bool) -> None:
        self.address = address
        self.url = address.url
        self.pool = Pool(address, connect_timeout_s=config.connect_timeout_s, ca_certs=config.backend_ca_certs)
        self.health = Health(fall=config.fall, rise=config.rise, slow_start_s=config.slow_start_s, is_warm=is_warm)
        self.view = ReplicaView()  # the requests of this router there, and those of others
        self.place = 0  # its place among all backends, as routers know it; see ``Choice``
        self.kind = ServerKind.OTHER
        self.cards: Mapping[str, Card] = {}
        self.raw_cards: Mapping[str, msgspec.Raw] = {}
        self.outdated: set[str] = set()  # adapters that it lacks, or has in another version; see ``Catalog.hide``
        self.has_restarted = False  # unnoticed by its polls: its adapters are to be looked at before the next requests
        self.needs_models = True  # its list of models is to be read at the next poll
        self.models_body = b""
        self.models_read_at = -float("inf")
        self.reading_models = asyncio.Lock()
        self.metrics = BackendMetrics()
        self.times = ReportedTimes()
        self.metrics_at: float | None = None
        self.num_polls = 0
        self.is_leaving = False
        self.num_reads = 0  # counted by exchanges: signs of life of its process
        self.num_pieces = 0  # of answers that are no errors, and reported tokens: signs of life of its engine
        self.avoid_until = 0.0  # by a 429 or 503 with Retry-After
        self.at_work: set[Attempt] = set()  # attempts of clients' requests
        self._max_in_flight = config.max_in_flight
        self._stale_s = STALE_POLLS * config.poll_s
        self._common_key = config.backend_key
        self.authorization: bytes | None = None  # in place of the client's own
        self.read_key()

    @property
    def num_in_flight(self) -> int:
        """Requests of this router under way there."""
        return self.view.num_requests

    def read_key(self) -> None:
        """Read the key of this backend, which may have changed; one that cannot be read changes nothing."""
        kind, _, rest = self.address.key_from.partition(":")
        key = self._common_key
        try:
            if kind == "file":
                key = Path(rest).read_text(encoding="ascii").strip()
            elif kind == "key":
                key = rest
        except (OSError, ValueError) as error:
            logger.warning("backend_key_unreadable url=%s error=%s", self.url, type(error).__name__)
            return
        if key is not None and not is_key(key):
            logger.warning("backend_key_unusable url=%s", self.url)
            return
        self.authorization = None if key is None else b"Bearer " + key.encode()

    def can_take(self, now: float) -> bool:
        """Whether the backend is up, not avoided, and below its bound of requests, which grows during a slow start."""
        if not self.can_be_forced() or now < self.avoid_until:
            return False
        share = self.health.share(now)
        return share == 1.0 or self.num_in_flight < max(1, int(share * self._max_in_flight))

    def can_be_forced(self) -> bool:
        """Whether the backend is up and below its bound: taken if no backend ``can_take``."""
        return self.health.is_up and self._has_room()

    def can_be_tried(self) -> bool:
        """Whether the backend is down and below its bound: a try may be better than no answer."""
        return self.health.state is BackendState.DOWN and self._has_room()

    def is_resident(self, adapter: str, now: float) -> bool | None:
        """Whether an adapter was on the device before the request that was counted last; ``None`` if that is unknown.

        It is while other requests use it. Else the report decides, while it is young; vLLM reports adapters in use
        alone.
        """
        if self.view.adapters[adapter] > 1:
            return True
        if self.metrics_at is None or now - self.metrics_at > self._stale_s:
            return None
        if self.metrics.on_device is not None:
            return adapter in self.metrics.on_device
        return True if adapter in self.metrics.in_use else None

    def failed(self, reason: str) -> None:
        """Count a request that it did not answer."""
        if self.health.failed(monotonic(), reason) and not self.is_leaving:
            self.went_down()

    def stalled(self) -> None:
        """Take the backend out: it sent nothing to any request for a whole time limit. Its requests go elsewhere."""
        if self.health.stalled(monotonic(), "no progress") and not self.is_leaving:
            self.went_down()
            self.cancel_all(Failure.DOWN)

    def went_down(self) -> None:
        """Log that the backend is down. It may return as another process: its models are read again before it is up."""
        self.needs_models = True
        logger.warning("backend_down url=%s reason=%r", self.url, self.health.reason)

    def cancel_all(self, failure: Failure, *, but_begun: bool = False) -> None:
        """End all attempts under way; with ``but_begun`` not those whose answer has begun."""
        for one in list(self.at_work):
            if not (but_begun and one.has_begun):
                one.cancel(failure)

    async def call(
        self,
        path: bytes,
        body: object = None,
        *,
        timeout_s: float,
        max_bytes: int,
        on_piece: Callable[[bytes], None] | None = None,
    ) -> tuple[int, bytes]:
        """Send a request of the router's own, a ``body`` as JSON by POST; return, and raise, as ``fetch`` does."""
        sent = b"" if body is None else msgspec.json.encode(body)
        head = request_head(
            self.address,
            b"GET" if body is None else b"POST",
            path,
            num_body_bytes=len(sent),
            headers=() if body is None else ((b"content-type", b"application/json"),),
            authorization=self.authorization,
        )
        return await fetch(self.pool, head, sent, timeout_s=timeout_s, max_bytes=max_bytes, on_piece=on_piece)

    def _has_room(self) -> bool:
        return not self.is_leaving and self.num_in_flight < self._max_in_flight
