"""How many replicas: as many as the forecast needs once a start is over, and fewer only after a stay without need.

::

    need      forecast at (now + time of a start), with margin, and the queue, over the rate that a replica can take:
              as given, predicted, or, before that, as seen behind a queue
    up        at once, to the need
    down      to the largest need, with slack, of the last ``stay``; not while the need rises

A replica in use costs time; so does a start. To keep an idle replica for as long as a start costs, several times over,
bounds the loss against a plan that knows the future, as in renting against buying. The slack is a hysteresis: the rate
at which a replica is given up is lower than the one at which it is asked for (docs/scaling.md).
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Protocol

from manylora.core.errors import ConfigError
from manylora.core.scaling.capacity import ReplicaCapacity
from manylora.core.scaling.forecast import RateForecast
from manylora.core.scaling.watch import FleetLoad

__all__ = ["Autoscaler", "Scaler", "ScalingDecision", "ScalingPolicy"]

STARTS_KEPT = 20  # starts whose times are remembered
WINDOW_LOOKS = 10  # looks over which the SLO is judged, or a queue, at least

FEWEST_ANSWERED = 5
"""First tokens behind a queue below which they say nothing about a replica's rate, unless a start could be over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingPolicy:
    """Bounds and prices of scaling."""

    min_replicas: int  # replicas at least
    max_replicas: int  # replicas at most
    ttft_s: float = 2.0  # SLO of the time to first token, in seconds
    goal: float = 0.99  # share of requests that must keep it
    # Requests per second of a replica, from ``manylora plan``; predicted from its steps when ``None``.
    capacity_rps: float | None = None
    utilization: float = 0.75  # share of that capacity that is used
    start_s: float = 30.0  # time of a start before one was seen, in seconds
    look_every_s: float = 1.0  # time between two decisions, in seconds
    quantile: float = 0.75  # share of time in which the forecast must cover the rate
    stay_starts: float = 3.0  # times of a start for which a replica is kept without need
    least_stay_s: float = 15.0  # the same in seconds, at least
    slack: float = 0.1  # part of its capacity by which a smaller fleet must be below need
    max_num_seqs: int = 256  # requests that a replica runs at once
    num_warm: int = 16  # adapters that are on the device of a new replica before it takes requests, at most
    warm_s: float = 10.0  # longest wait for them, in seconds

    def __post_init__(self) -> None:
        if not 1 <= self.min_replicas <= self.max_replicas:
            raise ConfigError(
                f"Got min_replicas = {self.min_replicas}, max_replicas = {self.max_replicas}, expected 1 <= min <= max"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingDecision:
    """A decision, with its grounds."""

    num_wanted: int  # replicas that should serve or start
    rate: float  # present requests per second
    ahead: float  # forecast at the end of a start, with margin, in requests per second
    safe_rate: float | None  # requests per second that a replica should take; ``None`` while unknown
    start_s: float  # expected time of a start, in seconds


class Scaler(Protocol):
    """Decides how many replicas serve."""

    def decide(self, now: float, load: FleetLoad, *, num_serving: int, num_starting: int) -> ScalingDecision:
        """Return the number of replicas that should serve; draining replicas are in neither number."""

    def started(self, took_s: float) -> None:
        """Learn the time that a start took, to the first request that the replica can take."""

    def predict_capacity(self, rate: float) -> None:
        """Learn the requests per second of a replica, as predicted from its steps."""


class Autoscaler:
    """Decides how many replicas a live or simulated fleet should have, each time ``decide`` is called."""

    def __init__(self, policy: ScalingPolicy) -> None:
        self._policy = policy
        self._capacity = ReplicaCapacity(utilization=policy.utilization, goal=policy.goal, rate=policy.capacity_rps)
        self._starts: deque[float] = deque(maxlen=STARTS_KEPT)
        self._forecast = RateForecast(
            memory_s=max(10 * policy.look_every_s, 2 * policy.start_s),
            quantile=policy.quantile,
            recent_s=max(5 * policy.look_every_s, policy.start_s),
        )
        self._needs: deque[tuple[float, int]] = deque()  # falling, so that the first is the largest of the stay
        self._demands: deque[tuple[float, float]] = deque()  # of the last start's time, oldest first
        self._window: tuple[float, int, int, int] | None = None  # since when; judged, kept, replicas at that time
        self._queue: tuple[float, int, int] | None = None  # since when; answered, replicas at that time
        self._contradicted_at = -math.inf  # when the capacity was last corrected by a queue

    @property
    def start_s(self) -> float:
        """Expected time of a start: the longest of the last starts, in seconds."""
        return max(self._starts, default=self._policy.start_s)

    @property
    def stay_s(self) -> float:
        """Time for which a replica without need is kept, in seconds."""
        return max(self._policy.least_stay_s, self._policy.stay_starts * self.start_s)

    @property
    def _window_s(self) -> float:
        """Time over which traffic can contradict the capacity, in seconds."""
        return max(self.start_s, WINDOW_LOOKS * self._policy.look_every_s)

    def started(self, took_s: float) -> None:
        """Learn the time that a start took."""
        self._starts.append(took_s)

    def predict_capacity(self, rate: float) -> None:
        """Learn a prediction of the capacity; ignored if the policy gives one."""
        self._capacity.predict(rate)

    def decide(self, now: float, load: FleetLoad, *, num_serving: int, num_starting: int) -> ScalingDecision:
        """Return the number of replicas that should serve."""
        policy = self._policy
        self._forecast.look(now, load.num_arrivals)
        self._learn(now, load, num_serving)
        horizon_s = self.start_s + policy.look_every_s
        rate, ahead = self._forecast.rate, self._forecast.ahead(horizon_s)
        safe = self._safe_rate(now, self._rate_behind_queue(now, load, num_serving))
        num_present = num_serving + num_starting
        if safe is None:
            needed = kept = num_present
        else:
            # The queue is to be gone when a replica that is asked for now has started.
            demand = max(rate, ahead) + load.num_waiting / horizon_s
            needed = math.ceil(demand / safe)
            kept = math.ceil(demand / (safe * (1 - policy.slack)))
        floor = self._largest_need(now, kept)
        if safe is not None and self._is_rising(now, demand, horizon_s):
            floor = num_present
        wanted = needed if needed > num_present else min(num_present, floor)
        return ScalingDecision(
            num_wanted=min(policy.max_replicas, max(policy.min_replicas, wanted)),
            rate=rate,
            ahead=ahead,
            safe_rate=safe,
            start_s=self.start_s,
        )

    def _safe_rate(self, now: float, seen: float | None) -> float | None:
        """Return the rate that a replica should take: as known, but no more than it was ``seen`` to take at most.

        A queue that stays contradicts the capacity: cold adapters, say, of which no prediction knows.
        """
        known = self._capacity.safe_rate
        if seen is None:
            return known
        if now - self._contradicted_at >= self._window_s:
            self._contradicted_at = now
            self._capacity.contradict(seen)
        most = seen * self._policy.utilization
        return most if known is None else min(known, most)

    def _rate_behind_queue(self, now: float, load: FleetLoad, num_serving: int) -> float | None:
        """Return the requests per second of a replica that always had more to do; ``None`` without such a time.

        It is known long before an engine has fitted its steps, which takes longest where there is most to do. From then
        on it must hold for a window.
        """
        if num_serving == 0 or not self._is_queued(load):
            self._queue = None
            return None
        num_answered = load.num_arrivals - load.num_waiting
        if self._queue is None or self._queue[2] != num_serving:
            self._queue = (now, num_answered, num_serving)
        since, before, _ = self._queue
        num, took_s = num_answered - before, now - since
        if self._capacity.safe_rate is not None:
            least_s = self._window_s
        else:
            least_s = self._policy.ttft_s if num >= FEWEST_ANSWERED else self.start_s
        if took_s < least_s:
            return None
        return max(1, num) / max(took_s, self._policy.look_every_s) / num_serving

    def _is_queued(self, load: FleetLoad) -> bool:
        """Return whether more requests wait for a first token than arrive in the SLO's time."""
        return load.num_waiting > max(1.0, self._forecast.rate * self._policy.ttft_s)

    def _is_rising(self, now: float, demand: float, span_s: float) -> bool:
        """Return whether the demand is above the demand ``span_s`` ago: a replica drained now would soon be needed."""
        demands = self._demands
        demands.append((now, demand))
        while len(demands) > 1 and demands[1][0] <= now - span_s:
            demands.popleft()
        return demand > demands[0][1]

    def _largest_need(self, now: float, need: int) -> int:
        """Return the largest need of the stay."""
        while self._needs and self._needs[-1][1] <= need:
            self._needs.pop()
        self._needs.append((now, need))
        while self._needs[0][0] < now - self.stay_s:
            self._needs.popleft()
        return self._needs[0][1]

    def _learn(self, now: float, load: FleetLoad, num_serving: int) -> None:
        """Correct the capacity at the end of each window: a time without change of the fleet.

        A window begins without a queue. Requests behind an old queue would be late at any rate.
        """
        if self._window is not None:
            since, judged, kept, num = self._window
            if num == num_serving and now - since < self._window_s:
                return
            self._capacity.learn(self._forecast.rate / num, load.num_judged - judged, load.num_kept - kept)
        is_known = num_serving > 0 and not self._is_queued(load)
        self._window = (now, load.num_judged, load.num_kept, num_serving) if is_known else None
